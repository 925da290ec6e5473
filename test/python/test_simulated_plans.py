"""Plans of random configurations for GPUs equal their runs on simulated GPUs, whose chip is an A100's."""

import shlex

import planned
import simulated

simulated.require()


def test_plans_equal_runs(tmp_path, configurations=4):
    draw = planned.seeded()
    for number in range(configurations):
        options, ranks = planned.random_options(draw, most_ranks=4, tiers=["cpu", "nvme"], folder=tmp_path / "disk")
        print(shlex.join(options), "on", ranks)
        run = simulated.train(tmp_path / str(number), *options, "--device=cuda", "--steps=2", "--val-every=0", "--val-batches=1", ranks=ranks)
        planned.assert_equals_run(planned.plan(*options, "--gpu=A100", f"--gpus={ranks}")[0], run)
