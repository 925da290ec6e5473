"""Trainings on simulated GPUs under AddressSanitizer (test_simulated_gpu.py has the others)."""

import simulated
from simulated import train
from test_simulated_gpu import ROUNDED, Experiment, experiment, like, results

simulated.require([simulated.ADDRESS])

assert experiment and Experiment  # the fixture


def test_addresses_are_right_in_any_order_of_work(experiment, tmp_path):
    """Under AddressSanitizer, which also finds the host's hands on the device's memory."""
    options = [*experiment.options(*ROUNDED, steps=2), "--val-data", experiment.data]
    first = train(tmp_path / "first", *options, ranks=2, executable=simulated.ADDRESS)
    other = train(like(first, tmp_path / "other"), *options, ranks=2, executable=simulated.ADDRESS, seed=1)
    assert results(other) == results(first)
