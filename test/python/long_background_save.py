"""More runs that are interrupted at any moment of a save or of a step. SEED=N repeats them."""

import pytest

import test_background_save

start = test_background_save.start


@pytest.mark.parametrize("number", range(6, 30))
def test_interrupted_runs_lose_nothing(number, start, tmp_path):
    test_background_save.check_interrupted_runs(number, start, tmp_path)
