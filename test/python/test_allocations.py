"""A training step allocates no memory after the first steps have allocated the memory that is kept."""

import re

import program
import pytest

# A model whose first steps are like all others, with several micro-batches for each process, and with one.
OPTIONS = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=32", "--steps=5"]


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("dtypes", [["--dtype=fp32"], ["--dtype=bf16", "--recompute=block"],
                                    ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding"]], ids=" ".join)
@pytest.mark.parametrize("transport,ranks", [("", 1), ("mpi", 2), ("mpi", 4), ("tcp", 4)])
def test_a_step_allocates_nothing(transport, ranks, dtypes, micro_batch):
    result = program.run(*OPTIONS, *dtypes, f"--micro-batch-size={micro_batch}", ranks=ranks, mpi=transport == "mpi",
                         program=f"{program.BUILD}/test/probe/allocations")
    if "not counted" in result.stdout:
        pytest.skip(result.stdout.splitlines()[0])
    counts = re.findall(r"rank (\d+): (\d+) of ours, (\d+) of libraries", result.stdout)
    assert sorted(int(rank) for rank, _, _ in counts) == list(range(ranks)), result.stdout + result.stderr
    assert all(ours == "0" for _, ours, _ in counts), result.stdout
    # oneDNN allocates in every call. If its count were zero, the counter would not work.
    assert all(int(libraries) > 0 for _, _, libraries in counts), result.stdout
