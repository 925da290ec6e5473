"""ZeRO and hybrid sharding as a user runs them. Every stage gives the same run, and a run resumes from one stage at another.
Open MPI's counts of bytes and a process that dies are tested too. test_memory_peak.py measures the memory.
test/mpi/sharded_training_test.cpp compares the ranks' own numbers, step by step."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import numpy as np
import pytest

import boxes
import program
import safetensors_numpy
from program import digest
from refused import one_error

TINY = ["--layers=3", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]
STAGES = [["--zero-stage=0"], ["--zero-stage=1"], ["--zero-stage=2"], ["--zero-stage=3"], ["--zero-stage=3", "--zero-shard-size=2"],
          ["--zero-stage=1", "--zero-shard-size=2"], ["--zero-stage=3", "--prefetch-units=0"], ["--zero-stage=3", "--prefetch-units=5"],
          ["--zero-stage=3", "--reshard-after-forward=false"], ["--zero-stage=3", "--overlap-grad-reduce=false"],
          ["--zero-stage=3", "--recompute=block"], ["--zero-stage=0", "--recompute=selective", "--recompute-every=2"]]


def train(folder, *options, ranks=4, **how):
    """The run, the results that must be the same in equal runs, and the printed text."""
    out = program.run(f"--out-dir={folder}", *TINY, *options, f"--export={folder}/w.safetensors", ranks=ranks, **how).stdout
    run = program.Run(folder)
    newest = sorted(folder.glob("checkpoint-*"))[-1]
    saved = [digest(folder / "w.safetensors"), boxes.contents(newest)]
    return run, (run.losses, run.column("grad_norm"), run.lines[-1].get("val_loss"), saved), out


def sample(out):
    return out[out.index("-- sample"):].split("\n\n")[0]


def test_every_stage_is_the_same_run(tmp_path):
    options = ["--steps=6", "--micro-batch-size=3", "--reduce-every=micro-batch", "--sample-tokens=30", "--check-replicas-every=2"]
    runs = [train(tmp_path / str(number), *options, *stage) for number, stage in enumerate(STAGES)]
    for (_, results, out), stage in zip(runs, STAGES):
        assert results == runs[0][1], stage
        assert sample(out) == sample(runs[0][2])
    assert "ZeRO-3: parameters, gradients and optimizer state sharded 2 ways, 2 replicas" in runs[4][2].replace("\n              ", " ")
    assert runs[4][0].record["mesh"] == {"world": 4, "pipeline": 1, "data": 4, "tensor": 1, "zero_stage": 3, "shards": 2,
                                            "replicas": 2}


# Stages, hybrid groups and tensor-parallel ranks of four processes.
ON_FOUR = [["--zero-stage=0"], ["--zero-stage=1"], ["--zero-stage=1", "--zero-shard-size=2"], ["--zero-stage=2"],
           ["--zero-stage=2", "--zero-shard-size=2"], ["--zero-stage=3"], ["--zero-stage=3", "--zero-shard-size=2"]]
ROUNDED = ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding", "--weight-decay=0"]


@pytest.mark.parametrize("options, stages", [(ROUNDED, ON_FOUR), (["--tensor-parallel=2"], [stage for stage in ON_FOUR if len(stage) == 1]),
                                             (["--tensor-parallel=2", "--sequence-parallel"], [stage for stage in ON_FOUR if len(stage) == 1])],
                         ids=["stochastic rounding", "tensor", "tokens"])
def test_four_ranks_compute_the_values_of_one(options, stages, tmp_path):
    """Each stage has the same bits on four ranks. In fp32, the weights are those of one process up to the rounding of sums. In
    bf16, the first loss is the same sum, and the bits of rounded weights do not depend on the ranks that hold them."""
    options = [*options, "--steps=6", "--micro-batch-size=6", "--reduce-every=micro-batch", "--sample-tokens=0", "--warmup-steps=100"]
    runs = [train(tmp_path / str(number), *options, *stage) for number, stage in enumerate(stages)]
    for (_, results, _), stage in zip(runs, stages):
        assert results == runs[0][1], stage
    alone = [option for option in options if "parallel" not in option]
    one, _, _ = train(tmp_path / "one", *alone, ranks=1)
    four = runs[0][0]
    assert four.losses[0] == pytest.approx(one.losses[0], rel=1e-5 if "fp32" in one.record["configuration"]["dtype"] else 1e-8)
    if options[0] != ROUNDED[0]:
        weights, others = (safetensors_numpy.load(run.out_dir / "w.safetensors") for run in (one, four))
        for name, tensor in weights.items():
            if name.endswith("attn.c_attn.bias"):  # the keys' gradient is zero apart from rounding, and AdamW divides by its size
                tensor, others[name] = (np.delete(each, slice(32, 64)) for each in (tensor, others[name]))
            assert np.abs(tensor - others[name]).max() <= 2e-5, name  # as in test_pipeline.py


@pytest.mark.more
def test_given_weights_reach_every_group_of_shards(tmp_path):
    """From a file, and from the checkpoint of another stage."""
    first, _, _ = train(tmp_path / "first", "--steps=2", ranks=1)
    start = ["--steps=4", "--micro-batch-size=3", "--reduce-every=micro-batch"]
    for name, given in (("init", f"--init={tmp_path}/first/w.safetensors"), ("resume", f"--resume={first.out_dir}/checkpoint-00000002")):
        runs = [train(tmp_path / f"{name}-{number}", *start, given, *stage) for number, stage in enumerate(ON_FOUR)]
        for (_, results, _), stage in zip(runs, ON_FOUR):
            assert results == runs[0][1], (name, stage)


@pytest.mark.parametrize("saved, resumed", [(("--zero-stage=3", 2), ("--zero-stage=0", 4)), (("--zero-stage=0", 4), ("--zero-stage=3", 2)),
                                            (("--zero-stage=2", 3), ("--zero-stage=1", 2)), (("--zero-stage=3", 4), ("--zero-stage=3", 4))])
def test_a_checkpoint_of_one_stage_goes_on_at_another(saved, resumed, tmp_path):
    """One checkpoint is resumed at the other stage, and at stage 0. Both runs are the same, bit by bit."""
    options = ["--micro-batch-size=2", "--reduce-every=step", "--lr-schedule=constant", "--sample-tokens=0", "--dtype=bf16",
               "--stochastic-rounding"]
    first, _, _ = train(tmp_path / "first", *options, "--steps=3", saved[0], ranks=saved[1])
    checkpoint = first.out_dir / "checkpoint-00000003"
    on, results, _ = train(tmp_path / "on", *options, "--steps=6", f"--resume={checkpoint}", resumed[0], ranks=resumed[1])
    whole, expected, _ = train(tmp_path / "whole", *options, "--steps=6", f"--resume={checkpoint}", ranks=resumed[1])
    assert results == expected
    assert on.column("step") == whole.column("step") == [4, 5, 6]


def test_weights_from_a_file(tmp_path):
    """One process reads them and sends them to the shards."""
    train(tmp_path / "first", "--steps=2", "--sample-tokens=0", ranks=1)
    options = ["--steps=3", "--sample-tokens=0", "--reduce-every=step", f"--init={tmp_path}/first/w.safetensors"]
    whole = train(tmp_path / "whole", *options)[1]
    for stage in (1, 3):
        assert train(tmp_path / str(stage), *options, f"--zero-stage={stage}")[1] == whole


def test_print_step_shows_what_is_gathered():
    out = program.run(*TINY, "--zero-stage=3", "--micro-batch-size=3", "--print-step", "--verbose", ranks=2).stdout
    assert "2 data ranks, ZeRO-3: parameters, gradients and optimizer state sharded 2 ways" in out
    lines = out.splitlines()
    assert any(re.search(r"communication +gather_parameters +h\.2 .*parameters h\.2 \(in h\.0's place\)", line) for line in lines)
    assert any(re.search(r"communication +reduce_scatter +h\.2 .*gradients h\.2 \(in h\.0's place\) -> gradient shard h\.2", line)
               for line in lines)


def test_what_whole_gradients_cost_is_said():
    deep = ["--layers=8", "--channels=64", "--heads=2", "--seq-len=16", "--global-batch-tokens=384", "--micro-batch-size=3", "--steps=0"]
    out = program.run(*deep, "--zero-stage=3", "--reduce-every=step", ranks=4).stdout
    assert re.search(r"gradients +not sharded until the step's last micro-batch \(--reduce-every step\), which takes [\d.]+\s+[KM]iB\s+more", out)
    assert "not sharded until" not in program.run(*deep, "--zero-stage=3", ranks=4).stdout


# ---- bytes that are sent


def sent(folder, *options, ranks):
    """Bytes that Open MPI sent from point to point, over all ranks."""
    folder.mkdir(parents=True)
    train(folder / "run", *options, ranks=ranks, mpi=True,
          env={"OMPI_MCA_pml_monitoring_enable": "2", "OMPI_MCA_pml_monitoring_enable_output": "3",
               "OMPI_MCA_pml_monitoring_filename": str(folder / "monitoring")})
    reports = [path.read_text() for path in folder.glob("monitoring.*.prof")]
    assert len(reports) == ranks
    return sum(int(count) for report in reports for count in re.findall(r"^E\t\d+\t\d+\t(\d+) bytes", report, re.M))


def padded_units(ranks):
    """Elements of TINY's units: tensors begin at multiples of 128, and a shard consists of whole blocks of 1024."""
    C, T, V = 32, 16, 256
    block = [C, C, 3 * C * C, 3 * C, C * C, C, C, C, 4 * C * C, 4 * C, 4 * C * C, C]
    units = [[V * C], [T * C], *([block] * 3), [C, C]]
    ends = [sum(-(-tensor // 128) * 128 for tensor in unit[:-1]) + unit[-1] for unit in units]
    return [-(-end // (1024 * ranks)) * 1024 * ranks for end in ends]


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
@pytest.mark.parametrize("stage", [
    "--zero-stage=0 --reduce-every=micro-batch", "--zero-stage=1", "--zero-stage=2", "--zero-stage=2 --reduce-every=step",
    "--zero-stage=3 --dtype=bf16 --gradient-dtype=bf16",
    "--zero-stage=1 --zero-shard-size=2 --reduce-every=micro-batch --dtype=bf16 --gradient-dtype=bf16",
    "--zero-stage=2 --zero-shard-size=2", "--zero-stage=3 --zero-shard-size=2"])
def test_open_mpi_sent_what_the_list_says(stage, tmp_path):
    """Four more steps send four times the bytes of the list, and the other bytes of a step: sums of squares, loss, signals. A
    step has two micro-batches."""
    options = ["--micro-batch-size=3", "--val-batches=1", "--sample-tokens=0", *stage.split()]
    few, more = (sent(tmp_path / str(steps), *options, f"--steps={steps}", ranks=4) for steps in (2, 6))
    record = program.Run(tmp_path / "2/run").record
    listed = record["bytes_sent"]
    assert record["micro_batches"] == 2
    besides = (more - few) / 4 / 4 - listed["inside"] - listed["across"]
    # Four bytes of a sum of squares for every 1024 elements, to each other rank of the group. Two scalars in fp64 to each other
    # rank: the loss, and whether a signal came.
    shards = record["mesh"]["shards"]
    squares = 4 * sum(padded // 1024 for padded in padded_units(4)) // shards * (shards - 1)
    assert besides == squares + 2 * 8 * 3


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
def test_open_mpi_sent_the_sums_of_tensor_parallel_ranks(tmp_path):
    """Two data ranks of two tensor-parallel ranks, four micro-batches. With any recompute and any division of the tokens, a
    step sends the same bytes beyond the list: sums of squares, loss, signals."""
    options = ["--micro-batch-size=3", "--val-batches=1", "--sample-tokens=0", "--tensor-parallel=2"]
    besides, tensor = [], []
    for number, more in enumerate([[], ["--recompute=block"], ["--sequence-parallel"]]):
        few, many = (sent(tmp_path / f"{number}-{steps}", *options, *more, f"--steps={steps}", ranks=4) for steps in (2, 6))
        record = program.Run(tmp_path / f"{number}-2/run").record
        assert record["micro_batches"] == 4
        listed = record["bytes_sent"]
        tensor.append(listed["tensor"])
        besides.append((many - few) / 4 / 4 - sum(listed.values()))
    assert besides[0] == besides[1] == besides[2]
    blocks = sum(padded_units(4)) // 1024
    assert 0 < besides[0] <= 2 * 8 * 3 + 4 * blocks / 2 + 4 * blocks
    # A gather of the residual stream: 3 sequences of 16 tokens with 32 channels. The last of three blocks recomputes nothing.
    af = 3 * 16 * 32 * 4 // 2
    assert tensor[1] - tensor[0] == 4 * 2 * 2 * af
    # Two more gathers for each block. Once a step, also the sum of each block's gradients of the layernorms and of two biases.
    # All but the last are padded to 128.
    assert tensor[2] - tensor[0] == 4 * 3 * 2 * af + 4 * (3 * (5 * 128 + 32) + 128 + 32)


# ---- processes that die


GONE = r"error: rank {} is gone: its process or its machine stopped; .*; the job ends"
# Open MPI's messages about it, also those of other ranks that were reading from its memory.
NOTICED = re.compile(r"""-+
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
-+
-+
mpirun\S* noticed that process rank (\d+) with PID \d+ on node \S+ exited on signal 9 \(Killed\).
-+""")
READING = re.compile(r"\[\S+:\d+\] Read -1, expected \d+, errno = 3\n")


def age_of(process):
    """The time at which it started, and its number, which alone may start again from 1."""
    after_name = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19]), process


@pytest.mark.parametrize("launcher", ["--processes", pytest.param("mpirun", marks=pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0"))])
@pytest.mark.parametrize("stage, killed", [(1, 0), (3, 0), (3, 2)])
def test_a_killed_process_ends_the_job(launcher, stage, killed, tmp_path):
    """With one message: that of another rank, or mpirun's own."""
    started = program.over_mpi(3) if launcher == "mpirun" else [program.PROGRAM, "--processes", "3"]
    command = [*started, *TINY, f"--out-dir={tmp_path}", "--steps=1000000", "--layers=8",
               "--channels=128", f"--zero-stage={stage}", "--sample-tokens=0", "--comm-timeout=20"]
    job = subprocess.Popen(command, cwd=program.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert job.poll() is None
        time.sleep(0.05)
    ranks = sorted(processes(str(tmp_path)), key=age_of)[-3:]  # without the launcher, which is older
    assert len(ranks) == 3
    start = time.monotonic()
    os.kill(ranks[killed], signal.SIGKILL)
    err = job.communicate(timeout=60 * program.PATIENCE)[1].strip()
    assert job.returncode == 128 + signal.SIGKILL and time.monotonic() - start < 20 * program.PATIENCE
    said = re.fullmatch(GONE.format(killed), err) if launcher != "mpirun" else NOTICED.fullmatch(READING.sub("", err + "\n").strip())
    assert said, err
    assert launcher != "mpirun" or said[1] == str(killed)
    gone_by = time.monotonic() + 5 * program.PATIENCE  # a killed process may outlive the launcher for a moment
    while processes(str(tmp_path)):
        assert time.monotonic() < gone_by
        time.sleep(0.05)


def processes(folder):
    """The trainer's processes that work in a folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].decode().endswith("train_gpt") and any(folder in word.decode(errors="replace") for word in words):
            found.append(int(path.name))
    return found


# ---- resumed with other options

SAVED = ["--steps=2", "--sample-tokens=0", "--val-batches=1"]


def resume(folder, *options):
    return program.run(f"--config={folder}/config.toml", f"--out-dir={folder}", "--resume", "--steps=3", *options, ranks=2).stdout


@pytest.mark.parametrize("saved, choice, passed_over", [
    (["--zero-stage=3", "--zero-shard-size=2", "--prefetch-units=2", "--reshard-after-forward=false"], "--zero-stage=0",
     ["zero-shard-size is ignored: it needs --zero-stage 1, 2 or 3", "prefetch-units is ignored: it needs --zero-stage 3",
      "reshard-after-forward=false is ignored: it needs --zero-stage 3"]),
    (["--zero-stage=3", "--zero-shard-size=2", "--prefetch-units=2"], "--zero-stage=2",
     ["prefetch-units is ignored: it needs --zero-stage 3"]),
    (["--pipeline-parallel=2", "--pipeline-schedule=interleaved", "--virtual-stages=2", "--layers=4", "--pipeline-layers=1,1,1,1",
      "--micro-batch-size=3"],
     "--pipeline-parallel=1", [f"{name} is ignored: it needs --pipeline-parallel 2 or more"
                               for name in ("pipeline-schedule", "virtual-stages", "pipeline-layers")]),
    (["--tensor-parallel=2", "--sequence-parallel"], "--tensor-parallel=1",
     ["sequence-parallel is ignored: it needs --tensor-parallel 2 or more"]),
    (["--recompute=block", "--recompute-every=2"], "--recompute=none",
     ["recompute-every is ignored: it needs --recompute selective or block"]),
], ids=["stage 0", "stage 2", "pipeline", "tensor", "recompute"])
def test_what_another_choice_leaves_without_a_meaning_is_passed_over(saved, choice, passed_over, tmp_path):
    program.run(f"--out-dir={tmp_path}", *TINY, *SAVED, *saved, ranks=2)
    config = (tmp_path / "config.toml").read_text().splitlines()
    out = resume(tmp_path, choice)
    notes = re.findall(r"note: (.*), line (\d+): --(.*)", out)
    assert len(notes) == len(passed_over), out
    for (file, line, note), expected in zip(notes, passed_over):
        name = re.split("[ =]", expected)[0]
        assert file == f"{tmp_path}/config.toml" and note.startswith(expected)
        assert config[int(line) - 1].startswith(f"{name} = ")
        # Later runs resume without this line.
        assert config[int(line) - 1] not in (tmp_path / "config.toml").read_text().splitlines()
    assert program.Run(tmp_path).column("step") == [1, 2, 3]


def test_what_has_no_meaning_otherwise_is_refused(tmp_path):
    """On the command line, and when the file's own setting makes it meaningless."""
    (tmp_path / "c.toml").write_text("zero-stage = 3\nprefetch-units = 2\nreshard-after-forward = false\n")
    (tmp_path / "d.toml").write_text("zero-stage = 2\nreshard-after-forward = false\n")
    (tmp_path / "e.toml").write_text("zero-stage = 3\nzero-shard-size = 2\n")

    def line(*options, ranks=1):
        ended = program.run(*TINY, *options, f"--out-dir={tmp_path}/run", ranks=ranks, check=False)
        assert ended.returncode == 1 and ended.stdout == ""
        return one_error(ended.stderr)

    assert line(f"--config={tmp_path}/c.toml", "--zero-stage=0", "--prefetch-units=1").startswith("--prefetch-units needs --zero-stage 3")
    assert line(f"--config={tmp_path}/d.toml").startswith(f"{tmp_path}/d.toml, line 2: --reshard-after-forward=false needs --zero-stage 3")
    assert line(f"--config={tmp_path}/e.toml", ranks=3) == \
        f"{tmp_path}/e.toml, line 2: --zero-shard-size 2 does not divide the 3 processes; try 1, 3"


@pytest.mark.parametrize("given", [[], ["--reduce-every=micro-batch"]], ids=["by default", "as given"])
def test_when_gradients_are_reduced_follows_the_stage_unless_it_was_given(given, tmp_path):
    def reduces(step):
        return json.loads((tmp_path / f"checkpoint-{step:08}/manifest.json").read_text())["configuration"]["reduce-every"]

    run, _, _ = train(tmp_path, *SAVED, "--zero-stage=2", *given, ranks=2)
    assert run.record["configuration"]["reduce-every"] == reduces(2) == "micro-batch"
    assert ("\nreduce-every = " in (tmp_path / "config.toml").read_text()) == bool(given)
    out = resume(tmp_path, "--zero-stage=1")
    assert reduces(3) == ("micro-batch" if given else "step")
    assert ('--reduce-every is "step", but was "micro-batch" in the checkpoint' in out) == (not given)


@pytest.mark.parametrize("ranks, options, who", [
    (1, [], "one process"), (2, ["--zero-shard-size=1"], "--zero-shard-size 1"),
    (2, ["--pipeline-parallel=2"], "one data-parallel process"),
    (2, ["--tensor-parallel=2"], "one data-parallel process")], ids=["one", "groups of one", "pipeline", "tensor"])
def test_where_nothing_is_to_be_sharded_that_is_said(ranks, options, who, tmp_path):
    run, _, out = train(tmp_path, *SAVED, "--zero-stage=3", *options, ranks=ranks)
    assert f"\nnote: --zero-stage 3 has no effect with {who}\n" in out
    assert run.record["mesh"]["zero_stage"] == 0 and run.record["configuration"]["reduce-every"] == "step"


@pytest.mark.parametrize("ranks, options, why", [
    (1, [], "there is one process"), (2, ["--zero-stage=3"], "--zero-stage 3 keeps no copies"),
    (2, ["--zero-stage=2"], None), (2, ["--pipeline-parallel=2"], None),
    (2, ["--pipeline-parallel=2", "--tied-head=false"], "the pipeline stages share no state"),
    (4, ["--pipeline-parallel=2", "--tied-head=false"], None),
    (4, ["--pipeline-parallel=2", "--tied-head=false", "--zero-stage=3"], "--zero-stage 3 keeps no copies")],
    ids=["one", "stage 3", "stage 2", "tied weights", "a head of its own", "pairs of stages", "shards of stages"])
def test_where_nothing_is_to_be_compared_that_is_said(ranks, options, why, tmp_path):
    _, _, out = train(tmp_path, *SAVED, "--check-replicas-every=1", *options, ranks=ranks)
    assert (f"\nnote: --check-replicas-every 1 has nothing to compare: {why}\n" in out) if why else "nothing to compare" not in out


# ---- refusals


@pytest.mark.parametrize("options, words", [
    (["--zero-stage=4"], ["--zero-stage 4 is out of range; give 0 to 3"]),
    (["--zero-stage=1", "--zero-shard-size=3"], ["--zero-shard-size 3 does not divide the 4 processes; try 1, 2, 4"]),
    (["--zero-shard-size=2"], ["--zero-shard-size needs --zero-stage 1, 2 or 3"]),
    (["--zero-stage=1", "--zero-shard-size=0"], ["--zero-shard-size 0 is out of range"]),
    (["--zero-stage=2", "--prefetch-units=2"], ["--prefetch-units needs --zero-stage 3"]),
    (["--zero-stage=3", "--prefetch-units=-1"], ["--prefetch-units -1 is out of range"]),
    (["--zero-stage=2", "--reshard-after-forward=false"], ["--reshard-after-forward=false needs --zero-stage 3"]),
    (["--reduce-every=epoch"], ["--reduce-every: unknown value 'epoch'; choose one of: step, micro-batch"]),
], ids=lambda value: " ".join(value) if value[0].startswith("--") else "")
def test_wrong_options(options, words, tmp_path):
    ended = program.run(*TINY, *options, f"--out-dir={tmp_path}/run", ranks=4, check=False)
    assert ended.returncode == 1 and ended.stdout == "" and not (tmp_path / "run").exists()
    line = one_error(ended.stderr)
    for word in words:
        assert word in line
