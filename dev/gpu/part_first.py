"""The part `first` of the check: what only a GPU can tell, on the first one that runs the program.

Each check runs in a process of its own, which may crash or hang, and has an equal share of the time that is left. Its
failure has the end of what it printed.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import part_kernels
import part_model
import programs
import results
from results import CheckFailed, Late, Skipped, TimeOver

GRACE_SECONDS = 10  # for the process itself, after the end of its programs' time
WARMUP = 5  # steps


def gpt2(extent, batches, *more):
    """The options of GPT-2 124M on the embedded stories, with this many micro-batches a step."""
    size = [*extent.text_model(), "--layers=2"] if extent.tiny else ["--model=gpt2"]
    sequences, T = (1, 8) if extent.tiny else (4, 1024)
    return [*size, "--dtype=bf16", "--val-every=0", "--val-batches=1", f"--micro-batch-size={sequences}",
            f"--global-batch-tokens={batches * sequences * T}", *more]


def te_fp8(extent, folder):
    return part_model.against_cpu(extent, folder, "te-fp8", "flash", extent.bf16_steps)


def algorithms(extent, folder):
    """Without the choices of other checks, whose shapes may be the same."""
    run = programs.train(folder / "run", *gpt2(extent, 1, "--steps=2"), XDG_CACHE_HOME=str(folder))
    said = " ".join(run.said.split())
    found = re.search(r"cuBLASLt's algorithms that failed: (\d+), that gave other bits each time: (\d+)", said)
    failing, varying = map(int, found.groups()) if found else (0, 0)
    return {"status": "measured", "detail": f"{failing} fail, {varying} give other bits each time", "failing": failing,
            "varying": varying}


def instructions(extent, folder):
    return part_kernels.run_suite("Ptx*")


def two_stages(extent, folder):
    return part_model.on_ranks(extent, folder, 2, "--pipeline-parallel=2")


def most_blocks(extent, folder):
    """NCCL's blocks leave fewer multiprocessors to the kernels of the passes."""
    steps = 2 if extent.tiny else 20
    options = gpt2(extent, 8, "--pipeline-parallel=2", f"--steps={steps}")
    found = {}
    least = 3 * 32  # two pairs of stages, and a collective
    for name, variables in {"default": {}, "32": {"NCCL_MAX_CTAS": "32"}}.items():
        try:
            run = programs.train(folder / name, *options, ranks=2, share=False, **variables)
        except CheckFailed as refused:
            if "would share one GPU" in str(refused):
                raise Skipped("there is one GPU") from refused
            raise
        # The first line is the kind of GPU.
        multiprocessors = re.search(r"with (\d+) multiprocessors", (run.out_dir / "algorithms.txt").read_text())
        if int(multiprocessors[1]) < least:
            raise Skipped(f"NCCL would want {least} multiprocessors, and there are {multiprocessors[1]}")
        found[name] = statistics.median(run.column("step_ms")[0 if extent.tiny else WARMUP:])
    detail = f"{found['default']:.1f} ms a step, {found['32']:.1f} ms with it"
    return {"status": "measured", "detail": detail, "step_ms": found}


def offload(extent, folder):
    return part_model.offloaded(extent, folder, [("cpu", "none")])


CHECKS = {
    "te-fp8 against the CPU device": te_fp8,
    "algorithms of cuBLASLt for GPT-2 124M": algorithms,
    "PTX instructions": instructions,
    "two pipeline stages against one process, fp32": two_stages,
    "NCCL_MAX_CTAS=32, two pipeline stages on two GPUs": most_blocks,
    "optimizer state in host memory, bit for bit, bf16": offload,
}


def run(found, tiny):
    checks = found.left_first([(name,) for name in CHECKS])
    for number, (name,) in enumerate(checks):
        found.attempt(name, alone, name, tiny, max(0, found.seconds_left()) / (len(checks) - number))


def end_session(session):
    """Kills the processes of a session. (Each trainer has a process group of its own.)"""
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name in parentheses: state, parent, process group, session.
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                os.kill(int(stat.parent.name), signal.SIGKILL)


def alone(name, tiny, seconds):
    """What the check returns or raises, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        log, answer = pathlib.Path(folder, "log"), pathlib.Path(folder, "answer")
        with open(log, "w") as said:
            command = [sys.executable, __file__, name, str(seconds), folder, "tiny" if tiny else ""]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        try:
            status = process.wait(seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise Late(f"the check was ended after {seconds:.0f} s", log.read_text(errors="replace")) from late
        finally:
            end_session(process.pid)
            process.wait()
        if not answer.exists():
            raise CheckFailed(f"the check ended with status {status}", log.read_text(errors="replace"))
        exception, *rest = json.loads(answer.read_text())
    if exception:
        raise getattr(results, exception)(*rest)
    return rest[0]


def main(name, seconds, folder, tiny):
    """The process of a check: writes [name of the exception, its arguments], or ["", the check's result]."""
    programs.Clock.end = time.monotonic() + float(seconds)
    try:
        answer = ["", CHECKS[name](part_model.Extent(bool(tiny)), pathlib.Path(folder))]
    except CheckFailed as failure:
        answer = [type(failure).__name__, str(failure), failure.output]
    except Skipped as reason:
        answer = [type(reason).__name__, *([] if isinstance(reason, TimeOver) else [str(reason)])]
    pathlib.Path(folder, "answer").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
