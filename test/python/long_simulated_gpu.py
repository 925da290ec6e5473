"""Trainings on simulated GPUs with AddressSanitizer (the others are in test_simulated_gpu.py)."""

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
