"""The tests of test_planner.py and test_simulated_plans.py on more random configurations."""

import test_planner
import test_simulated_plans


def test_plans_equal_runs(tmp_path):
    test_planner.test_plans_equal_runs(tmp_path, configurations=40)


def test_plans_equal_simulated_runs(tmp_path):
    test_simulated_plans.test_plans_equal_runs(tmp_path, configurations=12)
