"""The recipes of scripts/recipes/. Each trains a tiny model for a few steps on folders made like the dataset scripts', and its own
sizes give a plan."""

import json
import os
import pathlib
import re
import subprocess
import tomllib

import pytest

import program
import recipe_clone
from recipe_clone import SMALLER_MESH, TINY

ROOT = program.ROOT
RECIPES = sorted(path.stem for path in (ROOT / "scripts/recipes").glob("*.toml"))
# (recipe, processes, options): with one process and with several.
RUNS = [(name, count, []) for name in RECIPES if "3d" not in name for count in (1, 2)]
RUNS.append(("gpt3_6700M_3d", 8, SMALLER_MESH))
# GPT-3's models of these sizes (Brown et al., 2020, table 2.1): tokens in a step in 2^20, and the learning rate.
PAPER = {"gpt2_124M": (0.5, 6e-4), "gpt2_350M": (0.5, 3e-4), "gpt2_774M": (0.5, 2.5e-4), "gpt2_1558M": (1, 2e-4),
         "gpt3_6700M_3d": (2, 1.2e-4)}
# The settings of all GPT-3 models (its appendix B).
OPTIMIZER = {"lr-schedule": "cosine", "min-lr-fraction": 0.1, "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
             "grad-clip": 1.0}
WARMUP_TOKENS = 375e6
# Names of data, so that recipe.sh does not look for the recipe's.
DATA = ["--train-data=t", "--val-data=v", "--eval-hellaswag=h"]


def test_every_recipe_is_a_configuration():
    assert len(RECIPES) >= 5
    for name in RECIPES:
        configuration = tomllib.loads((ROOT / f"scripts/recipes/{name}.toml").read_text())
        assert configuration["out-dir"] == f"runs/{name}"
        assert {"model", "train-data", "val-data", "eval-hellaswag", "steps", "global-batch-tokens"} <= set(configuration)
    assert {name for name, *_ in RUNS} == set(RECIPES)


def parameters_of(model):
    """The program's count: in its header, or in the message that the machine is too small."""
    done = program.run(f"--model={model}", "--steps=0", "--device=cpu", "--micro-batch-size=1", check=False)
    return int(re.search(r"parameters +([\d,]+)\n|([\d,]+) parameters and", done.stdout + done.stderr).group(1, 2)[done.returncode].replace(",", ""))


def mesh_of(name, configuration):
    """The mesh in the words of docs/launching.md."""
    stages, parts = configuration.get("pipeline-parallel", 1), configuration.get("tensor-parallel", 1)
    if stages * parts == 1:
        return f"data-parallel, ZeRO-{configuration['zero-stage']}"
    gpus = int(re.search(rf"^ *{name}\) processes=(\d+) ", (ROOT / "scripts/recipe.sh").read_text(), re.MULTILINE).group(1))
    return f"{gpus} GPUs: {gpus // (stages * parts)} data x {stages} pipeline x {parts} tensor, ZeRO-{configuration['zero-stage']}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_as_the_documentation_has_it(name):
    configuration = tomllib.loads((ROOT / f"scripts/recipes/{name}.toml").read_text())
    batch = configuration["global-batch-tokens"]
    tokens = configuration["steps"] * batch
    billions = round(tokens / 1e9)
    assert abs(tokens - billions * 10**9) < batch  # as near as whole steps allow
    pages = [path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    assert f"| `{name}` | {parameters_of(configuration['model']) / 1e6:,.0f}M | {billions} billion | {batch:,} | " \
        f"{mesh_of(name, configuration)} |\n" in "".join(pages)
    # The recipe's own introduction has the same: "19,073 steps of 524,288 tokens, which are 10 billion".
    introduction = " ".join((ROOT / f"scripts/recipes/{name}.toml").read_text().split("\nmodel")[0].replace("#", " ").split())
    assert f"{configuration['steps']:,} steps of {batch:,} tokens" in introduction and f"{billions} billion" in introduction


def test_recipes_learn_as_the_paper_says():
    assert set(PAPER) == set(RECIPES)
    for name, (mebitokens, learning_rate) in PAPER.items():
        configuration = tomllib.loads((ROOT / f"scripts/recipes/{name}.toml").read_text())
        batch = configuration["global-batch-tokens"]
        assert (batch, configuration["lr"]) == (mebitokens * 2**20, learning_rate), name
        # In round numbers of steps.
        assert configuration["warmup-steps"] * batch == pytest.approx(WARMUP_TOKENS, rel=0.03), name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_for_a_long_run(name):
    configuration = tomllib.loads((ROOT / f"scripts/recipes/{name}.toml").read_text())
    folder, billions = re.fullmatch(r"(data/fineweb_edu_(\d+)B)/train_\*\.bin", configuration["train-data"]).groups()
    assert configuration["val-data"] == f"{folder}/val_*.bin"
    # No text is used twice, and steps are whole.
    batch = configuration["global-batch-tokens"]
    assert configuration["steps"] * batch < int(billions) * 10**9 + batch
    assert configuration["dtype"] == "bf16" and 0 < configuration["checkpoint-every"] <= 1000
    # Models of more than a billion parameters.
    assert configuration.get("recompute") == ("selective" if name in ("gpt2_1558M", "gpt3_6700M_3d") else None)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    place = tmp_path_factory.mktemp("clone")
    recipe_clone.make(place)
    return place


@pytest.mark.parametrize("name, count, options", RUNS, ids=lambda value: str(value) if isinstance(value, (str, int)) else "")
def test_a_recipe_trains(clone, name, count, options):
    done = subprocess.run(["scripts/recipe.sh", name, str(count), *recipe_clone.options(), *options, "--out-dir", f"runs/{name}-{count}"], cwd=clone,
                          capture_output=True, text=True, timeout=120 * program.PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in pathlib.Path(clone, f"runs/{name}-{count}/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2, 3]
    assert lines[0]["run"]["mesh"]["world"] == count
    assert "hellaswag_acc_norm" in lines[3] and "val_loss" in lines[3]
    kept = lines[0]["run"]["configuration"]
    assert {key: kept[key] for key in OPTIMIZER} == OPTIMIZER
    recipe = tomllib.loads((ROOT / f"scripts/recipes/{name}.toml").read_text())
    changed = {*TINY, *(option[2:].split("=")[0] for option in options), "out-dir"}
    assert {key: kept[key] for key in recipe if key in kept and key not in changed} == \
        {key: value for key, value in recipe.items() if key in kept and key not in changed}


@pytest.mark.parametrize("name", RECIPES)
def test_paths_of_a_recipe_are_the_repositorys(tmp_path, name):
    """The recipe can be started in any folder, and says so."""
    (tmp_path / "mpirun.openmpi").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "mpirun.openmpi").chmod(0o755)
    (tmp_path / "hosts").write_text("localhost slots=64\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("MPI", "HOSTFILE")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTFILE": f"{tmp_path}/hosts"}
    done = subprocess.run([ROOT / "scripts/recipe.sh", name, *DATA], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{ROOT}\n", "")
    words = " ".join((ROOT / "scripts/recipe.sh").read_text().replace("\n# ", " ").split())
    assert "Relative paths in options and HOSTFILE are relative to the repository's folder, wherever this is started." in words


@pytest.mark.parametrize("name", ["gpt2_124M", "gpt2_350M", "gpt2_774M", "gpt2_1558M", "gpt3_6700M_3d"])
def test_an_old_command_of_a_recipe_names_the_new_one(tmp_path, name):
    for words, shown in (([], ""), (["8", "--steps", "3"], " 8 --steps 3"), (["--prompt", "a b"], r" --prompt a\ b")):
        done = subprocess.run([ROOT / f"scripts/{name}.sh", *words], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: scripts/{name}.sh was removed in 0.2: use scripts/recipe.sh {name}{shown}\n"
        assert name in RECIPES


@pytest.mark.parametrize("words, problem", [([], "no recipe is given"), (["gpt5"], "unknown recipe 'gpt5'"),
                                            (["../recipes/gpt2_124M"], "unknown recipe '../recipes/gpt2_124M'")])
def test_an_unknown_recipe_is_refused(words, problem):
    done = subprocess.run([ROOT / "scripts/recipe.sh", *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {problem}; use scripts/recipe.sh NAME [PROCESSES] [OPTION...], where NAME is one of: " \
        f"{' '.join(RECIPES)}\n"


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_comment_at_the_top(word, tmp_path):
    done = subprocess.run([ROOT / "scripts/recipe.sh", word], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Trains a recipe: ") and "\n  scripts/recipe.sh NAME [PROCESSES] [OPTION...]\n" in done.stdout
    assert done.stdout.endswith("\n") and "set -euo" not in done.stdout
    text = (ROOT / "scripts/recipe.sh").read_text()
    assert all(f"\n# {line}".rstrip() + "\n" in text for line in done.stdout.splitlines())


@pytest.mark.parametrize("count", ["0", "01", "00"])
def test_a_wrong_number_of_processes_is_refused(count):
    done = subprocess.run([ROOT / "scripts/recipe.sh", "gpt2_124M", count, "--steps=1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: '{count}' is not a number of processes; give 1 or more, without zeros before it\n"


def test_a_hostfile_that_cannot_be_read_is_refused(tmp_path):
    for name in (tmp_path / "no such file", tmp_path):
        done = subprocess.run([ROOT / "scripts/recipe.sh", "gpt3_6700M_3d"], env={**os.environ, "HOSTFILE": str(name)}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: HOSTFILE '{name}' cannot be read; give a file with a line \"NAME slots=8\" for each machine\n"


def test_a_recipe_of_several_machines_passes_its_hostfile_on(tmp_path):
    (tmp_path / "mpirun.openmpi").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (tmp_path / "mpirun.openmpi").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in ("MPI", "HOSTFILE")}
    hosts = tmp_path / "my hosts"
    hosts.write_text("localhost slots=64\n")
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOSTFILE": str(hosts)}
    rest = f"--hostfile|{hosts}|./train_gpt|--config|scripts/recipes/gpt3_6700M_3d.toml|"
    given = "".join(f"{word}|" for word in DATA)
    # A recipe that is started again goes on, unless the options say otherwise.
    for words, said in (([], f"64|{rest}--resume-if-any|{given}"), (["16", "--steps=1"], f"16|{rest}--resume-if-any|--steps=1|{given}"),
                        (["16", "--overwrite"], f"16|{rest}--overwrite|{given}")):
        done = subprocess.run([ROOT / "scripts/recipe.sh", "gpt3_6700M_3d", *words, *DATA], env=environment, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"--bind-to|none|-np|{said}", "")


def test_a_recipe_without_its_data_names_the_command_that_gets_them(tmp_path):
    """In a folder with the scripts and nothing else."""
    (tmp_path / "scripts/recipes").mkdir(parents=True)
    for path in [*(ROOT / "scripts/recipes").glob("*"), ROOT / "scripts/recipe.sh"]:
        target = tmp_path / path.relative_to(ROOT)
        target.write_bytes(path.read_bytes())
        target.chmod(0o755)
    for name, size in (("gpt2_124M", "10B"), ("gpt2_774M", "100B")):
        for words, missing in (([], f"fineweb.py --name edu --size {size}"), (["2", "--train-data", "t"], "hellaswag.py")):
            done = subprocess.run([tmp_path / "scripts/recipe.sh", name, *words], capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (2, "") and done.stderr.endswith(f"; get the recipe's data with: python data/{missing}\n")
    for words in (["--print-step"], ["--steps", "0"]):  # plans need no data
        done = subprocess.run([tmp_path / "scripts/recipe.sh", "gpt2_124M", *words], capture_output=True, text=True)
        assert "launch.sh: No such file" in done.stderr  # it went on


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_its_own_sizes_has_a_plan(name):
    done = program.run("--config", ROOT / f"scripts/recipes/{name}.toml", "--device=cpu", "--print-step")
    assert done.stdout.count("update") >= 1


def test_a_recipe_is_planned_without_its_data(tmp_path):
    """The plan takes no memory and writes nothing. An option that is typed must name data that are there."""
    plan = ["--config", ROOT / "scripts/recipes/gpt2_124M.toml", "--device=cpu", "--steps=0", f"--out-dir={tmp_path}/run"]
    done = program.run(*plan)
    assert "note: this is only a plan: --train-data: no file matches 'data/fineweb_edu_10B/train_*.bin'" in done.stdout and "memory " in done.stdout
    assert not (tmp_path / "run").exists()
    done = program.run(*plan, f"--train-data={tmp_path}/x", check=False)
    assert done.returncode == 1 and f"'{tmp_path}/x'" in done.stderr


# Replaces Slurm's programs: one process, which gets SIGUSR1 after a step the first time, as --signal requests.
SRUN = """#!/usr/bin/env bash
shift 2
export SLURM_NTASKS=1 SLURM_NTASKS_PER_NODE=1 SLURM_PROCID=0 SLURM_LOCALID=0
[[ -e stopped ]] && exec "$@"
"$@" &
job=$!
until grep -qs '"step"' {results}/metrics.jsonl; do sleep 0.05; done
touch stopped
kill -USR1 $job
wait $job
"""
SCONTROL = """#!/usr/bin/env bash
[[ $1 != show ]] || exec echo localhost
echo "$@" >>requeued
"""


def test_a_job_of_slurm_that_is_submitted_elsewhere_is_refused(tmp_path):
    done = subprocess.run([program.ROOT / "scripts/slurm.sbatch", "scripts/recipes/gpt2_124M.toml"], cwd=tmp_path, check=False, capture_output=True, text=True,
                          env={**os.environ, "SLURM_JOB_ID": "8", "SLURM_SUBMIT_DIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, f"error: no train_gpt in {tmp_path}; run `make train_gpt` there, then submit again\n")


def test_a_job_of_slurm_asks_for_time_to_save():
    text = (ROOT / "scripts/slurm.sbatch").read_text()
    directives = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert {"--signal=USR1@180", "--requeue", "--open-mode=append"} <= set(directives)
    assert "\n# Three minutes before the time is over (--signal) " in text


# Two machines with two processes each. Host names come one by one. A program that takes only the first name must still read the
# others.
SRUN_OF_TWO_MACHINES = """#!/usr/bin/env bash
shift 2
export SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2
for process in 0 1 2 3; do SLURM_PROCID=$process SLURM_LOCALID=$((process % 2)) "$@"; done
"""
SCONTROL_OF_TWO_MACHINES = """#!/usr/bin/env bash
[[ "$*" == "show hostnames gpu[07,12]" ]] || exit 1
for host in gpu07 gpu12; do echo $host; sleep 0.1; done
"""
TOLD = ["MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"]


def stand_ins(folder, **programs):
    """A folder of programs that replace others."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_processes_of_slurm_find_each_other(tmp_path):
    stand_ins(tmp_path, train_gpt="#!/usr/bin/env bash\necho " + " ".join(f"${name}" for name in TOLD) + "\n")
    programs = stand_ins(tmp_path / "bin", srun=SRUN_OF_TWO_MACHINES, scontrol=SCONTROL_OF_TWO_MACHINES)
    ports = set()
    for job in (8, 9, 123_456):
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": str(job), "SLURM_SUBMIT_DIR": str(tmp_path),
                       "SLURM_JOB_NODELIST": "gpu[07,12]"}
        # As in a job that was submitted from another job, whose variables are still set.
        environment |= dict.fromkeys(TOLD, "stale")
        done = subprocess.run([ROOT / "scripts/slurm.sbatch", "c.toml"], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        told = [dict(zip(TOLD, line.split())) for line in done.stdout.splitlines()]
        [port] = {process.pop("MASTER_PORT") for process in told}
        assert told == [{"MASTER_ADDR": "gpu07", "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
                        for rank in range(4)]
        assert 1024 <= int(port) < 32768  # below those that Linux assigns
        ports.add(port)
    assert len(ports) == 3


@pytest.mark.parametrize("words, results", [((), "runs/slurm-8"), (("--out-dir", "runs/mine"), "runs/mine"), (("--out-dir=runs/mine",), "runs/mine")])
def test_a_job_of_slurm_goes_on_where_its_results_are(tmp_path, words, results):
    recipe_clone.make(tmp_path)
    programs = stand_ins(tmp_path / "bin", srun=SRUN.format(results=results), scontrol=SCONTROL)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "8", "SLURM_SUBMIT_DIR": str(tmp_path),
                   "SLURM_JOB_NODELIST": "x"}

    def submitted(steps):
        done = subprocess.run(["scripts/slurm.sbatch", "scripts/recipes/gpt2_124M.toml", *recipe_clone.options(), f"--steps={steps}", *words],
                              cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60 * program.PATIENCE)
        assert done.returncode == 0, done.stderr

    def lines():
        return [line for line in map(json.loads, (tmp_path / results / "metrics.jsonl").read_text().splitlines()) if "step" in line]

    submitted(100_000)
    assert (tmp_path / "requeued").read_text() == "requeue 8\n"
    before = lines()
    submitted(len(before) + 3)
    after = lines()
    assert [line["step"] for line in after] == list(range(1, len(before) + 4))
    assert [line["time"] for line in after[:len(before)]] == [line["time"] for line in before]  # not trained again
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [pathlib.Path(results).name]
