"""Every operation on the other simulated chips (test_ops.py has one)."""

import op_cases
import pytest
import simulated
import test_ops


@simulated.NEEDED
@pytest.mark.parametrize("chip", [80, 86, 89])
@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_a_simulated_gpu(tmp_path, seed, op, chip):
    test_ops.on_a_simulated_gpu(tmp_path, seed, op, chip)
