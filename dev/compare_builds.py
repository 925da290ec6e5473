#!/usr/bin/env python3
"""Compares two builds of the trainer, bit by bit: for changes that must not change any result.

    dev/compare_builds.py BEFORE AFTER                     every configuration; six minutes or more on two cores
    dev/compare_builds.py BEFORE AFTER --only 'zb-h1*'     those whose name, or a word of it, matches
    dev/compare_builds.py BEFORE AFTER --list              only prints their commands
    dev/compare_builds.py BEFORE AFTER --time              whether AFTER takes more time on the CPU; six minutes

BEFORE and AFTER are checkouts in which `make train_gpt` was run, and `make build/test/train_gpt-plain` for the
configurations with simulated GPUs. If a checkout lacks that second program, these configurations are skipped. Both run the same command, one after
the other. The following must be equal:

- in metrics.jsonl, as printed: loss, gradient norm, learning rate, validation loss and HellaSwag scores of every step, and
  the bytes that a step sends, of each kind and stage;
- in each checkpoint the weights and AdamW's moments, tensor by tensor; in an exported file all bytes;
- samples and generated texts.

No memory arena of a stage may be larger. Some configurations have a second run (`then` in build_configurations.py). Each
build does it from the output of each build: AFTER continues from BEFORE's checkpoint as BEFORE does, and the other way round.

Prints a line for each configuration: `same`, or the first difference. The exit status is 1 if any differs.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

import build_times
from build_configurations import SIMULATED, configurations, write_files

# a module of the tests; build_configurations lets Python look in their folder
import safetensors_file

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "scripts/launch.sh"
# A run takes a second or two; one that takes this long hangs.
SECONDS = 120
# The fields of a step that are not times.
FIELDS = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss", "hellaswag_acc", "hellaswag_acc_norm")
SAMPLE = re.compile(rb"^-- sample after .*?^-{60,}$", re.MULTILINE | re.DOTALL)
NAMES = ("BEFORE", "AFTER")
# The most differences printed of a configuration.
SHOWN = 5


class Failed(Exception):
    """A run that ended with an error."""


def start_of(run, launch, program):
    """The beginning of a Run's command. With MPI=0, the processes run without mpirun."""
    if run.environment.get("MPI") == "0":
        return [str(program), "--processes", str(run.ranks)]
    return [str(launch), "-np", str(run.ranks), "--bind-to", "none", str(program)]


def command_of(run, build, replaced):
    """The command of a Run; `replaced` are the folders in its options."""
    return [*start_of(run, LAUNCH, build / run.program), *(option.format(**replaced) for option in run.options)]


def execute(run, build, folder, replaced, cache):
    """Runs it in a new folder; returns what it printed."""
    folder.mkdir(parents=True)
    # mpiruns with a common folder may remove it while another uses it.
    places = {"OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=folder), "XDG_CACHE_HOME": str(cache)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "SIMT_GPUS": str(run.ranks), **places, **run.environment}
    try:
        result = subprocess.run(command_of(run, build, replaced), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"does not end in {SECONDS} seconds") from None
    if result.returncode != 0:
        said = result.stderr.decode(errors="replace").strip().splitlines() or [""]
        # mpirun prints its own messages after the program's.
        why = next((line for line in said if line.startswith("error:")), said[-1])
        raise Failed(f"fails with status {result.returncode}: {why}")
    return result.stdout


class Results:
    """The compared results of a run: {kind: {name: value}}, and the bytes of each arena."""

    def __init__(self, folder, printed, options):
        self.kinds = {"bytes sent": {}, "steps": {}, "tensors": {}, "texts": {}}
        self.memory = {}
        if "--generate" in options:
            self.kinds["texts"]["the text"] = printed
            return
        self.read_metrics(folder / "run/metrics.jsonl")
        for path in sorted(folder.rglob("*.safetensors")):
            self.read_tensors(path, path.relative_to(folder))
        self.kinds["texts"] = {f"sample {number}": text for number, text in enumerate(SAMPLE.findall(printed), 1)}
        # Two runs without output would be equal, but prove nothing. (The program uses an option's last
        # value.)
        value_of = dict(zip(options, options[1:]))
        due = {"bytes sent": True, "steps": True, "tensors": value_of["--steps"] != "0", "texts": value_of["--sample-tokens"] != "0"}
        missing = [kind for kind, is_due in due.items() if is_due and not self.kinds[kind]]
        if missing or not self.memory:
            raise Failed(f"leaves no {' and no '.join(missing or ['memory'])} to compare")

    def read_metrics(self, path):
        # Numbers stay as they are printed.
        lines = [json.loads(line, parse_float=str, parse_constant=str) for line in path.read_text().splitlines()]
        record = [line["run"] for line in lines if "run" in line][-1]
        stages = record.get("pipeline", {})
        for name, whole, of_stages in (("bytes_sent", record["bytes_sent"], stages.get("bytes_sent", [])),
                                       ("memory", record["memory"], stages.get("memory", []))):
            found = {f"{name} {kind}": count for kind, count in whole.items()}
            found |= {f"{name} {kind} of stage {stage}": count for stage, counts in enumerate(of_stages) for kind, count in counts.items()}
            if name == "memory":
                self.memory = found
            else:
                self.kinds["bytes sent"] = found
        self.kinds["steps"] = {f"step {line['step']} {field}": line[field] for line in lines if "run" not in line
                               for field in FIELDS if field in line}

    def read_tensors(self, path, name):
        tensors = safetensors_file.load(path)
        self.kinds["tensors"] |= {f"{tensor} in {name}": value for tensor, value in tensors.items()}
        if not path.parent.name.startswith("checkpoint-"):
            self.kinds["tensors"][f"the file {name}"] = path.read_bytes()


def in_words(before, after):
    """How two values differ."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        if before[:2] != after[:2]:
            return f"is {after[0]} {after[1]}, not {before[0]} {before[1]}"
        count = sum(a != b for a, b in zip(before[2], after[2]))
        return f"differs in {count} of {len(before[2])} bytes"
    if before is None or after is None:
        return f"is only in {'AFTER' if before is None else 'BEFORE'}"
    if isinstance(before, bytes):
        return f"differs from byte {next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))} on"
    return f"is {after}, not {before}"


def and_more(names):
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def differences(before, after):
    """The first difference of each kind between two Results, in words."""
    found = []
    for kind, values in before.kinds.items():
        others = after.kinds[kind]
        differing = [name for name in {**values, **others} if values.get(name) != others.get(name)]
        if differing:
            name = differing[0]
            found.append(f"{name} {in_words(values.get(name), others.get(name))}{and_more(differing)}")
    larger = [name for name, size in after.memory.items() if size > before.memory.get(name, 0)]
    if larger:
        name = larger[0]
        found.append(f"{name} is larger: {after.memory[name]:,} bytes, not {before.memory.get(name, 0):,}{and_more(larger)}")
    return found


def smaller_arenas(before, after):
    smaller = [f"{name} is {size - after.memory.get(name, 0):,} bytes smaller" for name, size in before.memory.items()
               if after.memory.get(name, 0) < size]
    return [f"{smaller[0]}{and_more(smaller)}"] if smaller else []


def compare(configuration, builds, files, folder):
    """(differences, improvements) of a configuration, in words."""
    def results(run, build, place, first=None):
        printed = execute(run, builds[build], folder / place, {"files": files, "first": first}, folder / "cache")
        try:
            return Results(folder / place, printed, run.options)
        except (OSError, ValueError, LookupError) as error:
            raise Failed(f"leaves what cannot be read: {type(error).__name__}, {error}") from None

    def all_results(runs):
        """{key: Results} from {key: arguments of `results`}, and the failures."""
        found, failed = {}, []
        for key, arguments in runs.items():
            try:
                found[key] = results(*arguments)
            except Failed as failure:
                failed.append(f"{key} {failure}")
        return found, failed

    # GPUs take the algorithms of their products from the cache, so that AFTER uses those that BEFORE chose.
    first, found = all_results({name: (configuration.first, name, name) for name in NAMES})
    if found:
        return found, []
    found = differences(first["BEFORE"], first["AFTER"])
    better = smaller_arenas(first["BEFORE"], first["AFTER"])
    for number, run in enumerate(configuration.then, 2):
        second, failed = all_results({f"run {number}, {name} from {origin}'s": (run, name, f"{number}-{name}-{origin}", folder / origin)
                                      for origin in NAMES for name in NAMES})
        found += failed
        if (whole := second.pop(f"run {number}, BEFORE from BEFORE's", None)):
            found += [f"{key}: {text}" for key, own in second.items() for text in differences(whole, own)]
    return found, better


def shortened(texts):
    """The first few texts, and the number of the others."""
    return texts if len(texts) <= SHOWN else [*texts[:SHOWN - 1], f"{len(texts) - SHOWN + 1} more differences"]


def compare_all(chosen, builds, jobs):
    """Prints a line for each configuration; returns whether all are equal."""
    lacking = [name for name, build in builds.items() if not (build / SIMULATED).exists()]
    width = max(len(configuration.name) for configuration in chosen)
    counts = {"same": 0, "differ": 0, "skipped": 0}
    begin = time.monotonic()

    with tempfile.TemporaryDirectory(prefix="builds-") as name:
        files = pathlib.Path(name, "files")
        files.mkdir()
        write_files(files)

        def line_of(configuration):
            """(its key in counts, its line)"""
            if configuration.first.program == SIMULATED and lacking:
                return "skipped", f"skipped: {' and '.join(lacking)} without {SIMULATED}"
            start = time.monotonic()
            with tempfile.TemporaryDirectory(dir=name) as folder:
                found, better = compare(configuration, builds, files, pathlib.Path(folder))
            took = f"{time.monotonic() - start:.1f} s"
            return ("differ" if found else "same"), "; ".join([*shortened(found or ["same"]), *better, took])

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            for configuration, (key, line) in zip(chosen, pool.map(line_of, chosen)):
                counts[key] += 1
                print(f"{configuration.name:<{width}}  {line}", flush=True)

    skipped = f", {counts['skipped']} were skipped" if counts["skipped"] else ""
    print(f"{time.monotonic() - begin:.0f} seconds")
    print(f"{counts['same'] + counts['differ']} configurations, {counts['differ']} differ{skipped}")
    return counts["differ"] == 0


def version_of(build):
    program = build / "train_gpt"
    if not os.access(program, os.X_OK):
        sys.exit(f"error: {program} is not there; `make train_gpt` in that checkout builds it")
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def main():
    parser = argparse.ArgumentParser(description="Compares two builds of the trainer, to the bit.")
    parser.add_argument("before", metavar="BEFORE", type=pathlib.Path, help="a checkout with train_gpt built")
    parser.add_argument("after", metavar="AFTER", type=pathlib.Path, help="another one")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only configurations whose name, or a word of it, matches")
    parser.add_argument("--list", action="store_true", help="print the names and commands, and run nothing")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="configurations at a time")
    parser.add_argument("--time", action="store_true", help="compare times of steps, not results")
    parser.add_argument("--pairs", metavar="N", type=int, default=build_times.PAIRS, help="of runs, with --time")
    arguments = parser.parse_args()

    builds = {name: folder.resolve() for name, folder in zip(NAMES, (arguments.before, arguments.after))}
    chosen = [configuration for configuration in configurations() if configuration.matches(arguments.only)]
    if not chosen:
        sys.exit(f"error: no configuration matches {arguments.only}; --list prints them all")
    if arguments.list:
        for configuration in chosen:
            print(configuration.name)
            for run in (configuration.first, *configuration.then):
                variables = [f"{name}={value}" for name, value in run.environment.items()]
                print("    " + shlex.join([*variables, *start_of(run, "scripts/launch.sh", run.program), *run.options]))
        return 0
    for name, build in builds.items():
        print(f"{name:<6}  {version_of(build)}")
    if arguments.time:
        return 0 if build_times.compare(*(build / "train_gpt" for build in builds.values()), arguments.pairs) else 1
    return 0 if compare_all(chosen, builds, arguments.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
