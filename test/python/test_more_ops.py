"""Every operation on the other simulated chips, and with ThreadSanitizer in the kernels (test_ops.py has the rest)."""

import op_cases
import pytest
import simulated
import test_ops


@simulated.NEEDED
@pytest.mark.parametrize("chip", [80, 86, 89])
@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_a_simulated_gpu(tmp_path, seed, op, chip):
    test_ops.on_a_simulated_gpu(tmp_path, seed, op, chip, orders=[1])


@simulated.NEEDED
@pytest.mark.parametrize("op, chip", test_ops.CHECKED)
def test_races_on_a_simulated_gpu(tmp_path, seed, op, chip):
    test_ops.with_checked_kernels(tmp_path, seed, op, chip, "thread")


@simulated.NEEDED
def test_every_kernel_ran_in_several_blocks():
    test_ops.check_that_every_kernel_ran()
