"""Every operation on the other simulated chips, and with sanitizers in the kernels (test_ops.py has the rest)."""

import json
import re

import op_cases
import op_files
import pytest
import simulated
import test_ops

REPORT = test_ops.BUILD / "nvcc/report.txt"  # of the compiler, on the kernels that the trainer links


@simulated.NEEDED
@pytest.mark.parametrize("chip", [80, 86, 89])
@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_a_simulated_gpu(tmp_path, seed, op, chip):
    test_ops.on_a_simulated_gpu(tmp_path, seed, op, chip, orders=[1])


# One tiling of attention is for chips with less shared memory.
CHECKED = [*((op, 90) for op in op_cases.OPERATIONS), ("attention_forward", 86)]
# By sanitizer: the operations that ran, and of each kernel the blocks of the largest grid.
ran, launched = {"address": [], "thread": []}, {"address": {}, "thread": {}}


@simulated.NEEDED
@pytest.mark.parametrize("op, chip", CHECKED)
@pytest.mark.parametrize("sanitizer", ran)
def test_accesses_and_races(tmp_path, seed, op, chip, sanitizer):
    test_ops.check(tmp_path, op_files.make_all(op, seed, "cuda"), seed, "cuda", sanitizer, SIMT_CHIP=str(chip), SIMT_SEED="1",
                   SIMT_COUNT=str(tmp_path / "count"), KERNEL_REPORT=str(REPORT), TSAN_OPTIONS="halt_on_error=1")
    for path in tmp_path.glob("count.*"):
        for symbol, blocks in json.loads(path.read_text())["kernels"].items():
            launched[sanitizer][symbol] = max(blocks, launched[sanitizer].get(symbol, 0))
    ran[sanitizer].append((op, chip))


@simulated.NEEDED
@pytest.mark.parametrize("sanitizer", ran)
def test_every_kernel_ran_in_several_blocks(sanitizer):
    """Otherwise the sanitizer would not have checked its accesses and races."""
    if len(ran[sanitizer]) < len(CHECKED) or not REPORT.exists():
        pytest.skip("not all tests ran, or there is no compiler's report")
    symbols = {line.split()[1] for line in REPORT.read_text().splitlines()}
    # One block ends a sum, and one thread stores AdamW's coefficients. test/kernels runs the checksum.
    in_one_block = {symbol for symbol in symbols if re.search("sum_total_kernel|store_kernel", symbol)}
    elsewhere = {symbol for symbol in symbols if "checksum_kernel" in symbol}
    assert {symbol for symbol in symbols - in_one_block - elsewhere if launched[sanitizer].get(symbol, 0) < 2} == set()
