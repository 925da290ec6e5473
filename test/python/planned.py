"""Random configurations, and the plans of them beside the runs themselves: every arena and every byte that is sent."""

import functools
import json
import operator
import os
import random
import re

import program

FAMILIES = {
    "tiny": ["--layers={layers}", "--heads=4", "--channels=32", "--seq-len=16"],
    "llama-tiny": ["--layers={layers}", "--heads=4", "--kv-heads=2", "--channels=32", "--mlp-size=64", "--seq-len=16"],
    "qwen3-tiny": ["--layers={layers}", "--heads=4", "--channels=32", "--mlp-size=64", "--seq-len=16"],
    "nanochat-tiny": ["--layers={layers}", "--heads=4", "--channels=64", "--seq-len=16"],
}


def random_options(draw, most_ranks, tiers=(), folder=None):
    """The options of a run, which may offload to these tiers, and its number of processes."""
    model = draw.choice(list(FAMILIES))
    pipeline, tensor, data = draw.choice([mesh for mesh in [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2),
                                                            (2, 2, 1), (3, 1, 1), (4, 1, 1), (1, 4, 1)]
                                          if mesh[0] * mesh[1] * mesh[2] <= most_ranks])
    schedule = draw.choice(["naive", "gpipe", "1f1b", "interleaved", "zb-h1"]) if pipeline > 1 else None
    chunks = draw.choice([2, 3]) if schedule == "interleaved" else 1
    layers = draw.randint(pipeline * chunks, pipeline * chunks + 4)
    options = [f"--model={model}", *(option.format(layers=layers) for option in FAMILIES[model])]
    micro_batch = draw.choice([1, 2])
    micro_batches = pipeline * draw.randint(1, 4) if chunks > 1 else draw.choice([1, 2, 3, 5, 11, 17])
    options += [f"--micro-batch-size={micro_batch}", f"--global-batch-tokens={16 * data * micro_batch * micro_batches}"]
    if pipeline > 1:
        options += [f"--pipeline-parallel={pipeline}", f"--pipeline-schedule={schedule}"]
        options += [f"--virtual-stages={chunks}"] if chunks > 1 else []
    if tensor > 1:
        options += [f"--tensor-parallel={tensor}", *draw.choice([[], ["--sequence-parallel"]])]
    stage = draw.randint(0, 3)
    options.append(f"--zero-stage={stage}")
    if stage > 0 and data == 4:
        options += draw.choice([[], ["--zero-shard-size=2"]])
    if stage == 3:
        options += draw.choice([[], ["--prefetch-units=2"], ["--reshard-after-forward=false"]])
    options += draw.choice([[], ["--reduce-every=step"], ["--reduce-every=micro-batch"]])
    options += draw.choice([["--dtype=fp32"], ["--dtype=fp16"], ["--dtype=bf16"], ["--dtype=bf16", "--gradient-dtype=bf16"],
                            ["--dtype=bf16", "--master-dtype=none"]])
    options.append(f"--optimizer={draw.choice(['adamw', 'lion', 'sgd'])}")
    moments = draw.choice(["fp32", "bf16", "8bit"])
    options.append(f"--moments-dtype={moments}")
    for what in ("optimizer", "parameters"):
        tier = draw.choice(["none", *tiers])
        if tier != "none" and (what, moments) != ("optimizer", "8bit") and "--reshard-after-forward=false" not in options:
            options += [f"--offload-{what}={tier}", *([f"--nvme-dir={folder}"] if tier == "nvme" else [])]
    options += draw.choice([[], ["--checkpoint-every=1"]])
    kind = draw.choice(["none", "selective", "block"])
    options += [f"--recompute={kind}", *(draw.choice([[], ["--recompute-every=2"]]) if kind != "none" and layers > 1 else [])]
    return options, pipeline * tensor * data


def seeded():
    """A generator of random configurations, fresh ones each time; its seed is printed, and PLAN_SEED repeats it."""
    seed = os.environ.get("PLAN_SEED") or str(random.randrange(10**9))
    print(f"PLAN_SEED={seed}")
    return random.Random(seed)


def plan(*options, status=(0, 2, 3)):
    """The plan as an object, and its exit status."""
    result = program.run("plan", *options, "--json", check=False)
    assert result.returncode in status, f"{options}: {result.returncode}\n{result.stderr}"
    return json.loads(result.stdout), result.returncode


def assert_equals_run(planned, run):
    """Every arena, and what a step sends, of the fullest stage and of the one that sends most."""
    record = run.record
    stages = record.get("pipeline", {key: [record[key]] for key in ("memory", "bytes_sent", "offload")})
    fullest = max(stages["memory"], key=lambda arenas: sum(arenas.values()))
    assert planned["memory"]["arenas"] == fullest and planned["memory"]["bytes"] == sum(fullest.values())
    offload = stages["offload"]
    for tier in ("host", "disk"):
        assert planned[tier]["bytes"] == max(stage[tier] for stage in offload)
    assert planned["moved"].items() <= offload[planned["memory"]["stage"]].items()
    sends = max(stages["bytes_sent"], key=lambda sent: sum(sent.values()))
    assert {name: planned["sends"][name] for name in sends} == sends and planned["sends"]["bytes"] == sum(sends.values())
    assert planned["model"]["parameters"] == record["parameters"]
    assert {name: planned["mesh"][name] for name in record["mesh"]} == record["mesh"]


def rows_of_pages():
    """The rows of the pages with options of the planner: (options, key, figure). A table's head may have options of all its rows."""
    rows = []
    for page in ("planner", "offload"):
        of_all = ""
        for line in (program.ROOT / f"docs/{page}.md").read_text().splitlines():
            if found := re.match(r"\| [^|]+ \| `plan ([^`]+)` and \| key \|", line):
                of_all = found[1] + " "
            if found := re.match(r"\| [^|]+ \| `([^`]+)` \| `([^`]+)` \| ([^|]+) \|$", line):
                rows.append((of_all + found[1], found[2], found[3]))
    return rows


@functools.lru_cache
def plan_of_row(options):
    return plan(*options.split())[0]


def check_row(options, key, figure):
    """The key's value, rounded to as many digits as the figure has."""
    name, _, divisor = key.partition(" / ")
    value = functools.reduce(operator.getitem, name.split("."), plan_of_row(options))
    if isinstance(value, bool):
        assert figure == str(value).lower()
        return
    digits = len(figure.partition(".")[2])
    assert f"{value / float(divisor or 1):.{digits}f}" == figure
