"""Trainings by the CUDA device's own host code and kernels, without a GPU (simulated.py).

They follow the CPU device; they are the same, bit for bit, in whatever order the streams' work runs, as far as events
allow; and where an event is missing (planted_faults.py) they are not, or the runtime says so.
"""

import collections
import functools
import hashlib
import json
import re

import model_bounds
import numpy as np
import pytest
import reference_model
import safetensors_numpy
import simulated
import torch
from greedy_text import PROMPT, telling_weights
from model_comparison import save_weights
from planted_faults import FAULTS
from program import PROGRAM, ROOT, Run, write_token_file
from reference_model import Sizes
from simulated import at_once, train

simulated.require()
torch.set_num_threads(1)  # beside the programs

CPU = str((ROOT / PROGRAM).resolve())
SIZES = Sizes(layers=2, heads=2, channels=16, seq_len=16, vocab_size=64)
SEQUENCES, STEPS = 4, 20
CONNECTING_BYTES = 8 << 20  # of which NCCL's ranks get connected (llmc/train/devices.cpp)
BF16 = ["--dtype=bf16"]
STOCHASTIC = [*BF16, "--stochastic-rounding"]
ROUNDED = [*BF16, "--gradient-dtype=bf16", "--micro-batch-size=1"]


class Experiment:
    """Random weights and one batch, which every step repeats, in files."""

    def __init__(self, folder, seed):
        generator = torch.Generator().manual_seed(seed)
        self.weights = reference_model.random_weights(SIZES, generator)
        T = SIZES.seq_len
        # One run of tokens, cut into windows that share their end tokens.
        run = torch.randint(SIZES.vocab_size, (SEQUENCES * T + 1,), generator=generator)
        self.tokens = torch.stack([run[i * T:(i + 1) * T + 1] for i in range(SEQUENCES)])
        self.data, self.init = folder / "train.bin", folder / "init.safetensors"
        write_token_file(self.data, run.numpy())
        safetensors_numpy.save(self.init, {name: w.numpy().astype(np.float32) for name, w in self.weights.items()})

    def options(self, *more, steps=STEPS):
        return ["--init", self.init, "--train-data", self.data, f"--global-batch-tokens={SEQUENCES * SIZES.seq_len}",
                *SIZES.options(), f"--steps={steps}", "--lr=1e-3", "--lr-schedule=constant", "--warmup-steps=0",
                "--weight-decay=0.1", "--grad-clip=0.5", *more]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, seed):
    return Experiment(tmp_path_factory.mktemp("experiment"), seed)


@pytest.fixture(scope="module")
def bounds(experiment, seed):
    """A function that gives the allowed |difference| of any step's loss from the CPU device's."""
    @functools.cache
    def bound(dtype, ranks, micro_batches, rounds_gradients):
        if dtype == "fp32":
            return model_bounds.LOSS_FP32
        return model_bounds.gpu_training_bound_bf16(
            experiment.weights, SIZES, [experiment.tokens] * STEPS, (micro_batches,) * ranks, rounds_gradients, draws=6,
            generator=torch.Generator().manual_seed(seed), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.5)
    return bound


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def results(run):
    """What must have the same bits."""
    return run.losses, run.column("grad_norm"), [line.get("val_loss") for line in run.lines]


# ---- against the CPU device


def follow(folder, experiment, bound, options, ranks):
    """Trains on both devices and compares the losses; returns both runs."""
    calls = [functools.partial(train, folder / "cpu", *experiment.options(*options, "--device=cpu"), executable=CPU)]
    calls += [functools.partial(train, folder / str(n), *experiment.options(*options), ranks=n, seed=n) for n in ranks]
    cpu, *gpus = at_once(*calls)
    # The batch is learned: a bound that allowed everything would allow less than this.
    assert cpu.losses[0] - cpu.losses[-1] > 20 * bound
    for n, gpu in zip(ranks, gpus):
        assert gpu.record["configuration"]["device"] == "cuda" and gpu.record["mesh"]["data"] == n
        difference = np.abs(np.array(gpu.losses) - cpu.losses).max()
        print(f"{n} processes, {' '.join(map(str, options))}: largest difference of the loss {difference:.2e}, {bound:.2e} allowed")
        assert difference <= bound
        if bound == model_bounds.LOSS_FP32:  # of the same weights, the gradients are as near
            assert gpu.column("grad_norm")[0] == pytest.approx(cpu.column("grad_norm")[0], rel=model_bounds.GRADIENT_FP32)
        assert gpu.column("tokens") == cpu.column("tokens") and gpu.column("lr") == cpu.column("lr")
    return cpu, gpus


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_follows_the_cpu_on_any_number_of_processes(dtype, experiment, bounds, tmp_path):
    follow(tmp_path, experiment, bounds(dtype, 1, 1, False), [f"--dtype={dtype}"], (1, 2, 4))


def test_follows_the_cpu_with_gradients_in_bf16(experiment, bounds, tmp_path):
    follow(tmp_path, experiment, bounds("bf16", 2, 2, True), ROUNDED, (2,))


def test_follows_the_cpu_with_stochastic_rounding(experiment, bounds, tmp_path):
    """Both devices take the same random bits."""
    follow(tmp_path, experiment, bounds("bf16", 1, 1, False), STOCHASTIC, (2,))


def test_follows_the_cpu_in_micro_batches_validation_and_samples(experiment, bounds, tmp_path):
    options = ["--dtype=fp32", "--micro-batch-size=1", "--val-data", experiment.data, "--val-every=7", "--sample-tokens=12",
               "--sample-every=15", "--prompt=5 6 7", "--temperature=0"]
    cpu, (gpu,) = follow(tmp_path, experiment, bounds("fp32", 1, 1, False), options, (1,))
    validations = [[(line["step"], line["val_loss"]) for line in run.lines if "val_loss" in line] for run in (cpu, gpu)]
    assert [step for step, _ in validations[0]] == [7, 14, 20] == [step for step, _ in validations[1]]
    for (_, one), (_, other) in zip(*validations):
        assert abs(one - other) <= model_bounds.LOSS_FP32
    texts = [[line for line in run.output.splitlines() if "5 6 7" in line] for run in (cpu, gpu)]
    assert len(texts[0]) == 2 and texts[0] == texts[1]


def test_generates_the_likeliest_text(seed, tmp_path):
    """--generate: a prompt, rows one by one, a context that is full, and what tensor-parallel and sharded ranks say."""
    weights, expected = telling_weights(SIZES, seed)
    save_weights(tmp_path / "init.safetensors", weights)
    count = SIZES.seq_len + 5
    options = ["--generate", "--init", tmp_path / "init.safetensors", *SIZES.options(), "--dtype=fp32", "--temperature=0",
               f"--prompt={' '.join(map(str, PROMPT))}", f"--sample-tokens={count}"]
    meshes = [(1, []), (2, ["--tensor-parallel=2"]), (2, ["--zero-stage=3"]), (2, ["--pipeline-parallel=2"])]
    runs = at_once(*[functools.partial(simulated.run, [*options, *mesh], tmp_path / str(i), ranks=ranks, seed=i)
                     for i, (ranks, mesh) in enumerate(meshes)])
    for run, mesh in zip(runs, meshes):
        assert run.returncode == 0, f"{mesh}\n{run.stderr}"
        assert [int(token) for token in run.stdout.split()] == [*PROMPT, *expected[:count]], mesh


# ---- the same bits


def cached(folder):
    """For a run with a cache of its own."""
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def row(run):
    """The header's row about algorithms, on one line."""
    return " ".join(re.search(r"^  algorithms (.*(\n    .*)*)", run.output, re.MULTILINE)[1].split())


def choices(file):
    """Of an algorithms.txt: {kind of GPU and library: {product: algorithm}}."""
    paragraphs = [paragraph.splitlines() for paragraph in file.read_text(errors="replace").split("\n\n")]
    return {lines[0]: dict(line.split(":", 1) for line in lines[1:]) for lines in paragraphs}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_that_is_repeated_gives_the_same_bits(ranks, experiment, tmp_path):
    """Algorithms are chosen by time, once: by the first run of the command."""
    options, cache = experiment.options(*BF16, steps=3), tmp_path / "cache/train_gpt/algorithms.txt"

    def trained(name, cache_of=tmp_path):
        run = train(tmp_path / name, *options, ranks=ranks, variables=cached(cache_of))
        return run, digest(run.out_dir / "checkpoint-00000003/model.safetensors"), choices(run.out_dir / "algorithms.txt")

    first, weights, chosen = trained("first")
    assert row(first) == f"chosen now, and kept in {cache}"
    assert choices(cache) == chosen and [path.name for path in cache.parent.iterdir()] == [cache.name]
    for name in ("second", "third"):
        run, again, taken = trained(name)
        assert row(run) == f"as in {cache}" and "chosen now" not in run.output
        assert (results(run), again, taken) == (results(first), weights, chosen)
    # Which were chosen is a matter of time: with another cache they may be others, and then so are the bits.
    other, others_weights, others_chosen = trained("other", tmp_path / "another")
    assert row(other).startswith("chosen now")
    assert others_weights == weights or others_chosen != chosen


def test_algorithms_are_those_of_the_checkpoint_then_of_the_directory_then_of_the_cache(experiment, tmp_path):
    """Each place has its mark in the last word of its algorithms, of which the library makes no use."""
    options = experiment.options(*BF16, "--checkpoint-every=1", steps=2)
    run = train(tmp_path, *options, variables=cached(tmp_path))
    cache, own = tmp_path / "cache/train_gpt/algorithms.txt", run.out_dir / "algorithms.txt"
    checkpoint = run.out_dir / "checkpoint-00000001"
    (kind, chosen), = choices(cache).items()

    def mark(place, word, products=tuple(chosen)):
        def paragraph(of_kind, word, products):
            return "\n".join([of_kind, *(f"{product}:{chosen[product].rpartition(' ')[0]} {word}" for product in products), ""])

        place.write_text("\n".join([paragraph("another GPU", "c", chosen), paragraph(kind, word, products),
                                    paragraph("one more GPU", "d", chosen)]))

    def taken(*more):
        """Where from, and the marks of all algorithms, as the run leaves them in its directory."""
        again = train(tmp_path, *options, *more, variables=cached(tmp_path))
        return row(again), {algorithm.split()[-1] for algorithm in choices(own)[kind].values()}

    mark(cache, "a")
    mark(own, "b")
    assert taken() == (f"as in {own}", {"b"})  # and so its checkpoints have
    own.unlink()
    assert taken(f"--resume={checkpoint}") == (f"as in {checkpoint}", {"b"})
    own.unlink()
    assert taken() == (f"as in {cache}", {"a"})
    # What the directory has not, the cache has.
    mark(own, "b", list(chosen)[:2])
    assert taken() == (f"as in {own}", {"a", "b"})


def test_what_no_earlier_run_has_is_added_to_the_cache(experiment, tmp_path):
    cache = tmp_path / "cache/train_gpt/algorithms.txt"
    train(tmp_path / "first", *experiment.options(*BF16, steps=1), variables=cached(tmp_path))
    first = choices(cache)
    other = train(tmp_path / "other", *experiment.options("--dtype=fp32", steps=1), variables=cached(tmp_path))
    assert row(other) == f"as in {cache}"
    added = int(re.search(r"(\d+) algorithms chosen now, which no earlier run had", other.output)[1])
    (kind, both), = choices(cache).items()
    assert first[kind].items() <= both.items() and len(both) == len(first[kind]) + added
    # Of another kind of GPU nothing is taken, and nothing lost.
    last = train(tmp_path / "last", *experiment.options(*BF16, steps=1), variables={**cached(tmp_path), "SIMT_CHIP": "90"})
    assert row(last) == f"chosen now, and kept in {cache}"
    all_of_them = choices(cache)
    assert len(all_of_them) == 2 and all_of_them[kind] == both


def test_a_cache_that_cannot_be_used_stops_nothing(experiment, tmp_path):
    options = experiment.options(*BF16, steps=1)

    def row_with(name, variables):
        run = train(tmp_path / name, *options, variables=variables)
        assert run.out_dir.joinpath("algorithms.txt").exists()
        return row(run)

    (tmp_path / "file").write_text("")
    folder = tmp_path / "cache/train_gpt/algorithms.txt"
    folder.mkdir(parents=True)
    assert "is not a directory" in row_with("below a file", {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert row_with("a directory", cached(tmp_path)) == f"chosen now, and not kept: {folder} is a directory; give the name of a file"
    assert row_with("none", {"XDG_CACHE_HOME": "", "HOME": ""}) == "chosen now, and not kept: neither XDG_CACHE_HOME nor HOME is set"
    assert row_with("home", {"XDG_CACHE_HOME": "not/absolute", "HOME": str(tmp_path)}) == \
        f"chosen now, and kept in {tmp_path}/.cache/train_gpt/algorithms.txt"
    # Damaged: what is no algorithm is chosen again.
    file = tmp_path / ".cache/train_gpt/algorithms.txt"
    whole = choices(file)
    file.write_bytes(file.read_bytes().replace(b": 1", b": f").replace(b"align", b"\0\xff:"))
    assert row_with("damaged", {"XDG_CACHE_HOME": "", "HOME": str(tmp_path)}) == f"as in {file}"
    (kind, products), = whole.items()
    assert products.keys() <= choices(file)[kind].keys()


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32", "--micro-batch-size=1"]), (2, [*STOCHASTIC, *ROUNDED])],
                         ids=["fp32", "2 processes, bf16 throughout"])
def test_any_order_of_work_and_a_resumed_run_give_the_same_bits(ranks, options, experiment, tmp_path):
    options = [*experiment.options(*options, steps=6), "--checkpoint-every=3", "--val-data", experiment.data, "--val-every=2"]

    def trained(folder, *more, seed):
        run = train(folder, *options, "--export", folder / "w.safetensors", *more, ranks=ranks, seed=seed)
        return run, digest(folder / "w.safetensors")

    # Work in the order of its issue; as events allow; and what the first three steps left.
    whole, weights = trained(tmp_path / "whole", seed=0)
    checkpoint = whole.out_dir / "checkpoint-00000003"
    *others, (resumed, resumed_weights) = at_once(
        *(functools.partial(trained, tmp_path / str(seed), seed=seed) for seed in (1, 2)),
        functools.partial(trained, tmp_path / "resumed", "--resume", checkpoint, seed=3))
    for run, own_weights in others:
        assert results(run) == results(whole)
        assert own_weights == weights
    assert results(resumed) == tuple(column[3:] for column in results(whole))
    assert resumed_weights == weights


HYBRID = ["--zero-stage=3", "--zero-shard-size=2"]
# Of so many processes: dtype, micro-batches a step, when gradients are reduced; and what trains the same run as stage 0.
SHARDED = {
    2: {("bf16", 2, "micro-batch"): [["--zero-stage=1"], ["--zero-stage=2"], ["--zero-stage=3"]],
        ("fp32", 2, "step"): [["--zero-stage=1"], ["--zero-stage=2", "--overlap-grad-reduce=false"]]},
    4: {("bf16", 2, "step"): [["--zero-stage=2"], ["--zero-stage=3"]],
        ("fp32", 1, "step"): [["--zero-stage=1"], ["--zero-stage=3", "--prefetch-units=2"], HYBRID]},
}


@pytest.mark.parametrize("ranks", SHARDED)
def test_every_stage_of_zero_gives_the_same_bits(ranks, experiment, seed, tmp_path):
    """10 steps; the order of the queues' work is another one in each run."""
    tokens = 2 * ranks * SIZES.seq_len
    write_token_file(tmp_path / "train.bin", np.random.default_rng(seed).integers(SIZES.vocab_size, size=tokens + 1))
    options = [*experiment.options(steps=10), "--train-data", tmp_path / "train.bin", f"--global-batch-tokens={tokens}"]

    def trained(setting, stage, seed):
        dtype, micro_batches, reduce_every = setting
        folder = tmp_path / str(seed)
        run = train(folder, *options, f"--dtype={dtype}", f"--micro-batch-size={2 // micro_batches}", f"--reduce-every={reduce_every}",
                    *stage, "--export", folder / "w.safetensors", ranks=ranks, seed=seed, variables=cached(tmp_path / dtype))
        assert run.record["micro_batches"] == micro_batches
        return results(run), digest(folder / "w.safetensors")

    def all_of(runs, first_seed):
        return at_once(*(functools.partial(trained, *run, seed=seed) for seed, run in enumerate(runs, first_seed)))

    settings = SHARDED[ranks]
    # Those first, whose algorithms the others take.
    whole = dict(zip(settings, all_of([(setting, []) for setting in settings], 0)))
    runs = [(setting, stage) for setting, stages in settings.items() for stage in stages]
    for (setting, stage), own in zip(runs, all_of(runs, len(settings))):
        if stage == HYBRID:  # NCCL adds in an order of its own
            assert own[0][0] == pytest.approx(whole[setting][0][0], rel=1e-5)
        else:
            assert own == whole[setting], (setting, stage)


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32"]), (1, ["--dtype=bf16", "--micro-batch-size=2"]),
                                            (2, ["--dtype=bf16", "--micro-batch-size=1", "--zero-stage=3"])],
                         ids=["fp32", "bf16", "2 processes, bf16, ZeRO-3"])
def test_recompute_gives_the_same_bits(ranks, options, experiment, tmp_path):
    """The operations of the forward pass, once more with the same inputs; the embedding's and the head's are not made again."""
    def trained(recompute, seed):
        folder = tmp_path / recompute
        run = train(folder, *experiment.options(*options), f"--recompute={recompute}", "--export", folder / "w.safetensors",
                    ranks=ranks, seed=seed, variables=cached(tmp_path))
        return results(run), digest(folder / "w.safetensors")

    whole = trained("none", seed=0)
    assert at_once(functools.partial(trained, "selective", 1), functools.partial(trained, "block", 2)) == [whole, whole]


# Stages, ranks, options: 4 ranks of 2 stages are 2 data ranks.
PIPELINES = [(2, 2, ["--pipeline-schedule=1f1b", "--recompute=selective"]), (2, 2, ["--pipeline-schedule=interleaved"]),
             (2, 2, ["--pipeline-schedule=zb-h1", "--recompute=block"]), (4, 4, ["--pipeline-schedule=1f1b"])]
PIPELINES_OF_PAIRS = [(2, 4, ["--zero-stage=0", "--pipeline-schedule=gpipe"]),
                      (2, 4, ["--zero-stage=3", "--pipeline-schedule=interleaved", "--recompute=block"])]


@pytest.mark.parametrize("dtype, pipelines", [("bf16", PIPELINES), ("fp32", PIPELINES_OF_PAIRS)], ids=["bf16", "fp32, two data ranks"])
def test_every_pipeline_gives_the_same_bits(dtype, pipelines, experiment, bounds, tmp_path):
    """And, in fp32, follows the CPU device. The order of the queues' work is another one in each run."""
    options = [*experiment.options("--layers=4", "--micro-batch-size=1", "--reduce-every=micro-batch", steps=6)]
    options = [option for option in options if option not in ("--init", experiment.init) and not str(option).startswith("--layers=2")]

    def trained(folder, stages, ranks, more, seed):
        run = train(folder, *options, f"--dtype={dtype}", f"--pipeline-parallel={stages}", *more, "--export",
                    folder / "w.safetensors", ranks=ranks, seed=seed, variables=cached(tmp_path))
        return results(run), digest(folder / "w.safetensors")

    first, *others = [trained(tmp_path / str(number), *pipeline, seed=number) for number, pipeline in enumerate(pipelines)]
    for own, pipeline in zip(others, pipelines[1:]):
        assert own == first, pipeline
    if dtype == "fp32":
        cpu = train(tmp_path / "cpu", *options, "--dtype=fp32", "--device=cpu", executable=CPU)
        assert np.abs(np.array(first[0][0]) - cpu.losses).max() <= model_bounds.LOSS_FP32


# ---- planted faults


@pytest.fixture(scope="module")
def right(experiment, tmp_path_factory):
    """A function that gives the run of the program with all faults, where none is asked for."""
    @functools.cache
    def run(ranks, micro_batches):
        folder, options = tmp_path_factory.mktemp("right"), few_steps(experiment, ranks, micro_batches)
        first = train(folder / "first", *options, ranks=ranks, executable=simulated.PLANTED)
        other = train(folder / "other", *options, ranks=ranks, executable=simulated.PLANTED, seed=1)
        assert results(other) == results(first)
        return first
    return run


def few_steps(experiment, ranks, micro_batches):
    return [*experiment.options(steps=4), "--val-data", experiment.data, "--val-every=2", f"--micro-batch-size={SEQUENCES // ranks // micro_batches}"]


def found(fault, expected, seed, experiment, folder):
    """How a run shows the fault; None where it does not."""
    options = ["--out-dir", folder / "run", *few_steps(experiment, fault.ranks, fault.micro_batches), "--sample-tokens=0"]
    result = simulated.run(options, folder, fault.ranks, simulated.PLANTED, seed, {"PLANT": fault.name})
    stops = [line for line in result.stderr.splitlines() if line.startswith(("simt: ", "error: "))]
    if stops:
        return stops[0]
    assert result.returncode == 0, result.stderr
    own = results(Run(folder / "run"))
    return f"other results {own}" if own != results(expected) else None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, right, experiment, tmp_path):
    expected = right(fault.ranks, fault.micro_batches)
    for seed in range(1, 6):
        shown = found(fault, expected, seed, experiment, tmp_path / str(seed))
        if shown:
            print(f"seed {seed}: {shown}")
            return
    pytest.fail("it was not found")


# ---- memory and waits


def counted(folder, *options, ranks=1, **how):
    """A run, and of each process what its runtime counted (test/simt/runtime/counts.h)."""
    run = train(folder, *options, ranks=ranks, variables={"SIMT_COUNT": str(folder / "count")}, **how)
    counts = [json.loads(path.read_text()) for path in folder.glob("count.*")]
    assert len(counts) == ranks
    return run, counts


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32"]), (2, [*STOCHASTIC, *ROUNDED])],
                         ids=["fp32", "2 processes, bf16 throughout"])
def test_an_arena_is_one_allocation_and_nothing_else_is(ranks, options, experiment, tmp_path):
    run, counts = counted(tmp_path, *experiment.options(*options, steps=1), ranks=ranks)
    arenas = [size for size in run.record["memory"].values() if size > 0]
    connecting = [CONNECTING_BYTES] if ranks > 1 else []  # released before the run
    for count in counts:
        assert sorted(count["cudaMalloc"]) == sorted(arenas + connecting)


@pytest.mark.parametrize("ranks, text", [(1, "CUDA's context and other processes 286.1 MiB"),
                                         (2, "CUDA's context and other processes 286.1 MiB, NCCL 76.3 MiB")])
def test_memory_beside_the_arenas_is_told_apart(ranks, text, experiment, tmp_path):
    taken = {"SIMT_CONTEXT_BYTES": "300000000", "SIMT_NCCL_BYTES": "80000000"}
    run = train(tmp_path, *experiment.options(steps=1), ranks=ranks, variables=taken)
    assert f"  beside it   {text}\n" in run.output


@pytest.mark.parametrize("ranks, micro_batches, stage", [(1, 1, 0), (2, 1, 0), (1, 4, 0), (2, 2, 3)])
def test_a_step_waits_for_nothing_but_its_loss(ranks, micro_batches, stage, experiment, tmp_path):
    """Once by polling, so that the watchdog lives, and once for the copy."""
    options = [*experiment.options(), f"--micro-batch-size={SEQUENCES // ranks // micro_batches}", f"--zero-stage={stage}"]
    (_, few), (_, more) = at_once(*(functools.partial(counted, tmp_path / str(steps), *options, f"--steps={steps}", ranks=ranks)
                                    for steps in (2, 6)))

    def waits(counts):
        return sum((collections.Counter(count["waits"]) for count in counts), collections.Counter())

    in_four_steps = waits(more)
    in_four_steps.subtract(waits(few))
    polls = in_four_steps.pop("cudaEventQuery")
    assert {call: number for call, number in in_four_steps.items() if number} == {
        "cudaMemcpyAsync": 4 * ranks, "cudaStreamSynchronize": 4 * ranks}
    allowed = 4 * ranks
    # Beside other processes work also goes on while the host is elsewhere, and may be done when it asks.
    assert polls == allowed or (ranks > 1 and 0 < polls <= allowed)


@pytest.mark.parametrize("tokens", [[], ["--sequence-parallel"]], ids=["whole tokens", "divided tokens"])
def test_ranks_that_share_layers_follow_the_cpu_device(tokens, experiment, tmp_path):
    """To the bit the same whatever the stages' schedule, recompute, and the order of the queues' work."""
    options = [*experiment.options("--dtype=fp32", "--micro-batch-size=1", steps=6), "--tensor-parallel=2", *tokens]

    def trained(name, seed, *more):
        run = train(tmp_path / name, *options, "--pipeline-parallel=2", *more, "--export", tmp_path / name / "w.safetensors",
                    ranks=4, seed=seed, variables=cached(tmp_path))
        return results(run), digest(tmp_path / name / "w.safetensors")

    first = trained("1f1b", 0)
    assert trained("zb-h1", 1, "--pipeline-schedule=zb-h1", "--recompute=selective") == first
    cpu = train(tmp_path / "cpu", *experiment.options("--dtype=fp32", steps=6), "--device=cpu", executable=CPU)
    assert np.abs(np.array(first[0][0]) - cpu.losses).max() <= model_bounds.LOSS_FP32
