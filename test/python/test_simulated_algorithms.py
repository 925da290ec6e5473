"""The algorithms of matrix products on simulated GPUs (simulated.py). They are chosen once and kept. A repeated command and a
resumed run use them again, in every order of the streams' work."""

import functools
import json
import re

import pytest
import boxes
import simulated
from program import Run, digest
from simulated import at_once, train
from simulated_experiment import BF16, ROUNDED, STOCHASTIC, cached, counted, results

simulated.require()


def row(run):
    """The header's row about algorithms, joined to one line."""
    return " ".join(re.search(r"^  algorithms (.*(\n    .*)*)", run.output, re.MULTILINE)[1].split())


def as_in(place):
    return f"from {place}; missing ones are autotuned"


def choices(file):
    """The content of an algorithms.txt: {kind of GPU and library: {product: algorithm}}."""
    paragraphs = [paragraph.splitlines() for paragraph in file.read_text(errors="replace").split("\n\n")]
    return {lines[0]: dict(line.split(":", 1) for line in lines[1:]) for lines in paragraphs}


SAMPLES = ["--sample-tokens=30", "--sample-every=1", "--prompt=5 6 7"]
TENSOR = [*BF16, "--tensor-parallel=2"]


@pytest.mark.parametrize("ranks, options", [
    (1, BF16), (1, ["--dtype=fp32"]), (2, BF16), (2, [*TENSOR, *SAMPLES]), (4, [*TENSOR, "--pipeline-parallel=2"])],
    ids=["bf16", "fp32", "2 processes", "2 ranks a layer, samples", "2 stages of 2 ranks a layer"])
def test_the_fastest_with_the_same_bits_each_time_is_taken_by_all(ranks, options, experiment, tmp_path):
    """It is neither the library's first offer nor the fastest of all (test/simt/runtime/cublaslt_algorithms.cpp)."""
    options = experiment.options(*options, steps=2)
    run = train(tmp_path / "chooses", *options, ranks=ranks, variables=cached(tmp_path))
    # Of each product one algorithm fails, and one that promises the same bits varies.
    products = sum(map(len, choices(run.out_dir / "algorithms.txt").values()))
    assert f"note: cuBLASLt's algorithms that failed: {products}, that gave other bits each time: {products};" in " ".join(run.output.split())
    _, counts = counted(tmp_path / "takes", *options, ranks=ranks, variables=cached(tmp_path))
    assert [set(count["products"]) for count in counts] == [{"algorithm 33"}] * ranks


TINY = ["--layers=2", "--channels=32", "--heads=2", "--seq-len=16"]


@pytest.mark.parametrize("ranks, options", [
    (1, ["--model=nanochat-tiny", "--vocab-size=64", *BF16]),
    (2, ["--model=tiny", "--vocab-size=256", *TENSOR]),
    (2, ["--model=llama-tiny", "--vocab-size=64", "--kv-heads=2", "--head-size=16", "--mlp-size=64", "--precision=te-fp8", "--zero-stage=3"]),
    (2, ["--model=tiny", "--vocab-size=64", *BF16, "--optimizer=muon", "--zero-stage=1"])],
    ids=["weights that begin as zeros", "a vocabulary of the other rank", "parameters that are not gathered", "directions"])
def test_no_product_is_compared_on_zeros(ranks, options, experiment, tmp_path):
    """Of zeros, a product has the same bits by any algorithm."""
    run = train(tmp_path, "--train-data", experiment.data, "--global-batch-tokens=64", "--steps=1", *TINY, *options, ranks=ranks,
                variables=cached(tmp_path) | {"SIMT_CHIP": "90"})
    products = sum(map(len, choices(run.out_dir / "algorithms.txt").values()))
    assert f"that gave other bits each time: {products};" in " ".join(run.output.split())


def test_tf32_is_taken_where_it_is_asked_for(experiment, tmp_path):
    """TF32 rounds to 10 bits, and its algorithms are chosen separately."""
    exact, rounded, again = (train(tmp_path / str(i), *experiment.options("--dtype=fp32", *more, steps=5), variables=cached(tmp_path))
                             for i, more in enumerate(([], ["--tf32"], ["--tf32"])))
    assert all(a != b and abs(a - b) < 2e-3 * a for a, b in zip(exact.losses, rounded.losses))
    assert [row(run).split()[0] for run in (exact, rounded, again)] == ["autotuned", "autotuned", "from"]
    assert results(again) == results(rounded)
    kinds = set(choices(tmp_path / "cache/train_gpt/algorithms.txt"))
    assert len(kinds) == 2 and {kind.removesuffix(", TF32") for kind in kinds} < kinds
    # A resumed run keeps TF32 on GPUs. A CPU has none, and a note says so.
    resumed = simulated.run(["--resume", "--out-dir", tmp_path / "1/run", "--steps=6"], tmp_path, variables=cached(tmp_path))
    assert resumed.returncode == 0 and "--tf32" not in resumed.stdout, resumed.stdout + resumed.stderr
    assert Run(tmp_path / "1/run").record["configuration"]["tf32"] is True
    resumed = simulated.run(["--resume", "--out-dir", tmp_path / "1/run", "--steps=7", "--device=cpu"], tmp_path)
    assert "note: --tf32 is false, but was true in the checkpoint" in resumed.stdout, resumed.stdout + resumed.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_that_is_repeated_gives_the_same_bits(ranks, experiment, tmp_path):
    """Algorithms are chosen by time only once, by the first run of the command."""
    options, cache = experiment.options(*BF16, steps=3), tmp_path / "cache/train_gpt/algorithms.txt"

    def trained(name, cache_of=tmp_path):
        run = train(tmp_path / name, *options, ranks=ranks, variables=cached(cache_of))
        return run, boxes.contents(run.out_dir / "checkpoint-00000003"), choices(run.out_dir / "algorithms.txt")

    first, weights, chosen = trained("first")
    assert row(first) == f"autotuned now, saved in {cache}"
    assert choices(cache) == chosen and [path.name for path in cache.parent.iterdir()] == [cache.name]
    for name in ("second", "third"):
        run, again, taken = trained(name)
        assert row(run) == as_in(cache) and "autotuned now" not in run.output
        assert (results(run), again, taken) == (results(first), weights, chosen)
    # The choice depends on timing. With another cache other algorithms may be chosen, and then the bits differ.
    other, others_weights, others_chosen = trained("other", tmp_path / "another")
    assert row(other).startswith("autotuned now")
    assert others_weights == weights or others_chosen != chosen


def test_algorithms_are_those_of_the_checkpoint_then_of_the_directory_then_of_the_cache(experiment, tmp_path):
    """Each place has its own mark in the last word of its algorithms, which the library does not use."""
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
        """The source of the algorithms, and the marks of all algorithms that the run leaves in its directory."""
        again = train(tmp_path, *options, *(more or ["--overwrite"]), variables=cached(tmp_path))
        return row(again), {algorithm.split()[-1] for algorithm in choices(own)[kind].values()}

    mark(cache, "a")
    mark(own, "b")
    assert taken() == (as_in(own), {"b"})  # and so have its checkpoints
    own.unlink()
    assert taken(f"--resume={checkpoint}") == (as_in(checkpoint), {"b"})
    own.unlink()
    assert taken() == (as_in(cache), {"a"})
    # Algorithms that the directory lacks come from the cache.
    mark(own, "b", list(chosen)[:2])
    assert taken() == (as_in(own), {"a", "b"})


def test_what_no_earlier_run_has_is_added_to_the_cache(experiment, tmp_path):
    cache = tmp_path / "cache/train_gpt/algorithms.txt"
    train(tmp_path / "first", *experiment.options(*BF16, steps=1), variables=cached(tmp_path))
    first = choices(cache)
    other = train(tmp_path / "other", *experiment.options("--dtype=fp32", steps=1), variables=cached(tmp_path))
    assert row(other) == as_in(cache)
    added = int(re.search(r"(\d+) algorithms autotuned now, because", other.output)[1])
    (kind, both), = choices(cache).items()
    assert first[kind].items() <= both.items() and len(both) == len(first[kind]) + added
    # Algorithms for another kind of GPU are not used, and none are lost.
    last = train(tmp_path / "last", *experiment.options(*BF16, steps=1), variables={**cached(tmp_path), "SIMT_CHIP": "90"})
    assert row(last) == f"autotuned now, saved in {cache}"
    all_of_them = choices(cache)
    assert len(all_of_them) == 2 and all_of_them[kind] == both


def test_algorithms_are_for_one_version_of_the_library_and_one_alignment(experiment, tmp_path):
    """Algorithms for other versions or alignments are not used. They have a mark in their last word."""
    options, cache = experiment.options(*BF16, steps=1), tmp_path / "cache/train_gpt/algorithms.txt"
    train(tmp_path / "first", *options, variables=cached(tmp_path))
    (kind, chosen), = choices(cache).items()

    def taken_with(name, kind_kept, pattern, by):
        """The header's row, and whether a marked algorithm was used."""
        lines = [f"{re.sub(pattern, by, product)}:{algorithm.rpartition(' ')[0]} a" for product, algorithm in chosen.items()]
        cache.write_text("\n".join([kind_kept, *lines, ""]))
        run = train(tmp_path / name, *options, variables=cached(tmp_path))
        own = choices(run.out_dir / "algorithms.txt")[kind]
        return row(run), "a" in {own[product].split()[-1] for product in chosen}

    assert taken_with("same", kind, "", "") == (as_in(cache), True)
    other = re.sub(r"cuBLASLt \d+", "cuBLASLt 1", kind)
    assert other != kind
    assert taken_with("version", other, "", "") == (f"autotuned now, saved in {cache}", False)
    assert not taken_with("alignment", kind, "align .*", "align 1,1,1,1")[1]


def test_rank_0_chooses_for_all(experiment, tmp_path):
    """By its own clock. By the clock of rank 1, another algorithm is the fastest."""
    script = 'SIMT_SLOW_ALGORITHM=$((11 + 22 * OMPI_COMM_WORLD_RANK)) exec "$0" "$@"'
    options = ["-c", script, simulated.PLAIN, "--out-dir", tmp_path / "run", "--sample-tokens=0", *experiment.options(*BF16, steps=1)]
    result = simulated.run(options, tmp_path, 2, executable="/bin/sh", variables=cached(tmp_path) | {"SIMT_COUNT": str(tmp_path / "count")})
    assert result.returncode == 0, result.stderr
    measured = [set(json.loads(path.read_text())["products"]) for path in tmp_path.glob("count.*")]
    # Rank 0 measured all three algorithms, and rank 1 used its choice.
    assert sorted(measured, key=len)[0] == {"algorithm 33"} and len(measured) == 2


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
    assert row_with("a directory", cached(tmp_path)) == f"autotuned now, not saved: {folder} is a directory; give the name of a file"
    assert row_with("none", {"XDG_CACHE_HOME": "", "HOME": ""}) == "autotuned now, not saved: neither XDG_CACHE_HOME nor HOME is set"
    assert row_with("home", {"XDG_CACHE_HOME": "not/absolute", "HOME": str(tmp_path)}) == \
        f"autotuned now, saved in {tmp_path}/.cache/train_gpt/algorithms.txt"
    # With damaged names and algorithms: an algorithm that does not exist or does not run is chosen again.
    file = tmp_path / ".cache/train_gpt/algorithms.txt"
    whole = choices(file)
    kind_kept, *lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(kind_kept + b"".join(re.sub(rb": \w+", b": ff", line) if number % 3 else line.replace(b"align", b"\0\xff:")
                                          for number, line in enumerate(lines)))
    assert row_with("damaged", {"XDG_CACHE_HOME": "", "HOME": str(tmp_path)}) == as_in(file)
    (kind, products), = whole.items()
    mended = choices(file)[kind]
    assert products.keys() <= mended.keys() and not any(mended[product].startswith(" ff") for product in products)


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32", "--micro-batch-size=1"]), (2, [*STOCHASTIC, *ROUNDED]),
                                            (2, ["--dtype=bf16", "--optimizer=muon", "--zero-stage=2"])],
                         ids=["fp32", "2 processes, bf16 throughout", "muon"])
def test_any_order_of_work_and_a_resumed_run_give_the_same_bits(ranks, options, experiment, tmp_path):
    options = [*experiment.options(*options, steps=6), "--checkpoint-every=3", "--val-data", experiment.validation, "--val-every=2"]

    def trained(folder, *more, seed):
        run = train(folder, *options, "--export", folder / "w.safetensors", *more, ranks=ranks, seed=seed)
        return run, digest(folder / "w.safetensors")

    # Work in the order of its issue; work in a random order that events allow; and a run resumed after the first three steps.
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
