"""docs/interface.md names the public interface: its tables are compared with what a run writes, and its version with other
files that have one."""

import json
import re
import subprocess

import pytest

import boxes
import program

ROOT = program.ROOT
PAGE = (ROOT / "docs/interface.md").read_text()


def rows(title):
    """The first column of the table whose head begins with this title, and the words after it."""
    table = PAGE.split(f"\n| {title} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return {match.group(1): match.group(2) for match in (re.match(r"\| `([^`]+)` \|(.*)\|$", line) for line in table)}


def keys_in(text):
    """The names between backticks."""
    return re.findall(r"`(\w+)`", text)


def flat(fields):
    """Every key. If its value is an object, also the keys inside, as KEY/INNER_KEY."""
    for name, value in fields.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}/{inner}" for inner in value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The results of a run that writes all that a run on the CPU may write."""
    out = tmp_path_factory.mktemp("runs") / "run"
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    questions = out.parent / "questions.jsonl"
    questions.write_text(json.dumps(example) + "\n")
    program.run(f"--out-dir={out}", "--sample-tokens=0", *program.SMALL, "--steps=2", "--val-every=1", "--checkpoint-every=1", "--device=cpu",
                f"--eval-hellaswag={questions}", "--eval-every=1", "--keep-best", "--pipeline-parallel=2", ranks=2)
    return out


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_files_of_a_run(folder):
    paths = [path for path in folder.iterdir() if path.name != "best"] + list((folder / "best").iterdir())
    found = {re.sub(r"\d{8}$", "<step>", str(path.relative_to(folder))) for path in paths}
    assert found == set(rows("name"))


def test_keys_of_metrics(folder):
    head, *steps = lines_of(folder)
    assert set(head) == {"run"}
    for line in steps:
        # The peak of a CPU is not known, and all targets count.
        others = {"mfu", "loss_scale", "skipped_steps", "targets", "phase_ms/disk", "disk/read_bytes", "disk/written_bytes", "disk/ms"}
        assert set(flat(line)) == set(rows("key of a step")) - others
    assert set(head["run"]) == set(rows("key of `run`"))
    named = rows("key of `run`")
    for key in ("mesh", "bytes_sent", "memory", "offload", "pipeline"):
        assert list(head["run"][key]) == keys_in(named[key])
    for key in ("memory", "bytes_sent", "offload"):
        assert [list(stage) for stage in head["run"]["pipeline"][key]] == 2 * [list(head["run"][key])]


def test_keys_of_a_plan():
    """A run that fits, one that does not, and one that no run can have."""
    options = ["plan", *program.SMALL, "--tokens=1B", "--speed=1000", "--json"]
    plans = [json.loads(program.run(*options, *more, check=False).stdout) for more in ([], ["--gpus=8"], ["--gpu=H100", "--gpu-memory=1.01"], ["--gpus=3", "--tensor-parallel=3"])]
    named = rows("key of a plan")
    for plan in plans:
        assert set(plan) == {key for key in named if "." not in key}
    made = plans[1]
    for key, keys in [("model", made["model"]), ("memory", made["memory"]), ("time", made["time"]), ("cost", made["cost"])]:
        assert list(keys) == [name for name in keys_in(named[key]) if name not in ("run", "null")][:len(keys)], key
    assert [list(made[key]) for key in ("host", "disk", "moved")] == [["bytes", "usable"], ["bytes", "usable"], keys_in(named["moved"])]
    assert list(made["memory"]["beside"]) == keys_in(named["memory.beside"])[:-1]
    assert list(made["memory"]["peak"]) == keys_in(named["memory.peak"])
    assert set(keys_in(named["convention"])) - {"accelerate", "null"} == set(made["convention"])
    assert [list(made["convention"][key]) for key in ("host", "disk")] == 2 * [keys_in(named["convention.host"])[:2]]
    assert set(made["convention"]["per_gpu"]) == {key for key in made["convention"] if key.endswith("_gb")} - {"left_gb"} | {"parameters", "divided_gb"}
    assert plans[3]["memory"] is None and list(plans[3]["why_not"][0]) == [name for name in keys_in(named["why_not"])]
    assert plans[2]["memory"]["verdict"] == "does not fit" and plans[0]["memory"]["beside"] is None


def test_the_line_of_an_evaluation(folder, tmp_path):
    """A checkpoint is evaluated, and then the weights of --init, which are at step 0."""
    sentence = " ".join(PAGE.split()).split("Its evaluation is a line with only")[1].split(";")[0]
    checkpoint = folder / "checkpoint-00000002"
    options = ["--sample-tokens=0", *program.SMALL, "--steps=0", "--val-batches=1", "--device=cpu"]
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(example) + "\n")
    program.run(*options, f"--resume={checkpoint}", f"--metrics={tmp_path}/metrics.jsonl", f"--eval-hellaswag={tmp_path}/questions.jsonl")
    head, line = lines_of(tmp_path)
    assert set(head) == {"run"} and list(line) == keys_in(sentence)
    assert (line["step"], line["tokens"]) == (2, 2 * 384)
    given = [*options, f"--init={checkpoint}", f"--out-dir={tmp_path}/init"]
    program.run(*given)
    head, line = lines_of(tmp_path / "init")
    assert list(line) == [key for key in keys_in(sentence) if not key.startswith("hellaswag")]
    assert (line["step"], line["tokens"]) == (0, 0)
    # Another run with the same file keeps the metrics of the one before.
    before = (tmp_path / "init/metrics.jsonl").read_bytes()
    program.run(*given[:-1], f"--metrics={tmp_path}/init/metrics.jsonl")
    assert (tmp_path / "init/metrics.jsonl.1").read_bytes() == before and "`FILE.1`" in PAGE


def test_the_last_start_of_a_run(folder, tmp_path):
    """run.json, of a run from the beginning and of a resumed one."""
    named = list(rows("key of `run.json`"))
    first = json.loads((folder / "run.json").read_text())
    assert list(first) == named and first["began_from"] == ""
    options = ["--sample-tokens=0", *program.SMALL, "--steps=3", "--val-batches=1", "--device=cpu"]
    program.run(*options, f"--resume={folder}/checkpoint-00000002", f"--out-dir={tmp_path}/other")
    assert json.loads((tmp_path / "other/run.json").read_text())["began_from"] == f"{folder}/checkpoint-00000002"
    program.run(*options, "--resume", f"--out-dir={tmp_path}/other", "--steps=4")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    program.run(*options, f"--resume={tmp_path}/other", f"--out-dir={tmp_path}/link", "--steps=5")
    went_on = json.loads((tmp_path / "other/run.json").read_text())
    assert went_on["began_from"] == "checkpoint-00000004" and went_on["branched_from"] == f"{folder}/checkpoint-00000002"


def test_a_run_of_one_stage_has_no_pipeline(tmp_path):
    head = lines_of(program.train(tmp_path / "run", *program.SMALL, "--steps=1").out_dir)[0]
    assert set(head["run"]) == set(rows("key of `run`")) - {"pipeline"}


def test_keys_of_a_configuration(folder):
    """Every option but those that the page names is a key, by the same name."""
    options = set(re.findall(r"^ +(?:-\w,)?--([a-z0-9-]+)", program.run("--help").stdout, re.MULTILINE))
    no_keys = set(re.findall(r"`--([a-z-]+)`", PAGE.split("These options are not keys")[1].split("\n\n")[0]))
    assert options - no_keys == set(lines_of(folder)[0]["run"]["configuration"])
    assert no_keys < options


def test_files_of_a_checkpoint(folder):
    checkpoint = folder / "checkpoint-00000002"
    named = PAGE.split("## Checkpoints")[1].split("\n## ")[0]
    table = re.findall(r"^\| `([\w.-]+)` \|", named.split("\n\n| key of")[0], re.MULTILINE)
    # Of a model that has no tokenizer.
    assert {re.sub(r"-\d\.", "-N.", re.sub(r"\d{5}", "RRRRR", path.name)) for path in checkpoint.iterdir()} == set(table) - {"tokenizer"}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    keys = re.findall(r"^\| `(\w+)` \|", named.split("| key of `manifest.json` |")[1].split("\n\n")[0], re.MULTILINE)
    [best] = (folder / "best").iterdir()
    keys.remove("base")  # only of a model with adapters (test_adapters.py)
    assert list(json.loads((best / "manifest.json").read_text())) == keys
    assert list(manifest) == [key for key in keys if key != "validation"]
    assert f"| `version` | version of this layout: {manifest['version']} |" in named
    assert f"| `format` | `{manifest['format']}` |" in named
    assert manifest["configuration"] == lines_of(folder)[0]["run"]["configuration"]
    for file in manifest["files"].values():
        assert set(file) == {"bytes", "xxh3_128"}
    assert {name.rpartition(".")[2] for name in boxes.state(checkpoint)} == {"exp_avg", "exp_avg_sq"}
    assert all(name.startswith("optim.state.") for name in boxes.state(checkpoint))
    assert "`optim.state.<tensor>.exp_avg` and `optim.state.<tensor>.exp_avg_sq`" in named
    each = [json.loads(path.read_text()) for path in checkpoint.glob("checksums-*.json")]
    checksums = each[0] | {"files": {name: file for of in each for name, file in of["files"].items()}}
    keys = re.findall(r"^\| `([\w.]+)` \|", named.split("| key of `checksums-RRRRR.json` |")[1], re.MULTILINE)
    assert list(checksums) == keys
    assert checksums["block_bytes"] == 1 << 22 and "4 MiB" in named
    for file in [*boxes.weights_files(checkpoint), *boxes.state_files(checkpoint)]:
        assert checksums["files"][file.name]["bytes"] == file.stat().st_size
        metadata = boxes.metadata(file)
        assert set(metadata) == set(re.findall(r"`(format|DCP_\w+)`", named)) and metadata["DCP_VERSION"] == "1.0"


def test_the_manifest_of_data(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time. " * 200)
    subprocess.run([program.ROOT / "data/text.py", tmp_path / "text.txt", "--tokenizer=bytes", f"--out={tmp_path}/out"], check=True,
                           capture_output=True, cwd=tmp_path)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    named = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Data")[1].split("\n## ")[0], re.MULTILINE)
    assert set(manifest) == {name for name, _ in named} - {"conversations"}  # of data/chat.py
    assert set(manifest["shards"][0]) == set(re.findall(r"`(\w+)`", dict(named)["shards"]))
    assert set(manifest["tokens"]) == set(re.findall(r"`(\w+)`", dict(named)["tokens"]))


def test_one_version():
    """That of the Makefile, which the program prints."""
    version = re.search(r"^VERSION := (\d+\.\d+\.\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1)
    assert program.run("--version").stdout.startswith(f"train_gpt {version} ")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_container_gets_all_sources():
    """.containerignore leaves out no file that git tracks, and not the commit."""
    def is_left_out(path):
        left_out = False
        for line in (ROOT / ".containerignore").read_text().splitlines():
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if not line.startswith("#") and re.match(rf"{pattern}(/|$)", path):
                left_out = not line.startswith("!")
        return left_out

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert len(tracked) > 100 and not [path for path in [*tracked, ".git/HEAD"] if is_left_out(path)]
    made = ["build/objects/a.o", "train_gpt", "runs/a/metrics.jsonl", "data/gpt2_bpe/vocab.bpe", "scripts/__pycache__/a.pyc"]
    assert all(is_left_out(path) for path in made)


def test_what_is_untested_says_so():
    for name in ("Containerfile", ".github/workflows/ci.yml"):
        assert (ROOT / name).read_text().startswith("# UNTESTED: ")
