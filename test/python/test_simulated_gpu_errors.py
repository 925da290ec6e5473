"""Failures of GPUs, on simulated ones (simulated.py): one line on standard error, status 1, and no hang."""

import dataclasses
import functools
import os
import pathlib
import re
import signal
import subprocess
import time

import program
import pytest
import simulated
import tcp_job
from refused import one_error

simulated.require()

CPU = str((program.ROOT / program.PROGRAM).resolve())
MODEL = ["--layers=1", "--heads=2", "--channels=16", "--seq-len=8", "--global-batch-tokens=16", "--steps=2",
         "--sample-tokens=0"]
GPT2 = ["--layers=12", "--heads=12", "--channels=768", "--seq-len=1024", "--vocab-size=50257", "--global-batch-tokens=16384"]
NO_GPU = {"SIMT_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}
ONE_GPU = {"SIMT_GPUS": "1"}
OF_GPUS = "needs a GPU, but this run computes on the CPU; leave it out, or try --device cuda"
ILLEGAL = "CUDA says \"an illegal memory access was encountered\" (cudaErrorIllegalAddress)"
FAULT = f"{ILLEGAL}; to find out which kernel failed, use --cuda-sync"


@dataclasses.dataclass
class Case:
    name: str
    options: list
    words: list  # words that the line contains
    variables: dict = dataclasses.field(default_factory=dict)
    ranks: int = 1
    executable: str = simulated.PLAIN
    late: bool = False  # found after the header is printed
    pattern: str = ""  # a pattern for the whole line


CASES = [
    Case("two processes on one GPU", [], ["processes 0 and 1 would share one GPU (GPU simulated", "--share-gpu"], ONE_GPU, 2),
    Case("no GPU", ["--device=cuda"], ["--device cuda: no GPU: NVIDIA driver not found", "try --device cpu"], NO_GPU),
    Case("no GPU, two processes", ["--device=cuda"], ["--device cuda: no GPU: NVIDIA driver not found"], NO_GPU, 2),
    Case("no GPU on this machine", ["--device=cuda"], ["--device cuda: ", "try --device cpu"], NO_GPU, executable=CPU),
    Case("an older driver", [], ["the NVIDIA driver is for CUDA 12.2, but this program needs one for CUDA 13.0", "--device cpu"], {"SIMT_DRIVER": "12020"}),
    *(Case(f"no pinned memory: {name}", ["--offload-optimizer=cpu"], ["of pinned host memory are not to be had; end other programs"], {name: value}, late=True)
      for name, value in (("SIMT_FAIL", "hostmalloc:1"), ("SIMT_HOST_MEMORY", "1000"))),
    Case("a GPU that is too old", ["--device=cuda"], [], {"SIMT_CHIP": "75"}, pattern=
         r"GPU 0, .* \(sm_75\), has compute capability 7\.5, but the kernels need 8\.0; try --device cpu"),
    Case("a GPU of another kind", ["--device=cuda"], [], {"SIMT_CHIP": "100"}, pattern=
         r"GPU 0, .* \(sm_100\), is of another kind \(sm_100\) than this program was compiled for \(see --version\); "
         "build it again with GPU_ARCH=100, or use --device cpu"),
    # ---- memory: sizes that cannot fit are known before; memory that other processes take is not
    Case("a model that does not fit", ["--channels=800", "--heads=10"], [], {"SIMT_GPU_MEMORY": "45000000"}, pattern=
         r"too large a model: 7,903,200 parameters and a micro-batch of 1 sequence need 1\d\d\.\d MiB of memory "
         r"\(the largest arenas are moments 60\.\d MiB, \w+ \d\d\.\d MiB and \w+ \d\d\.\d MiB\), but the GPU has 37\.6 MiB free; "
         "give a smaller --model"),
    Case("a size that makes a model not fit", ["--seq-len=40000", "--global-batch-tokens=80000"], ["--seq-len 40000: ", "; give a smaller --seq-len"],
         {"SIMT_GPU_MEMORY": "45000000"}),
    Case("a model that does not fit twice", ["--share-gpu"], ["need 32.", "iB) in each of 2 processes, but the GPU has"],
         {**ONE_GPU, "SIMT_GPU_MEMORY": "60000000"}, 2),
    Case("a micro-batch that does not fit", [*GPT2, "--micro-batch-size=16"], [], pattern=
         r"--micro-batch-size 16: 124,439,808 parameters and a micro-batch of 16 sequences need [789]\.\d GiB of memory "
         r"\(the largest arenas are activations 5\.\d GiB, moments 949\.\d MiB and \w+ 474\.\d MiB\), but the GPU has 3\.8 GiB free; "
         "--micro-batch-size 4 would fit"),
    Case("what no micro-batch makes fit", [*GPT2, "--micro-batch-size=16"],
         ["too large a model: 124,439,808 parameters and a micro-batch of 1 sequence need", "; give a smaller --model; --offload-optimizer cpu would fit"],
         {"SIMT_GPU_MEMORY": "2000000000"}),
    *(Case(f"no memory for the {arena}", [],
           [f"the arena {arena} needs ",
            f"iB of the GPU's memory, but 4.0 GiB of 4.0 GiB are free; end other programs that use it (nvidia-smi lists them){advice}"],
           {"SIMT_FAIL": f"memory:{number}"}, ranks, late=True)
      for ranks, number, arena, advice in ((1, 1, "parameters", ", or give a smaller --model, or more GPUs"), (1, 3, "master", ", or give a smaller --model"),
                                           (1, 5, "activations", ", or give a smaller --micro-batch-size or --recompute block"),
                                           (1, 6, "workspace", ""), (2, 1, "of NCCL connections", ""), (2, 3, "gradients", ", or give a smaller --model"))),
    # ---- a kernel fails, while algorithms are timed and in a step
    *(Case(f"launch {number} fails", [], [FAULT], {"SIMT_FAIL": f"launch:{number}"}, ranks, late=True)
      for number, ranks in ((1, 1), (300, 1), (300, 2))),
    # The number determines the kernel, because products are timed a fixed number of times.
    *(Case(f"launch {number} fails and is named", ["--cuda-sync"],
           [], {"SIMT_FAIL": f"launch:{number}"}, ranks, late=True, pattern=
           rf"kernel {kernel}_kernel\d+(<.*>)? \(.* threads\) failed: an illegal memory access was encountered"
           if kernel else rf"{product} .*: {re.escape(ILLEGAL)}")
      for number, ranks, kernel, product in (
          (1, 1, "encoder_forward", ""), (3, 1, "", "timing the product 48x16x16 TN bf16>bf16 bias"),
          (41, 1, "", "the product 48x16x16 TN bf16>bf16 bias"), (42, 1, "attention_forward", ""), (122, 1, "gelu_forward", ""),
          (995, 1, "norm_forward", ""), (16, 2, "", "timing the product 48x8x16 TN bf16>bf16 bias"),
          (995, 2, "norm_forward", ""))),
    Case("a copy fails", [], ["cudaMemcpyAsync: " + FAULT], {"SIMT_FAIL": "memcpy:5"}, late=True),
    Case("a copy fails, and kernels are waited for", ["--cuda-sync"], [], {"SIMT_FAIL": "memcpy:5"}, late=True,
         pattern=re.escape("cudaMemcpyAsync: " + ILLEGAL)),
    # ---- NCCL fails with all processes alive: found while the host waits, or by its next call
    *(Case(f"operation {number} of NCCL fails", ["--zero-stage=1"], [], {"SIMT_FAIL": f"nccl:{number}", "SIMT_NCCL_SECONDS": "20"}, 2,
           late=True, pattern=r'(a collective in flight|nccl\w+): NCCL says "unhandled system error .*": the simulated network failed; '
                              "for details, set NCCL_DEBUG=INFO")
      for number in (1, 4, 9)),
    # ---- options
    Case("attention by cuDNN", ["--attention=cudnn"], ["built without cuDNN; install cudnn.h", "make deps-gpu",
                                                       "use --attention flash"]),
    Case("attention by cuDNN in fp32", ["--attention=cudnn", "--dtype=fp32"], ["needs --dtype bf16, but --dtype is fp32"]),
    Case("TF32 of bf16", ["--tf32", "--dtype=bf16"], ["--tf32 needs --dtype fp32, but --dtype is bf16"]),
    Case("TF32 of what is bf16 without being said", ["--tf32"], ["--tf32 needs --dtype fp32, but --dtype is bf16"]),
    *(Case(f"{option} on the CPU{where}", [option, *more], [option.replace("=", " "), OF_GPUS], variables)
      for option in ("--tf32", "--attention=cudnn", "--cuda-sync", "--share-gpu")
      for where, more, variables in (("", ["--device=cpu"], {}), (" for want of a GPU", [], NO_GPU))),
    # ---- sizes that kernels refuse
    Case("heads of 12 channels", ["--channels=36", "--heads=3"],
         ["heads of a multiple of 8 elements up to 128, but these have 12"]),
    Case("heads of 132 channels", ["--channels=264"], ["multiple of 8 elements up to 128, but these have 132"], ranks=2),
    Case("channels beyond a block's registers", ["--channels=6272", "--heads=49", "--dtype=fp32"],
         ["--channels 6272 is out of range for the GPU's kernels in fp32; give at most 6144"],
         {"SIMT_GPU_MEMORY": "100000000000"}),
    Case("a vocabulary beyond shared memory", ["--vocab-size=6000000"], ["--vocab-size 6000000 is out of range for this GPU"]),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """The result of every requested case, by its name."""
    asked = {item.callspec.params["case"].name for item in request.session.items
             if getattr(item, "originalname", "") == "test_is_told_in_one_line"}
    base = tmp_path_factory.mktemp("errors")

    def result_of(case, folder):
        # With its own cache, so that algorithms are timed.
        return simulated.run([*MODEL, *case.options, "--out-dir", folder / "run"], folder, case.ranks, case.executable,
                             variables={"XDG_CACHE_HOME": str(folder / "cache"), **case.variables})

    cases = [case for case in CASES if case.name in asked]
    results = simulated.at_once(*(functools.partial(result_of, case, base / str(number)) for number, case in enumerate(cases)))
    return {case.name: (result, base / str(number)) for number, (case, result) in enumerate(zip(cases, results))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.ranks}")
def test_is_told_in_one_line(case, outcomes):
    result, folder = outcomes[case.name]
    line = one_error(result.stderr)
    assert result.returncode == 1
    for word in case.words:
        assert word in f"error: {line}"
    assert not case.pattern or re.fullmatch(case.pattern, line), line
    # A wrong setting is reported before the header. Only faults in the work itself come later.
    assert case.late or result.stdout == ""
    assert not (folder / "run").exists()


# ---- cases without an error


@pytest.mark.parametrize("variable", ["SIMT_FAIL=hostmalloc:1", "SIMT_HOST_MEMORY=1000"])
def test_checkpoints_without_a_copy(variable, tmp_path):
    run = simulated.train(tmp_path, *MODEL, "--steps=3", "--checkpoint-every=1", "--device=cuda", variables=dict([variable.split("=")]))
    assert "note: checkpoints are saved between steps: there is no room for a copy of " in run.output
    assert {path.name for path in run.out_dir.glob("checkpoint-*")} == {f"checkpoint-{step:08}" for step in (1, 2, 3)}


def test_without_a_gpu_it_is_the_cpu_and_that_is_said(tmp_path):
    result = simulated.run([*MODEL, "--out-dir", tmp_path / "run"], tmp_path, variables=NO_GPU)
    assert result.returncode == 0 and result.stderr == ""
    assert "; no GPU: NVIDIA driver not found" in result.stdout
    configuration = program.Run(tmp_path / "run").record["configuration"]
    assert (configuration["device"], configuration["dtype"]) == ("cpu", "fp32")


def test_processes_share_a_gpu_where_they_are_told_to(tmp_path):
    run = simulated.train(tmp_path, *MODEL, "--share-gpu", ranks=2, variables=ONE_GPU)
    assert run.record["configuration"]["device"] == "cuda" and len(run.lines) == 2


@pytest.mark.parametrize("uuid", ["gpu$OMPI_COMM_WORLD_RANK", "gpu0"], ids=["GPUs of their own", "one GPU"])
def test_gpus_are_told_apart_by_their_uuids(uuid, tmp_path):
    """Each process sees one GPU, at index 0."""
    options = ["-c", f'SIMT_GPUS=1 SIMT_GPU_UUID={uuid} exec "$0" "$@"', simulated.PLAIN, *MODEL, "--out-dir", tmp_path / "run"]
    result = simulated.run(options, tmp_path, 2, executable="/bin/sh")
    if uuid == "gpu0":
        assert result.returncode == 1 and one_error(result.stderr).startswith("processes 0 and 1 would share one GPU")
    else:
        assert result.returncode == 0, result.stderr
        run = program.Run(tmp_path / "run")
        assert run.record["configuration"]["device"] == "cuda" and len(run.lines) == 2


def test_a_process_without_a_gpu_among_others_with_one_is_refused(tmp_path):
    """One rank of two finds no GPU."""
    options = ["-c", 'SIMT_GPUS=$OMPI_COMM_WORLD_RANK exec "$0" "$@"', simulated.PLAIN, *MODEL, "--out-dir", tmp_path / "run"]
    result = simulated.run(options, tmp_path, 2, executable="/bin/sh")
    assert result.returncode == 1
    assert one_error(result.stderr).startswith("process 0 has no GPU, but others have one")


def test_processes_with_gpus_of_two_kinds_are_refused(tmp_path):
    """Rank 0 has another chip than rank 1."""
    options = ["-c", 'SIMT_CHIP=$((80 + 10 * OMPI_COMM_WORLD_RANK)) exec "$0" "$@"', simulated.PLAIN, *MODEL, "--out-dir",
               tmp_path / "run"]
    result = simulated.run(options, tmp_path, 2, executable="/bin/sh")
    assert result.returncode == 1 and result.stdout == ""
    assert re.fullmatch(r"process 1 has another kind of GPU or other libraries than process 0 \(GPU .* \(sm_90\) with 132 .*; "
                        r"GPU .* \(sm_80\) with 108 .*\), .*; start all processes on equal GPUs, or use --device cpu",
                        one_error(result.stderr))


# ---- ranks that fail


def children_of(process):
    """The ids of a process's children."""
    return [int(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/stat")
            if path.exists() and path.read_text().rpartition(")")[2].split()[1] == str(process)]


ENDLESS = [*MODEL, "--layers=2", "--steps=1000000", "--seq-len=32", "--global-batch-tokens=256", "--micro-batch-size=1"]
# A rank uses several communicators, each with work in flight.
MESHES = {"pipeline and tensor": ["--pipeline-parallel=2", "--tensor-parallel=2"],
          "hybrid": ["--zero-stage=3", "--zero-shard-size=2"]}
LIMIT = 5


def wait_for_steps(folder, is_alive):
    """Waits until three steps are done and the next one has begun."""
    # A step takes several tenths of a second, nearly all of it in the GPUs' work.
    metrics, deadline = folder / "run/metrics.jsonl", time.monotonic() + simulated.SECONDS
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.1)


def end_while_training(signal_sent, folder, options=(), ranks=2):
    """Sends a signal to the last rank in its fourth step. Returns the status, standard error and the seconds."""
    command, environment = simulated.command_of(
        simulated.PLAIN, [*ENDLESS, "--out-dir", folder / "run", *options], folder, ranks)
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          stdin=subprocess.DEVNULL) as job:
        try:
            wait_for_steps(folder, lambda: job.poll() is None)
            own_rank = f"OMPI_COMM_WORLD_RANK={ranks - 1}".encode()
            last, = (child for child in children_of(job.pid)
                     if own_rank in pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0"))
            begin = time.monotonic()
            os.kill(last, signal_sent)
            stderr = job.communicate(timeout=simulated.SECONDS)[1]
            return job.returncode, stderr, time.monotonic() - begin
        finally:
            if job.poll() is None:
                job.terminate()  # mpirun then ends its ranks


def end_over_tcp(signal_sent, folder, options, ranks=4):
    """The same over TCP. Returns the statuses of the others, standard error and the seconds."""
    job = tcp_job.Job(ranks, seconds=simulated.SECONDS)
    try:
        job.start_all(simulated.PLAIN, *ENDLESS, "--out-dir", folder / "run", *options, SIMT_GPUS=str(ranks))
        wait_for_steps(folder, lambda: job.processes[0].poll() is None)
        begin = time.monotonic()
        job.processes[-1].send_signal(signal_sent)
        statuses = [process.wait(simulated.SECONDS) for process in job.processes[:-1]]
        seconds = time.monotonic() - begin
    finally:
        for process in job.processes:
            process.kill()
        ended = job.end()
    return statuses, ended.err, seconds


@pytest.mark.parametrize("ranks, options", [(2, []), (4, MESHES["pipeline and tensor"])], ids=["data", "pipeline and tensor"])
def test_a_killed_rank_ends_the_job(ranks, options, tmp_path):
    status, stderr, seconds = end_while_training(signal.SIGKILL, tmp_path, options, ranks)
    assert status == 128 + signal.SIGKILL
    assert stderr.count("mpirun noticed that process rank") == 1
    # Another rank may hear of it from NCCL, if mpirun takes long to end that rank.
    own = [line for line in stderr.splitlines() if line.startswith(("error:", "simt:"))]
    assert not own or (len(own) == 1 and 'NCCL says "remote process exited' in own[0])
    assert seconds < 10 * program.PATIENCE


def test_a_killed_rank_is_named_over_tcp(tmp_path):
    statuses, stderr, seconds = end_over_tcp(signal.SIGKILL, tmp_path, MESHES["pipeline and tensor"])
    assert re.fullmatch("rank 3 is gone: .*; the job ends", one_error(stderr))
    assert statuses == [1] * 3 and seconds < 10 * program.PATIENCE


def check_stopped(stderr, seconds, rank):
    # In the GPU's work, or between two steps, when the ranks agree on whether to stop.
    line = one_error(stderr)
    advice = "; if a step takes that long on these GPUs, give a longer --comm-timeout"
    match = re.fullmatch(rf"rank \d waited {LIMIT} s in (the GPU's work|\w+) for rank {rank}, which does not answer; the job ends(.*)",
                         line)
    assert match and match[2] == (advice if match[1] == "the GPU's work" else ""), line
    assert LIMIT - 1 <= seconds < LIMIT + 20 * program.PATIENCE


@pytest.mark.parametrize("ranks, options", [(2, []), (4, MESHES["hybrid"])], ids=["data", "hybrid"])
def test_a_stopped_rank_ends_the_job_with_one_line(ranks, options, tmp_path):
    status, stderr, seconds = end_while_training(signal.SIGSTOP, tmp_path, [*options, f"--comm-timeout={LIMIT}"], ranks)
    check_stopped(stderr, seconds, ranks - 1)
    assert status == 1


def test_a_stopped_rank_is_named_over_tcp(tmp_path):
    statuses, stderr, seconds = end_over_tcp(signal.SIGSTOP, tmp_path, [*MESHES["pipeline and tensor"], f"--comm-timeout={LIMIT}"])
    check_stopped(stderr, seconds, 3)
    assert statuses == [1] * 3
