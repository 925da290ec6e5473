"""Trainings on simulated GPUs with AddressSanitizer, and those of the other suites on more chips and with other seeds."""

import os
import subprocess
import sys

import pytest
import simulated
from simulated import train
from simulated_experiment import ROUNDED, cached, results

simulated.require([simulated.ADDRESS])


def test_addresses_are_right_in_any_order_of_work(experiment, tmp_path):
    """With AddressSanitizer, which also finds accesses of the host to the device's memory."""
    options = [*experiment.options(*ROUNDED, steps=2), "--val-data", experiment.validation]
    first, other = (train(tmp_path / str(seed), *options, ranks=2, executable=simulated.ADDRESS, seed=seed, variables=cached(tmp_path))
                    for seed in (0, 1))
    assert results(other) == results(first)


@pytest.mark.parametrize("suite", ["gpu", "meshes", "fp8", "offload"])
@pytest.mark.parametrize("chip", ["89", "90"])
@pytest.mark.parametrize("first_seed", ["0", "1"], ids=["even", "odd"])
def test_trainings_on_another_chip(suite, chip, first_seed):
    """With an odd seed, the first launch of a kernel waits for all work."""
    ended = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"test/python/test_simulated_{suite}.py"],
                           cwd=simulated.program.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           env={**os.environ, "SIMT_CHIP": chip, "SIMULATED_FIRST_SEED": first_seed})
    assert ended.returncode == 0, ended.stdout
