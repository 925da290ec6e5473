"""The recipes of scripts/: each trains a few steps of a tiny model from the folders that the dataset scripts make, and its
own sizes make a plan."""

import json
import pathlib
import shutil
import subprocess
import tomllib

import numpy as np
import pytest

import program

ROOT = program.ROOT
RECIPES = sorted(path.stem for path in (ROOT / "scripts").glob("gpt*.sh"))
# What makes a recipe small. Sizes and amounts only: all else is the recipe's own.
TINY = {"layers": 4, "heads": 2, "channels": 32, "seq-len": 16, "vocab-size": 256, "global-batch-tokens": 512, "steps": 3,
        "warmup-steps": 2, "val-every": 2, "val-batches": 1, "eval-every": 2, "sample-every": 0, "sample-tokens": 4,
        "checkpoint-every": 2, "device": "cpu"}
# (recipe, processes, options): on one process and on several. 64 GPUs, 8 x 4 x 2, are here 2 x 2 x 2.
RUNS = [(name, count, []) for name in RECIPES if "3d" not in name for count in (1, 2)]
RUNS.append(("gpt3_6700M_3d", 8, ["--pipeline-parallel=2"]))


def test_every_recipe_is_a_configuration_and_a_command():
    assert len(RECIPES) >= 5
    for name in RECIPES:
        configuration = tomllib.loads((ROOT / f"scripts/{name}.toml").read_text())
        assert configuration["out-dir"] == f"runs/{name}"
        assert {"model", "train-data", "val-data", "eval-hellaswag", "steps", "global-batch-tokens"} <= set(configuration)
    assert {name for name, *_ in RUNS} == set(RECIPES)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that has the scripts, the program and small data, as a clone has after the dataset scripts."""
    place = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "scripts", place / "scripts")
    (place / "train_gpt").symlink_to(program.PROGRAM)
    tokens = np.random.default_rng(1).integers(0, 256, 5000)
    for size in ("10B", "100B"):
        folder = place / f"data/fineweb_edu_{size}"
        folder.mkdir(parents=True)
        for name in ("train_000001", "train_000002", "val_000000"):
            program.write_token_file(folder / f"{name}.bin", tokens)
    (place / "data/hellaswag").mkdir()
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    (place / "data/hellaswag/hellaswag_val.jsonl").write_text(2 * (json.dumps(example) + "\n"))
    return place


@pytest.mark.parametrize("name, count, options", RUNS, ids=lambda value: str(value) if isinstance(value, (str, int)) else "")
def test_a_recipe_trains(clone, name, count, options):
    tiny = [f"--{key}={value}" for key, value in TINY.items()]
    done = subprocess.run([f"scripts/{name}.sh", str(count), *tiny, *options, "--out-dir", f"runs/{name}-{count}"], cwd=clone,
                          capture_output=True, text=True, timeout=120 * program.PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in pathlib.Path(clone, f"runs/{name}-{count}/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2, 3]
    assert lines[0]["run"]["mesh"]["world"] == count
    assert "hellaswag_acc_norm" in lines[3] and "val_loss" in lines[3]
    kept = lines[0]["run"]["configuration"]
    recipe = tomllib.loads((ROOT / f"scripts/{name}.toml").read_text())
    changed = {*TINY, *(option[2:].split("=")[0] for option in options), "out-dir"}
    assert {key: kept[key] for key in recipe if key in kept and key not in changed} == \
        {key: value for key, value in recipe.items() if key in kept and key not in changed}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_its_own_sizes_has_a_plan(name):
    done = program.run("--config", ROOT / f"scripts/{name}.toml", "--device=cpu", "--print-step")
    assert done.stdout.count("update") >= 1
