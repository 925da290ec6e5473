"""--optimizer: each trains the same run on every mesh, is saved, and goes on."""

import re

import pytest

import boxes
import planned
import program

SMALL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]
# The norm adds squares in another order on other meshes, so it may not matter.
ALIKE = ["--micro-batch-size=3", "--steps=8", "--val-every=0", "--grad-clip=0"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
STATE = {"lion": ["exp_avg"], "sgd": ["momentum_buffer"], "muon": ["momentum_buffer", "exp_avg", "exp_avg_sq"]}
OTHERS = [["lion"], ["sgd", "--nesterov"], ["muon", "--lr=2e-3"]]
DTYPES = [["--dtype=fp32"], ["--dtype=bf16", "--moments-dtype=bf16", "--master-dtype=none"], ["--dtype=bf16", "--moments-dtype=8bit"]]


def train(out_dir, optimizer, *options, ranks=1):
    """The run, and the weights and the state of its last checkpoint."""
    run = program.train(out_dir, *SMALL, *ALIKE, f"--optimizer={optimizer[0]}", *optimizer[1:], *options, ranks=ranks, env=ONE_THREAD)
    return run, checkpoint_of(out_dir)


def checkpoint_of(out_dir):
    folder = sorted(out_dir.glob("checkpoint-*"))[-1]
    return [boxes.weights(folder), boxes.state(folder)]


def same(a, b):
    return all(one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one) for one, other in zip(a, b))


@pytest.mark.parametrize("optimizer", OTHERS, ids=["lion", "sgd", "muon"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=["fp32", "bf16", "8 bits"])
def test_meshes_train_the_same_run(optimizer, dtypes, tmp_path):
    """Bit for bit: ZeRO's stages, state on a disk, and pipelines against one process. The table is not tied: stages would add its
    gradients in another order."""
    is_muon, in_8_bits = optimizer[0] == "muon", "--moments-dtype=8bit" in dtypes
    if is_muon and in_8_bits:
        dtypes = ["--dtype=fp16"]
    options = [*dtypes, "--tied-head=false"]
    disk = [] if is_muon or in_8_bits else ["--offload-optimizer=nvme", f"--nvme-dir={tmp_path}"]
    stages = [train(tmp_path / f"zero {stage}", optimizer, *options, "--reduce-every=micro-batch", f"--zero-stage={stage}",
                    *(disk if stage == 1 else []), ranks=2) for stage in range(4)]
    one = train(tmp_path / "one", optimizer, *options)
    pipelines = [train(tmp_path / schedule, optimizer, *options, "--pipeline-parallel=2", f"--pipeline-schedule={schedule}", ranks=2)
                 for schedule in ("1f1b", "zb-h1")]
    if is_muon:
        pipelines += [train(tmp_path / kind, optimizer, *options, f"--recompute={kind}") for kind in ("selective", "block")]
    for runs in stages, [one, *pipelines]:
        for run, files in runs[1:]:
            assert run.losses == runs[0][0].losses and same(files, runs[0][1])
    state = {weight: {name.removeprefix(f"optim.state.{weight}.") for name in one[1][1] if name.startswith(f"optim.state.{weight}.")} for weight in one[1][0]}
    assert set().union(*state.values()) == set(STATE[optimizer[0]])
    of_matrices = {weight for weight in state if re.fullmatch(r"h\.\d\.(attn|mlp)\.c_\w+\.weight", weight)}
    for weight, names in state.items():
        assert len(names) == (2 if is_muon and weight not in of_matrices else 1)
        assert ("momentum_buffer" in names) == (weight in of_matrices if is_muon else optimizer[0] == "sgd")


@pytest.mark.parametrize("optimizer", OTHERS, ids=["lion", "sgd", "muon"])
def test_a_resumed_run_is_the_same(optimizer, tmp_path):
    constant = ["--lr-schedule=constant"]
    whole = train(tmp_path / "whole", optimizer, *constant)
    train(tmp_path / "parts", optimizer, *constant, "--steps=4")
    again = program.train(tmp_path / "parts", "--resume", "--steps=8", "--device=cpu", "--sample-tokens=0", env=ONE_THREAD)
    assert again.losses == whole[0].losses and same(checkpoint_of(tmp_path / "parts"), whole[1])
    other = program.train(tmp_path / "parts", f"--resume={tmp_path}/parts/checkpoint-00000004", "--steps=8", "--zero-stage=3",
                          f"--out-dir={tmp_path}/other", "--device=cpu", "--sample-tokens=0", ranks=2, env=ONE_THREAD)
    assert other.losses[-4:] == pytest.approx(whole[0].losses[-4:], abs=1e-5)


def test_another_optimizer_does_not_go_on(tmp_path):
    train(tmp_path / "run", ["lion"], "--steps=2")
    folder = tmp_path / "run" / "checkpoint-00000002"
    for options in (["--optimizer=adamw"], ["--optimizer=sgd", "--steps=0"], ["--optimizer=adamw", "--beta2=0.9"]):
        refused = program.run(f"--out-dir={tmp_path}/run", "--resume", *options, check=False)
        assert refused.returncode == 1 and refused.stderr.count("\n") == 1
        assert (f"{folder} has the state of --optimizer lion, with which --optimizer {options[0].split('=')[1]} cannot go on; leave it out, "
                f"or begin a new run from these weights with --init {folder}") in refused.stderr
    begun = program.train(tmp_path / "new", *SMALL, *ALIKE, f"--init={folder}", "--optimizer=adamw")
    assert len(begun.losses) == 8


@pytest.mark.parametrize("options, line", [
    (["--optimizer=lion", "--eps=1e-6"], "--eps is not an option of --optimizer lion; leave it out, or give --optimizer adamw or muon"),
    (["--momentum=0.5"], "--momentum is not an option of --optimizer adamw; leave it out, or give --optimizer sgd"),
    (["--optimizer=sgd", "--beta1=0.5"], "--beta1 is not an option of --optimizer sgd; leave it out, or give --optimizer adamw or lion or muon"),
    (["--optimizer=muon", "--momentum=0.5"], "--momentum is not an option of --optimizer muon; leave it out, or give --optimizer sgd"),
    (["--optimizer=muon", "--muon-scale=half"], "--muon-scale: unknown value 'half'; choose one of: match_rms_adamw, original"),
    (["--optimizer=muon", "--moments-dtype=8bit"], "--optimizer muon keeps moments in fp32 or bf16; give --moments-dtype bf16"),
    (["--optimizer=muon", "--offload-optimizer=nvme", "--nvme-dir=/tmp"], "--optimizer muon keeps its state in memory; give --offload-optimizer cpu"),
    (["--optimizer=sgd", "--momentum=1"], "--momentum 1 is out of range; give 0 to 0.999"),
    (["--optimizer=adam"], "--optimizer: unknown value 'adam'; choose one of: adamw, lion, sgd, muon"),
])
def test_options_without_a_meaning(options, line):
    refused = program.run(*options, check=False)
    assert refused.returncode == 1 and line in refused.stderr and refused.stderr.count("\n") == 1


def test_a_file_of_another_optimizer(tmp_path):
    """The command line's optimizer does not take the file's numbers, which belong to the file's."""
    (tmp_path / "run.toml").write_text('optimizer = "sgd"\nmomentum = 0.5\n')
    assert len(train(tmp_path / "lion", ["lion"], f"--config={tmp_path}/run.toml", "--steps=2")[0].losses) == 2
    of_file = program.train(tmp_path / "sgd", *SMALL, *ALIKE, f"--config={tmp_path}/run.toml", env=ONE_THREAD)
    assert of_file.losses == train(tmp_path / "given", ["sgd", "--momentum=0.5"])[0].losses


@pytest.mark.parametrize("optimizer", ["lion", "sgd"])
def test_it_has_half_of_adamws_moments(optimizer, tmp_path):
    """In the plan and in the run."""
    options = [*SMALL, "--steps=1", "--dtype=bf16"]
    run = program.train(tmp_path, *options, f"--optimizer={optimizer}")
    own, adamw = (planned.plan(*options, f"--optimizer={name}")[0] for name in (optimizer, "adamw"))
    planned.assert_equals_run(own, run)
    assert 2 * own["memory"]["arenas"]["moments"] == adamw["memory"]["arenas"]["moments"]


@pytest.mark.parametrize("mesh", [(1, []), (2, ["--zero-stage=1"]), (2, ["--zero-stage=3", "--dtype=bf16"]), (2, ["--tensor-parallel=2"]),
                                  (4, ["--tensor-parallel=2", "--zero-stage=2", "--dtype=fp16"])], ids=lambda mesh: " ".join(mesh[1]))
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_muon_needs_what_is_planned(mesh, model, tmp_path):
    ranks, options = mesh
    sizes = SMALL if model == "gpt2" else ["--model=llama-tiny", "--global-batch-tokens=1024", "--device=cpu"]
    options = [*sizes, *options, "--optimizer=muon", "--steps=2"]
    run = program.train(tmp_path, *options, ranks=ranks)
    planned.assert_equals_run(planned.plan(*options, f"--gpus={ranks}")[0], run)


def test_muon_on_tensor_parallel_ranks(tmp_path):
    """The matrices are whole. Gradients differ in rounding, which the iteration magnifies: the largest singular values of a direction
    are far above the smallest, which it makes as large. So only losses are compared."""
    options = ["muon", "--lr=2e-3"]
    one, _ = train(tmp_path / "one", options)
    for number, (ranks, mesh) in enumerate([(2, ["--tensor-parallel=2"]), (4, ["--tensor-parallel=2", "--sequence-parallel", "--zero-stage=2"])]):
        run, _ = train(tmp_path / str(number), options, *mesh, ranks=ranks)
        assert run.losses == pytest.approx(one.losses, abs=1e-4)
