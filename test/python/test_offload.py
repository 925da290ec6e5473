"""--offload-optimizer nvme and --offload-parameters nvme: the optimizer's state and the layers' parameters on a disk, from which
every step reads them. The same run, bit for bit."""

import os
import pathlib
import re
import signal
import subprocess

import pytest

import boxes
import program

# Blocks of 4.9 million elements, whose state has five pieces.
MODEL = ["--layers=2", "--heads=4", "--channels=640", "--seq-len=16", "--global-batch-tokens=64", "--micro-batch-size=1", "--vocab-size=512",
         "--sample-tokens=0", "--device=cpu", "--lr=1e-3"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BF16 = ["--dtype=bf16"]


def offloaded(folder):
    return ["--offload-optimizer=nvme", f"--nvme-dir={folder}/disk"]


def train(folder, *options, ranks=1, **more):
    return program.train(folder, *MODEL, *options, ranks=ranks, env=ONE_THREAD, **more)


def checkpoints(run):
    """All weights and state, by checkpoint."""
    return {path.name: boxes.contents(path) for path in sorted(run.out_dir.glob("checkpoint-*"))}


def same(run, other):
    for column in ("loss", "grad_norm", "lr"):
        assert run.column(column) == other.column(column)
    assert [line.get("val_loss") for line in run.lines] == [line.get("val_loss") for line in other.lines]
    assert checkpoints(run) == checkpoints(other) and checkpoints(run)


@pytest.mark.parametrize("ranks, options", [
    (1, ["--dtype=fp32", "--grad-clip=0.5"]),
    (1, [*BF16, "--stochastic-rounding", "--model=llama-tiny"]),
    (1, [*BF16, "--master-dtype=none", "--moments-dtype=bf16", "--overlap-grad-reduce=false"]),
    (2, [*BF16, "--zero-stage=1", "--gradient-dtype=bf16", "--check-replicas-every=1"]),
    (2, ["--dtype=fp32", "--zero-stage=0", "--check-replicas-every=1", "--layers=1"]),
    (2, [*BF16, "--zero-stage=3"]),
    (2, [*BF16, "--pipeline-parallel=2", "--pipeline-schedule=zb-h1"]),
    (2, [*BF16, "--tensor-parallel=2", "--sequence-parallel"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_trains_the_same_run(ranks, options, tmp_path):
    options = [*options, "--steps=5", "--val-every=2", "--val-batches=1", "--checkpoint-every=3"]
    memory = train(tmp_path / "memory", *options, ranks=ranks)
    disk = train(tmp_path / "disk", *options, *offloaded(tmp_path), ranks=ranks)
    same(disk, memory)


# Six layers, whose parameters take turns in three buffers.
PARAMETERS = ["--layers=6", "--channels=64", "--global-batch-tokens=192"]


def test_layer_by_layer_parameters_are_read_twice_a_step(tmp_path):
    """However many micro-batches there are: for the forward and the backward pass, except those that are still there."""
    options = [*PARAMETERS, "--tied-head=false", "--steps=3", "--val-every=2", "--val-batches=1", "--checkpoint-every=2",
               "--offload-parameters=nvme", "--offload-optimizer=nvme", f"--nvme-dir={tmp_path}/disk"]
    default, run, longer = (train(tmp_path / name, *options, *more) for name, more in
                          (("default", []), ("layers", ["--pipeline-schedule=breadth-first"]),
                           ("longer", ["--pipeline-schedule=breadth-first", "--global-batch-tokens=768", "--steps=1"])))
    same(run, default)
    assert run.record["offload"]["read"] == longer.record["offload"]["read"] < default.record["offload"]["read"]
    assert run.record["offload"]["written"] == default.record["offload"]["written"]


@pytest.mark.parametrize("ranks, options", [
    (1, ["--dtype=fp32", "--grad-clip=0.5"]),
    (1, [*BF16, "--offload-optimizer=nvme", "--model=llama-tiny", "--recompute=block"]),
    (1, [*BF16, "--master-dtype=none", "--moments-dtype=8bit", "--prefetch-units=0", "--overlap-grad-reduce=false"]),
    (1, ["--dtype=fp16", "--offload-optimizer=nvme", "--prefetch-units=5", "--initial-loss-scale=1152921504606846976"]),
    (1, [*BF16, "--fp8=delayed", "--offload-optimizer=nvme"]),
    (2, [*BF16, "--stochastic-rounding", "--zero-stage=0", "--check-replicas-every=1"]),
    (2, [*BF16, "--offload-optimizer=nvme", "--zero-stage=1", "--check-replicas-every=1", "--prefetch-units=1"]),
    (2, ["--dtype=fp32", "--zero-stage=2"]),
    (2, [*BF16, "--offload-optimizer=nvme", "--zero-stage=3", "--check-replicas-every=1"]),
    (2, ["--dtype=fp32", "--zero-stage=3", "--prefetch-units=0"]),
    (2, [*BF16, "--pipeline-parallel=2", "--pipeline-schedule=zb-h1", "--offload-optimizer=nvme"]),
    (2, ["--dtype=fp32", "--pipeline-parallel=2", "--pipeline-schedule=interleaved", "--global-batch-tokens=256", "--tied-head=false"]),
    (2, [*BF16, "--tensor-parallel=2", "--sequence-parallel", "--offload-optimizer=nvme"]),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_parameters_on_a_disk_train_the_same_run(ranks, options, tmp_path):
    alone = "--offload", *([] if "--zero-stage=3" in options else ["--prefetch"])
    plain = [option for option in options if not option.startswith(alone)]
    common = [*PARAMETERS, "--steps=5", "--val-every=2", "--val-batches=1", "--checkpoint-every=3"]
    memory = train(tmp_path / "memory", *common, *plain, ranks=ranks)
    disk = train(tmp_path / "disk", *common, *options, "--offload-parameters=nvme", f"--nvme-dir={tmp_path}/scratch", ranks=ranks)
    same(disk, memory)
    assert os.listdir(tmp_path / "scratch") == []


def test_text_is_generated_from_a_disk(tmp_path):
    train(tmp_path / "run", *PARAMETERS, "--steps=3")
    offload = ["--offload-parameters=nvme", f"--nvme-dir={tmp_path}/scratch"]
    texts = [program.run("--generate", f"--out-dir={tmp_path}/run", "--resume", "--sample-tokens=20", "--device=cpu", *more, env=ONE_THREAD).stdout
             for more in ([], offload)]
    assert texts[0] == texts[1] and len(texts[0]) >= 20
    # A training run with parameters on a disk samples only if that is asked for.
    options = [option for option in MODEL if "sample-tokens" not in option]
    printed = program.run(*options, *PARAMETERS, "--steps=1", *offload, f"--out-dir={tmp_path}/quiet", env=ONE_THREAD).stdout
    assert "no samples, which --sample-tokens would ask for" in " ".join(printed.split()) and "sample after step" not in printed
    printed = program.run(*options, *PARAMETERS, "--steps=1", *offload, "--sample-tokens=5", f"--out-dir={tmp_path}/asked", env=ONE_THREAD).stdout
    assert "sample after step" in printed


def test_a_resume_may_move_the_state(tmp_path):
    options = [*BF16, "--stochastic-rounding", "--lr-schedule=constant"]
    whole = train(tmp_path / "whole", *options, "--steps=6")
    train(tmp_path / "parts", *options, "--steps=2", *offloaded(tmp_path / "scratch"))
    program.run(f"--out-dir={tmp_path}/parts", "--resume", "--steps=4", "--offload-optimizer=none", "--sample-tokens=0", env=ONE_THREAD)
    program.run(f"--out-dir={tmp_path}/parts", "--resume", "--steps=6", *offloaded(tmp_path / "scratch"),
                "--sample-tokens=0", env=ONE_THREAD)
    parts = program.Run(tmp_path / "parts")
    assert parts.column("loss") == whole.column("loss")
    assert checkpoints(parts)["checkpoint-00000006"] == checkpoints(whole)["checkpoint-00000006"]
    assert os.listdir(tmp_path / "scratch/disk") == []


def test_the_plan_has_less_memory(tmp_path):
    """Three buffers of a piece in place of all master weights and moments; a piece has 2^20 elements of 12 bytes."""
    header = " ".join(program.run(*MODEL, *BF16, "--steps=1", f"--out-dir={tmp_path}", *offloaded(tmp_path)).stdout.split())
    assert "moments 36.0 MiB" in header and "master" not in header.split("offload")[0]
    assert f"per process in {tmp_path}/disk; a step reads " in header


def test_the_header_has_the_stage_that_moves_most(tmp_path):
    options = [*MODEL, *PARAMETERS, "--pipeline-parallel=2", "--pipeline-layers=1,5", "--offload-parameters=nvme", *offloaded(tmp_path), "--steps=1"]
    header = " ".join(program.run(*options, f"--out-dir={tmp_path}/run", ranks=2, env=ONE_THREAD).stdout.split())
    first, second = program.Run(tmp_path / "run").record["pipeline"]["offload"]
    assert first["disk"] < second["disk"]
    assert f"{second['disk'] / 2**20:.1f} MiB per process in {tmp_path}/disk; a step reads {second['read'] / 2**20:.1f} MiB and" in header
    assert "all this is of stage 1, which moves most" in header


def test_a_step_has_its_update_also_if_a_validation_has_finished_it(tmp_path):
    run = train(tmp_path / "run", *offloaded(tmp_path), "--steps=4", "--val-every=1", "--val-batches=1")
    for line in run.lines[1:]:
        assert line["phase_ms"]["update"] > 0 and line["phase_ms"]["disk"] > 0
        assert sum(line["phase_ms"].values()) <= line["step_ms"]


@pytest.mark.parametrize("options, line", [
    (["--offload-optimizer=nvme"], "--offload-optimizer nvme needs the disk's directory; add --nvme-dir DIR"),
    (["--nvme-dir=x"], "--nvme-dir needs --offload-optimizer nvme or --offload-parameters nvme"),
    (["--offload-parameters=nvme"], "--offload-parameters nvme needs the disk's directory; add --nvme-dir DIR"),
    (["--offload-parameters=nvme", "--nvme-dir=x", "--zero-stage=3", "--reshard-after-forward=false"], "leave out --reshard-after-forward=false"),
    (["--offload-optimizer=nvme", "--nvme-dir=/dev/null/x"], "--nvme-dir /dev/null/x: cannot make the directory: Not a directory"),
    (["--offload-optimizer=nvme", "--nvme-dir=/proc/self"], "--nvme-dir /proc/self: cannot make a file"),
    (["--offload-optimizer=nvme", "--nvme-dir=x", "--moments-dtype=8bit"], "keeps moments in fp32 or bf16; give --moments-dtype bf16"),
    (["plan", "--gpus=8", "--offload-optimizer=cpu", "--moments-dtype=8bit"], "--offload-optimizer cpu keeps moments in fp32 or bf16"),
    (["plan", "--gpus=8", "--nvme-speed=x"], "--nvme-speed 'x' is not two speeds in GB/s, such as 10,5"),
    (["plan", "--gpus=8", "--nvme-size=0"], "--nvme-size 0 is out of range"),
    (["plan", "--gpus=8", "--parameters=70B", "--offload-optimizer=cpu"], "--offload-optimizer without a model that this program trains is planned by another --memory-convention; give one, such as mixed-12"),
])
def test_options_without_a_meaning(options, line, tmp_path):
    more = [] if options[0] == "plan" else ["--model=tiny", "--device=cpu", f"--out-dir={tmp_path}/run"]
    result = program.run(*options, *more, check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_a_machine_without_gpus_has_one_memory(tmp_path):
    text = program.run("--model=tiny", "--steps=1", "--sample-tokens=0", "--device=cpu", f"--out-dir={tmp_path}", "--offload-optimizer=cpu").stdout
    assert "--offload-optimizer cpu changes nothing: the CPU device's memory is that of the host" in " ".join(text.split())


def test_a_plan_says_what_offload_does_not_do():
    on_cpus = program.run("plan", "--processes=4", "--model=gpt2", "--offload-parameters=cpu")
    assert "note: --offload-parameters cpu changes nothing" in on_cpus.stdout
    # Two bytes for four processes are none for each.
    small = " ".join(program.run("plan", "--model=gpt2", "--gpus=4", "--zero-stage=1", "--offload-optimizer=nvme", "--nvme-dir=x", "--nvme-size=2B",
                                 check=False).stdout.split())
    assert "fits no, what is offloaded does not: " in small and "why not disk of a rank: " in small


def test_a_killed_run_leaves_nothing(tmp_path):
    folder = tmp_path / "scratch"
    options = [*MODEL, *PARAMETERS, "--offload-parameters=nvme", "--offload-optimizer=nvme", f"--nvme-dir={folder}", "--steps=1000000", "--log-every=1"]
    with subprocess.Popen([program.PROGRAM, *options, f"--out-dir={tmp_path}/run"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        for line in process.stdout:
            if line.split()[:1] == [b"3"]:  # the line of the third step
                break
        process.kill()
    assert process.returncode == -signal.SIGKILL and os.listdir(folder) == []


def test_a_small_disk_is_refused_before_the_run(tmp_path):
    """A file system of 64 MiB, which only root can mount."""
    image, folder = tmp_path / "image", tmp_path / "small"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 64 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as fault:
            pytest.skip(f"no file system can be mounted: {fault}")
    try:
        options = [*MODEL, *PARAMETERS, "--steps=2", "--offload-optimizer=nvme", f"--nvme-dir={folder}"]
        refused = program.run(*options, "--channels=1024", f"--out-dir={tmp_path}/large", check=False)
        assert refused.returncode == 1 and re.fullmatch(r"error: --nvme-dir .*: no file of .*: No space left on device; .* are available there\n", refused.stderr), refused.stderr
        # The state alone has room, and so has a checkpoint, but not both.
        both = program.run(*options, "--channels=208", f"--out-dir={folder}/run", check=False)
        assert both.returncode == 1 and re.fullmatch(r"error: --out-dir.* needs .* on a disk with .* left; .*\n", both.stderr), both.stderr
        small = train(tmp_path / "small_run", *options)
        assert checkpoints(small) == checkpoints(train(tmp_path / "memory", *[option for option in options if "nvme" not in option]))
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_step_moves_what_the_plan_says(tmp_path):
    """By the program's own count to the byte, and by that of the operating system, which has direct access exactly, within 5%."""
    folder = tmp_path / "scratch"
    options = [*MODEL, *PARAMETERS, *BF16, "--offload-parameters=nvme", "--offload-optimizer=nvme", f"--nvme-dir={folder}", "--checkpoint-every=0"]
    moved, printed = {}, ""
    for steps in (2, 6):
        with subprocess.Popen([program.PROGRAM, *options, f"--steps={steps}", f"--out-dir={tmp_path}/{steps}"], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, **ONE_THREAD}) as process:
            printed = " ".join(process.stdout.read().split())
            usage = os.wait4(process.pid, 0)[2]
            process.returncode = 0
        moved[steps] = [512 * blocks / 2**20 for blocks in (usage.ru_inblock, usage.ru_oublock)]
    planned = [float(mebibytes) for mebibytes in re.search(r"a step reads ([\d.]+) MiB and writes ([\d.]+) MiB", printed).groups()]
    lines = program.Run(tmp_path / "6").lines
    for line in lines[1:]:
        assert [round(line["disk"][name] / 2**20, 1) for name in ("read_bytes", "written_bytes")] == planned
        assert 0 <= line["phase_ms"]["disk"] and line["disk"]["ms"] > 0
    assert lines[0]["disk"]["written_bytes"] == 0, "no update is pending in the first step"
    if "no direct access" in printed:
        pytest.skip(f"{folder} has no direct access, whose bytes the system counts exactly")
    if moved[6][1] < planned[1]:
        pytest.skip(f"the system does not count the bytes of the file system of {folder}")
    for few, many, of_step in zip(moved[2], moved[6], planned):
        assert abs((many - few) / 4 - of_step) <= 0.05 * of_step


class MemoryGroup:
    """A control group with a limit of memory, of the first version or the second."""

    def __init__(self, limit):
        own = {line.split(":")[1]: line.rstrip("\n").split(":", 2)[2] for line in open("/proc/self/cgroup")}
        root, name = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if "memory" in own else ("/sys/fs/cgroup", "memory.max")
        self.path = pathlib.Path(f"{root}{own.get('memory', own.get('', '/'))}/train_gpt_test_{os.getpid()}")
        try:
            self.path.mkdir()
            (self.path / name).write_text(str(limit))
            subprocess.run(["sh", "-c", f"echo $$ > {self.path}/cgroup.procs"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as fault:
            self.remove()
            pytest.skip(f"no group with a limit of memory can be made: {fault}")

    def remove(self):
        if self.path.exists():
            self.path.rmdir()

    def run(self, *options):
        """The program in this group."""
        enter = ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", program.PROGRAM]
        return subprocess.run([*enter, *options], cwd=program.ROOT, capture_output=True, text=True, timeout=300 * program.PATIENCE,
                              env={**os.environ, **ONE_THREAD})


@pytest.mark.skipif("SANITIZE" in os.environ, reason="the sanitizers take memory of their own")
def test_a_model_larger_than_memory_trains(tmp_path):
    """50 million parameters: 300 MB of weights and gradients, 600 MB of master weights and moments."""
    model = [*MODEL, *BF16, "--layers=4", "--channels=1024", "--steps=3"]
    free = train(tmp_path / "free", *model)
    group = MemoryGroup(640 << 20)
    try:
        refused = group.run(*model, f"--out-dir={tmp_path}/refused")
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1 and "of memory" in refused.stderr, refused.stderr
        assert not os.path.exists(tmp_path / "refused")
        ended = group.run(*model, f"--out-dir={tmp_path}/disk", *offloaded(tmp_path))
        assert ended.returncode == 0, ended.stderr
    finally:
        group.remove()
    same(program.Run(tmp_path / "disk"), free)
