"""The operations, the kernels and the lab on the executor in many random orders of their threads, with other inputs each time."""

import os
import pathlib
import random
import subprocess

import op_cases
import pytest
import simulated
import test_ops

BUILD = pathlib.Path(os.environ["BUILD_DIR"])


@pytest.mark.parametrize("program", ["kernels-plain", "lab-plain"])
@pytest.mark.parametrize("seed", random.sample(range(1, 2**32), 20))
def test_order(seed, program):
    run = subprocess.run([BUILD / "test" / program, "--gtest_brief=1", "--gtest_filter=-Faults*:Limits*"], capture_output=True, text=True,
                         env=os.environ | {"KERNEL_SEED": str(seed), "KERNEL_REPORT": "none"}, timeout=1800)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@simulated.NEEDED
@pytest.mark.parametrize("seed", random.sample(range(1, 2**32), 20))
def test_order_of_operations(tmp_path, seed):
    for op in op_cases.OPERATIONS:
        test_ops.on_a_simulated_gpu(tmp_path, seed, op, 90, orders=range(seed, seed + 2))
