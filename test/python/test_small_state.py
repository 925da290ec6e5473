"""--moments-dtype and --master-dtype: less memory for the optimizer's state."""

import re

import pytest

import boxes
import planned
import program

SMALL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--dtype=bf16", "--device=cpu"]
# A micro-batch's gradient has the same bits on every mesh. The norm adds squares in another order, so it may not matter.
ALIKE = ["--micro-batch-size=3", "--lr=1e-3", "--steps=12", "--val-every=0", "--grad-clip=0"]
SMALLEST = ["--moments-dtype=bf16", "--master-dtype=none"]
IN_8_BITS = ["--moments-dtype=8bit"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SIZES = {"layers", "channels", "heads", "kv-heads", "mlp-size", "seq-len"}


def train(out_dir, *options, ranks=1):
    """The run, and the weights and moments of its last checkpoint."""
    run = program.train(out_dir, *SMALL, *ALIKE, *options, ranks=ranks, env=ONE_THREAD)
    folder = sorted(out_dir.glob("checkpoint-*"))[-1]
    return run, [boxes.weights(folder), boxes.state(folder)]


def same(a, b):
    return all(one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one) for one, other in zip(a, b))


@pytest.mark.parametrize("state", [SMALLEST, IN_8_BITS], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("meshes", [
    [(2, ["--pipeline-parallel=2"]), (2, ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1"])],
    [(2, [f"--zero-stage={stage}"]) for stage in range(4)],
], ids=["stages", "zero"])
def test_meshes_train_the_same_run(meshes, state, tmp_path):
    """Bit for bit: the random numbers belong to an element, not to a rank, and blocks of 8 bits are in one shard. ZeRO's stages
    are compared with one another. The table is not tied: stages would add its gradients in another order."""
    state = [*state, "--tied-head=false"]
    runs = [train(tmp_path / str(number), *state, "--reduce-every=micro-batch", *options, ranks=ranks)
            for number, (ranks, options) in enumerate(meshes)]
    if "--pipeline-parallel=2" in meshes[0][1]:
        runs.append(train(tmp_path / "one", *state))
    for run, files in runs[1:]:
        assert run.losses == runs[0][0].losses and same(files, runs[0][1])


def test_resume_from_8_bits_is_exact(tmp_path):
    """Files hold fp32, from which the same 8 bits follow, on another mesh too. A run may also begin or end to use them."""
    whole, files = train(tmp_path / "whole", *IN_8_BITS, "--lr-schedule=constant", "--checkpoint-every=5")
    train(tmp_path / "parts", *IN_8_BITS, "--lr-schedule=constant", "--steps=7")
    again = program.train(tmp_path / "parts", "--resume", "--steps=12", "--device=cpu", "--zero-stage=3", ranks=2, env=ONE_THREAD)
    assert again.losses[:7] == whole.losses[:7] and again.losses == pytest.approx(whole.losses, abs=1e-5)
    one = program.train(tmp_path / "whole", f"--resume={tmp_path}/whole/checkpoint-00000005", "--steps=12", "--device=cpu", env=ONE_THREAD)
    folder = sorted((tmp_path / "whole").glob("checkpoint-*"))[-1]
    assert one.losses == whole.losses
    assert same([boxes.weights(folder), boxes.state(folder)], files)
    few = [len(set(map(float, tensor.ravel()))) for name, tensor in files[1].items() if tensor.size == 4096 and "wpe" not in name]
    assert few and max(few) < 4096 * 0.9  # numbers repeat: a block has at most 256
    program.run(f"--out-dir={tmp_path}/parts", "--resume", "--steps=14", "--moments-dtype=fp32", "--sample-tokens=0")
    program.run(f"--out-dir={tmp_path}/parts", "--resume", "--steps=16", "--moments-dtype=8bit", "--sample-tokens=0")
    assert len(program.Run(tmp_path / "parts").losses) == 16


def test_the_state_is_in_bf16(tmp_path):
    """All numbers of a checkpoint, read as fp32, have the 16 low bits of bf16: none."""
    for options, in_bf16 in ([], (False, False)), (SMALLEST[:1], (False, True)), (SMALLEST[1:], (True, False)), (SMALLEST, (True, True)):
        _, state = train(tmp_path / "-".join(["run", *options]), *options)
        assert tuple(all((tensor.view("uint32") & 0xffff == 0).all() for tensor in part.values()) for part in state) == in_bf16


@pytest.mark.parametrize("options, master, moments", [([], 2, 4), (SMALLEST[:1], 2, 2), (SMALLEST[1:], 0, 4), (SMALLEST, 0, 2)])
def test_its_bytes(options, master, moments):
    """As multiples of the parameters' two bytes. The header rounds to a tenth of a MiB."""
    out = program.run("--model=tiny", "--dtype=bf16", "--steps=0", "--sample-tokens=0", "--device=cpu", *options).stdout
    kept = {name: float(size) for name, size in re.findall(r"(parameters|master|moments) ([\d.]+) MiB", " ".join(out.split()))}
    assert kept.get("master", 0) == pytest.approx(master * kept["parameters"], abs=0.15)
    assert kept["moments"] == pytest.approx(moments * kept["parameters"], abs=0.25)


def test_many_micro_batches_lose_no_gradient(tmp_path):
    """--gradient-dtype bf16: 4,096 micro-batches of the same 16 tokens, whose gradients add up to that of one. Rounded to nearest, the
    sum would stop at some 256 of them. An error has a variance of a sixth of the square of an ulp, which is 2^-15 of the square of the
    sum so far on average. So the squared norm grows by 4096/3 2^-15/6 = 0.7%, and the norm by half of that."""
    program.write_token_file(tmp_path / "same.bin", 4200 * list(range(97, 113)))
    run = ["--model=llama-tiny", "--layers=1", "--channels=16", "--heads=2", "--kv-heads=1", "--mlp-size=32", "--seq-len=16", "--dtype=bf16",
           f"--train-data={tmp_path}/same.bin", "--micro-batch-size=1", "--steps=1", "--global-batch-tokens=65536", "--val-every=0",
           "--device=cpu"]
    def norm(number, *options, ranks=1):
        return program.train(tmp_path / str(number), *run, *options, ranks=ranks, env=ONE_THREAD).column("grad_norm")[0]
    right = norm("fp32", "--gradient-dtype=fp32")
    sums = ["--gradient-dtype=bf16"]
    norms = [norm(1, *sums), norm(2, *sums, "--pipeline-schedule=breadth-first"),
             norm(3, *sums, "--offload-parameters=nvme", "--offload-optimizer=nvme", f"--nvme-dir={tmp_path}"),
             *(norm(f"{stage} {every}", *sums, f"--zero-stage={stage}", f"--reduce-every={every}", ranks=2)
               for stage in range(4) for every in ("step", "micro-batch"))]
    assert norms == pytest.approx(len(norms) * [right], rel=0.01)
    assert norms[0] == norms[1] == norms[2]  # the same bits
    assert len(set(norms[3::2])) == len(set(norms[4::2])) == 1
    # Two ranks of 2,048 have other errors than one: with the same random bits, their sums would be equal, and twice one of them.
    alone = norm("half", *sums, "--global-batch-tokens=32768")
    assert norms[3] != alone == pytest.approx(right, rel=0.01)
    # So have other seeds, of the same weights and tokens: one token again and again, as a seed also chooses where sequences begin.
    program.write_token_file(tmp_path / "one.bin", 9000 * [97])
    program.run("--steps=0", *(option for option in run if option.startswith("--model") or option[2:].split("=")[0] in SIZES), "--seed=1",
                f"--export={tmp_path}/w.safetensors", "--sample-tokens=0", "--device=cpu")
    few = [*sums, f"--init={tmp_path}/w.safetensors", f"--train-data={tmp_path}/one.bin", "--global-batch-tokens=8192"]
    assert norm("seed 1", *few, "--seed=1") != norm("seed 2", *few, "--seed=2")


def test_moments_of_tables_stay_in_fp32(tmp_path):
    """In the plan's bytes, and in those of the run. Units are whole blocks of 1,024 elements: in fp32 the embedding, the head and the last
    norm, and in 8 bits the layers, with two magnitudes for 256 elements; their two norms are small tensors, in fp32."""
    options = ["--model=llama-tiny", "--moments-dtype=8bit", "--device=cpu", "--steps=1"]
    run = program.train(tmp_path, *options)
    made = planned.plan(*options)[0]
    planned.assert_equals_run(made, run)
    channels, layers = made["model"]["channels"], made["model"]["layers"]
    table = made["model"]["vocabulary"] * channels
    padded = lambda elements: -(-elements // 1024) * 1024
    layer = padded((made["model"]["parameters"] - 2 * table - channels) // layers)
    exact = 2 * 4 * (2 * padded(table) + padded(channels)) + layers * (2 * layer + 2 * 4 * layer // 256 + 2 * 4 * 2 * channels)
    # Each of six buffers of a unit begins at a multiple of 256 bytes.
    assert 0 <= made["memory"]["arenas"]["moments"] - exact < 256 * 6 * (layers + 3)


def test_the_loss_is_that_of_state_in_fp32(tmp_path):
    """The mean of the last ten of 60 losses of four layers, within 1%, as bf16 rounds to 2^-8."""
    model = ["--layers=4", "--heads=4", "--channels=128", "--seq-len=64", "--steps=60", "--lr=1e-3", "--device=cpu", "--val-every=0", "--dtype=bf16"]
    means = []
    for number, options in enumerate([[], SMALLEST, IN_8_BITS]):
        losses = program.train(tmp_path / str(number), *model, *options).losses
        means.append(sum(losses[-10:]) / 10)
    assert means[1:] == pytest.approx(2 * means[:1], rel=0.01) and len(set(means)) == 3


def test_resume_with_other_state(tmp_path):
    train(tmp_path, "--steps=3")
    for steps, options in (6, SMALLEST), (9, ["--moments-dtype=fp32", "--master-dtype=fp32"]), (12, ["--dtype=fp32"]):
        program.run(f"--out-dir={tmp_path}", "--resume", f"--steps={steps}", "--sample-tokens=0", *options)
    losses = program.Run(tmp_path).losses
    assert len(losses) == 12 and losses[-1] < losses[0]


@pytest.mark.parametrize("options, line", [
    (["--master-dtype=none", "--dtype=fp32"], "--master-dtype none needs --dtype bf16, but --dtype is fp32"),
    (["--master-dtype=none", "--dtype=bf16", "--stochastic-rounding=false"], "--master-dtype none rounds weights stochastically"),
    (["--moments-dtype=fp16"], "--moments-dtype: unknown value 'fp16'; choose one of: fp32, bf16, 8bit"),
])
def test_options_without_a_meaning(options, line):
    result = program.run(*options, check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1
