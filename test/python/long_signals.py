"""200 signals at random moments of a run's first second, while other processes keep every core busy. Each one ends the job, and
the job's status tells how. SEED=N repeats the moments."""

import multiprocessing
import os
import random
import signal

import pytest
import test_signals

SIGNALS = [signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1]


def spin():
    while True:
        pass


@pytest.fixture(scope="module")
def busy_cores():
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for process in spinning:
        process.start()
    yield
    for process in spinning:
        process.kill()


@pytest.mark.usefixtures("busy_cores")
@pytest.mark.parametrize("part", range(20))
def test_each_signal_ends_the_job(part, tmp_path):
    draw = random.Random(f"{test_signals.SEED} {part}")
    for attempt in range(10):
        status = test_signals.signal_at_a_moment("two", draw.choice(SIGNALS), draw.uniform(0, 1), tmp_path / str(attempt))
        print(f"status {status}")
