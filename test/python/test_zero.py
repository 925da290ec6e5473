"""ZeRO and hybrid sharding as a person uses them: the same run at every stage, resumed from one stage at another, what Open
MPI saw being sent, what the operating system saw being taken, and a process that dies. What the ranks' own numbers are,
step for step, is test/mpi/sharded_training_test.cpp's."""

import hashlib
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

import program
from refused import one_error

TINY = ["--layers=3", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]
STAGES = [["--zero-stage=0"], ["--zero-stage=1"], ["--zero-stage=2"], ["--zero-stage=3"], ["--zero-stage=3", "--zero-shard-size=2"],
          ["--zero-stage=1", "--zero-shard-size=2"], ["--zero-stage=3", "--prefetch-units=0"], ["--zero-stage=3", "--prefetch-units=5"],
          ["--zero-stage=3", "--reshard-after-forward=false"], ["--zero-stage=3", "--overlap-grad-reduce=false"],
          ["--zero-stage=3", "--recompute=block"], ["--zero-stage=0", "--recompute=selective", "--recompute-every=2"]]
PEAK = program.ROOT / program.BUILD / "test/tools/peak_memory"


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(folder, *options, ranks=4, **how):
    """The run; what must be the same of runs that are; and what was printed."""
    out = program.run(f"--out-dir={folder}", *TINY, *options, f"--export={folder}/w.safetensors", ranks=ranks, **how).stdout
    run = program.Run(folder)
    newest = sorted(folder.glob("checkpoint-*"))[-1]
    files = [digest(folder / "w.safetensors")] + [digest(newest / name) for name in ("model.safetensors", "optimizer.safetensors")]
    return run, (run.losses, run.column("grad_norm"), run.lines[-1].get("val_loss"), files), out


def sample(out):
    return out[out.index("-- sample"):].split("\n\n")[0]


def test_every_stage_is_the_same_run(tmp_path):
    options = ["--steps=6", "--micro-batch-size=3", "--reduce-every=micro-batch", "--sample-tokens=30", "--check-replicas-every=2"]
    runs = [train(tmp_path / str(number), *options, *stage) for number, stage in enumerate(STAGES)]
    for (_, results, out), stage in zip(runs, STAGES):
        assert results == runs[0][1], stage
        assert sample(out) == sample(runs[0][2])
    assert "ZeRO-3: parameters, gradients and optimizer state in 2 shards, 2 times" in runs[4][2].replace("\n              ", " ")
    assert runs[4][0].record["mesh"] == {"world": 4, "pipeline": 1, "data": 4, "tensor": 1, "zero_stage": 3, "shards": 2,
                                            "replicas": 2}


@pytest.mark.parametrize("saved, resumed", [(("--zero-stage=3", 2), ("--zero-stage=0", 4)), (("--zero-stage=0", 4), ("--zero-stage=3", 2)),
                                            (("--zero-stage=2", 3), ("--zero-stage=1", 2)), (("--zero-stage=3", 4), ("--zero-stage=3", 4))])
def test_a_checkpoint_of_one_stage_goes_on_at_another(saved, resumed, tmp_path):
    """To the bit what the other stage would have made of the same weights: resumed at stage 0 they train the same."""
    options = ["--micro-batch-size=2", "--reduce-every=step", "--lr-schedule=constant", "--sample-tokens=0", "--dtype=bf16",
               "--stochastic-rounding"]
    first, _, _ = train(tmp_path / "first", *options, "--steps=3", saved[0], ranks=saved[1])
    checkpoint = first.out_dir / "checkpoint-00000003"
    on, results, _ = train(tmp_path / "on", *options, "--steps=6", f"--resume={checkpoint}", resumed[0], ranks=resumed[1])
    whole, expected, _ = train(tmp_path / "whole", *options, "--steps=6", f"--resume={checkpoint}", ranks=resumed[1])
    assert results == expected
    assert on.column("step") == whole.column("step") == [4, 5, 6]


def test_weights_from_a_file(tmp_path):
    """Read by one process, and sent to the shards."""
    train(tmp_path / "first", "--steps=2", "--sample-tokens=0", ranks=1)
    options = ["--steps=3", "--sample-tokens=0", "--reduce-every=step", f"--init={tmp_path}/first/w.safetensors"]
    whole = train(tmp_path / "whole", *options)[1]
    for stage in (1, 3):
        assert train(tmp_path / str(stage), *options, f"--zero-stage={stage}")[1] == whole


def test_print_step_shows_what_is_gathered():
    out = program.run(*TINY, "--zero-stage=3", "--micro-batch-size=3", "--print-step", ranks=2).stdout
    assert "2 data ranks, ZeRO-3: parameters, gradients and optimizer state in 2 shards" in out
    lines = out.splitlines()
    assert any(re.search(r"communication +gather_parameters +h\.2 .*parameters h\.2 \(in h\.0's place\)", line) for line in lines)
    assert any(re.search(r"communication +reduce_scatter +h\.2 .*gradients h\.2 \(in h\.0's place\) -> gradient shard h\.2", line)
               for line in lines)


def test_what_whole_gradients_cost_is_said():
    deep = ["--layers=8", "--channels=64", "--heads=2", "--seq-len=16", "--global-batch-tokens=384", "--micro-batch-size=3", "--steps=0"]
    out = program.run(*deep, "--zero-stage=3", "--reduce-every=step", ranks=4).stdout
    assert re.search(r"gradients +whole until the step's last micro-batch \(--reduce-every step\), which takes [\d.]+ [KM]iB", out)
    assert "whole until" not in program.run(*deep, "--zero-stage=3", ranks=4).stdout


# ---- what is sent


def sent(folder, *options, ranks):
    """Bytes that Open MPI sent from point to point, of all ranks."""
    folder.mkdir(parents=True)
    train(folder / "run", *options, ranks=ranks,
          env={"OMPI_MCA_pml_monitoring_enable": "2", "OMPI_MCA_pml_monitoring_enable_output": "3",
               "OMPI_MCA_pml_monitoring_filename": str(folder / "monitoring")})
    reports = [path.read_text() for path in folder.glob("monitoring.*.prof")]
    assert len(reports) == ranks
    return sum(int(count) for report in reports for count in re.findall(r"^E\t\d+\t\d+\t(\d+) bytes", report, re.M))


def padded_units(ranks):
    """Elements of TINY's units: tensors begin at multiples of 128, and a shard is of whole blocks of 1024."""
    C, T, V = 32, 16, 256
    block = [C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C]
    units = [[V * C], [T * C], *([block] * 3), [C, C]]
    ends = [sum(-(-tensor // 128) * 128 for tensor in unit[:-1]) + unit[-1] for unit in units]
    return [-(-end // (1024 * ranks)) * 1024 * ranks for end in ends]


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
@pytest.mark.parametrize("stage", [["--zero-stage=0"], ["--zero-stage=1"], ["--zero-stage=3"], ["--zero-stage=3", "--zero-shard-size=2"]],
                         ids=lambda stage: " ".join(stage))
def test_open_mpi_sent_what_the_list_says(stage, tmp_path):
    """Four more steps send four times what the list says, and what a step sends besides: sums of squares, loss, signals."""
    options = ["--micro-batch-size=3", "--val-batches=1", "--sample-tokens=0", *stage]
    few, more = (sent(tmp_path / str(steps), *options, f"--steps={steps}", ranks=4) for steps in (2, 6))
    listed = program.Run(tmp_path / "2/run").record["bytes_sent"]
    besides = (more - few) / 4 / 4 - listed["inside"] - listed["across"]
    # Four bytes of a sum of squares for every 1024 elements, to each other rank of the group; and two scalars in fp64, to
    # each other rank: the loss, and whether a signal came.
    shards = program.Run(tmp_path / "2/run").record["mesh"]["shards"]
    squares = 4 * sum(padded // 1024 for padded in padded_units(4)) // shards * (shards - 1)
    assert besides == squares + 2 * 8 * 3


# ---- what is taken


def test_the_peak_is_what_was_planned():
    """GPT-2 124M in bf16 at stage 3 on 4 processes, as the operating system saw it."""
    command = ["scripts/launch.sh", "-np", "4", str(PEAK), "--model=gpt2", "--dtype=bf16", "--seq-len=64", "--global-batch-tokens=256",
               "--micro-batch-size=1", "--zero-stage=3"]
    ended = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True, timeout=300 * program.PATIENCE)
    assert ended.returncode == 0, ended.stderr
    figures = [list(map(int, line.split()[1:])) for line in ended.stdout.splitlines() if line.startswith("bytes")]
    assert len(figures) == 4
    for planned, peak in figures:
        print(f"planned {planned / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB")
        assert 0.9 * planned <= peak <= 1.1 * planned


# ---- what dies


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_process_ends_the_job(stage, tmp_path):
    command = ["scripts/launch.sh", "-np", "3", program.PROGRAM, *TINY, f"--out-dir={tmp_path}", "--steps=1000000", "--layers=8",
               "--channels=128", f"--zero-stage={stage}", "--sample-tokens=0", "--comm-timeout=20"]
    job = subprocess.Popen(command, cwd=program.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert job.poll() is None
        time.sleep(0.05)
    start = time.monotonic()
    os.kill(max(processes(str(tmp_path))), signal.SIGKILL)
    err = job.communicate(timeout=60 * program.PATIENCE)[1]
    assert job.returncode != 0 and time.monotonic() - start < 40 * program.PATIENCE
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) <= 1, err


def processes(folder):
    """Those of the trainer that work in a folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].decode().endswith("train_gpt") and any(folder in word.decode(errors="replace") for word in words):
            found.append(int(path.name))
    return found


# ---- what is refused


@pytest.mark.parametrize("options, words", [
    (["--zero-stage=4"], ["--zero-stage 4 is out of range; give 0 to 3"]),
    (["--zero-stage=1", "--zero-shard-size=3"], ["--zero-shard-size 3 does not divide the 4 processes; 1, 2, 4 would"]),
    (["--zero-shard-size=2"], ["--zero-shard-size is for --zero-stage 1, 2 or 3"]),
    (["--zero-stage=1", "--zero-shard-size=0"], ["--zero-shard-size 0 is out of range"]),
    (["--zero-stage=2", "--prefetch-units=2"], ["--prefetch-units is for --zero-stage 3"]),
    (["--zero-stage=3", "--prefetch-units=-1"], ["--prefetch-units -1 is out of range"]),
    (["--zero-stage=2", "--reshard-after-forward=false"], ["--reshard-after-forward=false is for --zero-stage 3"]),
    (["--reduce-every=epoch"], ["--reduce-every: 'epoch'", "{step,micro-batch}"]),
], ids=lambda value: " ".join(value) if value[0].startswith("--") else "")
def test_wrong_options(options, words, tmp_path):
    ended = program.run(*TINY, *options, f"--out-dir={tmp_path}/run", ranks=4, check=False)
    assert ended.returncode == 1 and ended.stdout == "" and not (tmp_path / "run").exists()
    line = one_error(ended.stderr)
    for word in words:
        assert word in line
