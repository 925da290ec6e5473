"""The timeline of a pipeline for users: expected, without processes for it, and measured in a run. Also --verbose and the
header of such a run. test/unit/pipeline_timeline_test.cpp tests the drawing.
"""

import itertools
import json
import re
import subprocess
import xml.etree.ElementTree

import program
import pytest
from tcp_job import Job

# Four layers, and six micro-batches of four sequences on one data rank.
MODEL = ["--layers=4", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--micro-batch-size=4"]
QUIET = ["--sample-tokens=0", "--val-batches=1"]
NAMES = {"1f1b": (2, []), "gpipe": (4, ["--pipeline-schedule=gpipe"]),
         "interleaved": (2, ["--pipeline-schedule=interleaved", "--virtual-stages=2"]),
         "zb-h1": (2, ["--pipeline-schedule=zb-h1"])}


def kinds_of(name, recomputes=False):
    """The kinds of passes. If all blocks recompute, a zero-bubble schedule has nothing to do in a second part."""
    return ["forward", "backward-input", "backward-weight"] if name == "zb-h1" and not recomputes else ["forward", "backward"]


def drawn(folder, name):
    """The passes of a trace, {(kind, chunk, micro-batch): (stage, begin, end)}. The picture must have equally many."""
    trace = json.loads((folder / f"{name}.json").read_text())
    passes = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        key = event["cat"], event["args"]["chunk"], event["args"]["micro_batch"]
        assert key not in passes, "a pass twice"
        passes[key] = event["tid"] - 1, event["ts"], event["ts"] + event["dur"]
    picture = xml.etree.ElementTree.parse(folder / f"{name}.svg")
    tips = [tip.text for tip in picture.iter("{http://www.w3.org/2000/svg}title") if (tip.text or "").startswith("stage ")]
    assert len(tips) == len(passes)
    return passes, trace["otherData"]


def clock_error(title):
    """The stated error of each stage's clock in microseconds."""
    number, unit = re.search(r"clocks agree to ([\d.]+) (ns|us|ms|s)\b", title).groups()
    return float(number) * {"ns": 1e-3, "us": 1, "ms": 1e3, "s": 1e6}[unit]


def check_passes(passes, kinds, stages, chunks, micro_batches, is_measured=False, clocks=0):
    """Each pass occurs once, on its stage. Passes of a stage do not overlap. Each begins after the pass whose result it takes;
    if measured, it ends after it. `clocks` is the error of a stage's clock, so two stages may differ by twice as much."""
    assert set(passes) == set(itertools.product(kinds, range(chunks), range(micro_batches)))
    for stage in range(stages):
        own = sorted((begin, end, kind) for (kind, *_), (where, begin, end) in passes.items() if where == stage)
        assert len(own) == len(kinds) * micro_batches * chunks // stages
        assert all(begin < end for begin, end, _ in own)
        # To a nanosecond: a double holds the microseconds of the system's whole time.
        assert all(end <= begin + 1e-3 for (_, end, _), (begin, *_) in itertools.pairwise(own))
    for (kind, chunk, micro_batch), (stage, begin, end) in passes.items():
        assert stage == chunk % stages
        source = chunk - 1 if kind == "forward" else chunk + 1
        if kind != "backward-weight" and (kind, source, micro_batch) in passes:
            # A pass that waits is drawn from the time at which it would have begun if it had waited first. Its preparations
            # (loads, gradients that are cleared, recomputing) then lie before the end of the other pass.
            assert passes[kind, source, micro_batch][2] <= (end if is_measured else begin) + 1e-3 + 2 * clocks
        if kind != "forward":
            earlier = kinds[kinds.index(kind) - 1]
            assert passes[earlier, chunk, micro_batch][2] <= begin + 1e-3


def total(passes):
    return max(end for _, _, end in passes.values()) - min(begin for _, begin, _ in passes.values())


def rows_of(text):
    """The charts in a text: the title, then one row for each stage."""
    lines = text.splitlines()
    charts = []
    for number, line in enumerate(lines):
        if line.startswith("stage 0 "):
            charts.append([lines[number - 1], *itertools.takewhile(lambda row: row.startswith("stage "), lines[number:])])
    return charts


# ---- expected


@pytest.mark.parametrize("name", NAMES)
def test_is_expected_without_processes(name, tmp_path):
    stages, options = NAMES[name]
    out = program.run(*MODEL, *options, f"--pipeline-parallel={stages}", "--steps=0", "--pipeline-timeline", f"--out-dir={tmp_path}").stdout
    (title, *rows), = rows_of(out)
    assert title.startswith(f"{name}, {stages} stages") and "6 micro-batches: estimated" in title and len(rows) == stages
    passes, about = drawn(tmp_path, "pipeline-estimated")
    assert about["title"] == title
    assert about["second_is"] == "block forwards" and re.search(r"^ +0 +\S+ block forwards$", out, re.M)
    check_passes(passes, kinds_of(name), stages, stages * (2 if name == "interleaved" else 1), 6)
    # The unit is one block's forward pass.
    _, begin, end = passes["forward", 1, 0]
    assert end - begin == pytest.approx(1e6 * 4 / stages / (2 if name == "interleaved" else 1))
    assert {file.name for file in tmp_path.iterdir()} == {"pipeline-estimated.svg", "pipeline-estimated.json"}
    held = {"1f1b": "2, 1", "gpipe": "6, 6, 6, 6", "interleaved": "2.5, 1.5", "zb-h1": "2, 2"}[name]
    assert f"activations held at most, stage by stage: {held} micro-batches" in out
    assert about["peak_micro_batches_in_flight"] == [float(number) for number in held.split(", ")]
    assert f"note: the timeline is in {tmp_path}/pipeline-estimated.svg" in out


@pytest.mark.parametrize("options", [["--pipeline-layers=4,0"], ["--pipeline-layers=0,4", "--pipeline-schedule=zb-h1"],
                                     ["--pipeline-layers=4,0", "--pipeline-schedule=naive"],
                                     ["--pipeline-layers=0,2,2,0", "--pipeline-schedule=interleaved", "--virtual-stages=2"]], ids=" ".join)
def test_a_stage_without_layers_is_measured(options, tmp_path):
    """The forward pass of the head alone has nothing to do: its backward pass includes it. --verbose names what a stage has."""
    out = program.run(*MODEL, *QUIET, *options, "--pipeline-parallel=2", "--steps=2", "--pipeline-timeline", "--verbose", f"--out-dir={tmp_path}",
                      ranks=2).stdout
    for name in ("pipeline-measured", "pipeline-simulated"):
        passes, _ = drawn(tmp_path, name)
        # The embedding's backward pass has no second half.
        assert len(passes) == 6 * (5 if "zb-h1" in options[-1] else 8 if len(options) > 2 else 4)
    parts = {"4,0": ["embedding, layers 0 to 3", "head"], "0,4": ["embedding", "layers 0 to 3, head"], "0,2,2,0": ["embedding, layers 2 to 3", "layers 0 to 1, head"]}
    text = " ".join(out.split())
    for part in parts[options[0].partition("=")[2]]:
        assert f" {part}" in text, part


def test_goes_where_results_go(tmp_path):
    command = [program.ROOT / program.PROGRAM, *MODEL, "--pipeline-parallel=4", "--steps=0", "--pipeline-timeline"]
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60 * program.PATIENCE)
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        drawn(folder, "pipeline-estimated")


def test_a_plan_writes_nothing_where_a_run_is(tmp_path):
    program.run(*MODEL, "--steps=1", f"--out-dir={tmp_path}")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    out = program.run(*MODEL, "--pipeline-parallel=4", "--steps=0", "--pipeline-timeline", f"--out-dir={tmp_path}").stdout
    assert len(rows_of(out)) == 1
    assert f"note: {tmp_path} holds a run, so the timeline is not written there; for its files, choose another --out-dir" in out
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


def test_several_processes_draw_once(tmp_path):
    out = program.run(*MODEL, "--pipeline-parallel=2", "--steps=0", "--pipeline-timeline", f"--out-dir={tmp_path}", ranks=4).stdout
    (title, *_), = rows_of(out)
    assert "3 micro-batches" in title  # for each of two data ranks


def test_the_lists_of_all_stages_without_processes():
    out = program.run(*MODEL, "--pipeline-parallel=4", "--print-step", "--verbose").stdout
    assert re.findall(r"^one step of this rank: \d+ actions, stage (\d) of 4, 6 micro-batches", out, re.M) == list("0123")
    assert out.count("send_activation") == out.count("receive_activation") == 3 * 6
    tensor = program.run(*MODEL, "--pipeline-parallel=2", "--tensor-parallel=2", "--sequence-parallel", "--print-step", "--verbose").stdout
    assert re.findall(r"^one step of this rank: .*, 1 data rank, 2 tensor ranks with sequence parallelism$", tensor, re.M)
    # The same with processes.
    assert program.run(*MODEL, "--pipeline-parallel=4", "--print-step", "--verbose", ranks=4).stdout == out
    ended = Job(4).start_all(program.PROGRAM, *MODEL, "--pipeline-parallel=4", "--print-step", "--verbose").end()
    assert (ended.statuses, ended.out, ended.err) == ([0] * 4, out, "")


# ---- measured


@pytest.mark.parametrize("recompute", [[], ["--recompute=block"]], ids=["", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_is_measured_in_a_run(name, recompute, tmp_path):
    stages, options = NAMES[name]
    options = [*MODEL, *QUIET, *options, *recompute, f"--pipeline-parallel={stages}", "--steps=5"]
    out = program.run(*options, "--pipeline-timeline", f"--out-dir={tmp_path / 'a'}", ranks=stages).stdout
    expected, measured, simulated = rows_of(out)
    assert "estimated" in expected[0]
    # Stated in the header and above each chart, on the terminal and in the picture.
    note = "zb-h1 (all blocks recompute: in the order of 1f1b)"
    is_noted = name == "zb-h1" and bool(recompute)
    assert out.count(note) == (4 if is_noted else 0)
    assert ((f"  pipeline    {note}; stages of 2 and 2 layers\n") in out) == is_noted
    for file in (tmp_path / "a").glob("pipeline-*"):
        assert (note in file.read_text()) == is_noted
    assert all(len(chart) == 1 + stages for chart in (expected, measured, simulated))
    step = int(re.search(r": measured in step ([2-5]), the median of 4 steps; clocks agree to ", measured[0]).group(1))
    chunks = stages * (2 if name == "interleaved" else 1)

    passes, about = drawn(tmp_path / "a", "pipeline-measured")
    assert about["title"] == measured[0] and about["second_is"] == "second"
    kinds = kinds_of(name, bool(recompute))
    check_passes(passes, kinds, stages, chunks, 6, is_measured=True, clocks=clock_error(about["title"]))
    assert ("gradients of inputs" in out) == ("gradients of weights" in out) == ("weights'" in out) == (len(kinds) == 3)
    run = program.Run(tmp_path / "a")
    assert total(passes) < 1e3 * run.lines[step - 1]["step_ms"]

    # The files of the estimate are still there.
    estimated, about = drawn(tmp_path / "a", "pipeline-estimated")
    assert about["title"] == expected[0] and estimated.keys() == passes.keys()

    # The simulation uses this schedule with these times.
    again, about = drawn(tmp_path / "a", "pipeline-simulated")
    assert about["title"] == simulated[0] and again.keys() == passes.keys()
    medians, means, own = re.search(r"with the median times of passes: (\S+) of the measured time; (\S+) with each step's mean times; "
                                  r"(\S+) with each pass's own time$", simulated[0]).groups()
    assert 0 < float(own) <= 1 and 0 < float(means) < 1.5  # nothing takes longer than it took in reality
    assert total(again) / total(passes) == pytest.approx(float(medians), abs=6e-4)
    table = [line.split() for line in re.findall(r"^ +\d +\d(?: +\d+\.\d+)+$", out, re.M)]
    assert [(int(chunk), int(stage)) for chunk, stage, *_ in table] == [(chunk, chunk % stages) for chunk in range(chunks)]
    for chunk, _, *columns, _ in table:
        for kind, milliseconds in zip(kinds, columns, strict=True):
            _, begin, end = again[kind, int(chunk), 3]
            assert (end - begin) / 1e3 == pytest.approx(float(milliseconds), abs=6e-4)

    # Measuring does not change the results.
    plain = program.train(tmp_path / "b", *options, ranks=stages)
    assert plain.losses == run.losses
    assert not list((tmp_path / "b").glob("pipeline-*"))


@pytest.mark.parametrize("ranks,options", [(4, ["--zero-stage=3", "--overlap-grad-reduce=false"]), (8, ["--tensor-parallel=2", "--sequence-parallel"])],
                         ids=["data", "data and tensor"])
def test_is_measured_on_a_mesh_in_one_step(ranks, options, tmp_path):
    options = ["--pipeline-parallel=2", *options, "--pipeline-timeline", "--steps=1"]
    out = program.run(*MODEL, *QUIET, *options, f"--out-dir={tmp_path}", ranks=ranks).stdout
    assert "measured in step 1, the median of 1 step;" in out
    passes, _ = drawn(tmp_path, "pipeline-measured")
    check_passes(passes, ["forward", "backward"], 2, 2, 3)


# ---- the header, the record, --verbose


def test_says_what_stages_have(tmp_path):
    out = program.run(*MODEL, "--pipeline-parallel=2", "--pipeline-layers=3,1", "--steps=0", "--zero-stage=2", "--verbose",
                      f"--out-dir={tmp_path}", ranks=4).stdout
    assert "  pipeline    1f1b; stages of 3 and 1 layers\n" in out
    assert "of stage 0, which needs most" in out and "of stage 0, which sends most" in out
    places = re.findall(r"^  process (\d)  stage (\d), data (\d), tensor 0  (\S.*?)  +(\S+ .iB)$", out, re.M)
    assert [place[:3] for place in places] == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")]
    assert [place[3] for place in places] == ["embedding, layers 0 to 2"] * 2 + ["layers 3, head"] * 2
    assert places[0][4] == places[1][4] != places[2][4] == places[3][4]
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["run"]
    assert record["mesh"] == {"world": 4, "pipeline": 2, "data": 2, "tensor": 1, "zero_stage": 2, "shards": 2, "replicas": 1}
    pipeline = record["pipeline"]
    assert (pipeline["schedule"], pipeline["stages"], pipeline["layers"]) == ("1f1b", 2, [3, 1])
    assert pipeline["memory"][0] == record["memory"] and pipeline["bytes_sent"][0] == record["bytes_sent"]
    # Three micro-batches of 4 sequences of 16 tokens with 32 channels. Half of wte's gradients, 256 x 32 elements, padded to
    # multiples of 1024.
    for sent in pipeline["bytes_sent"]:
        assert sent["stages"] == 3 * 4 * 16 * 32 * 4 and sent["tied"] == 256 * 32 * 4 / 2
    sizes = [sum(memory.values()) / 1024 for memory in pipeline["memory"]]
    for size, place in zip(sizes, (places[0], places[2])):
        number, unit = place[4].split()
        assert size / (1024 if unit == "MiB" else 1) == pytest.approx(float(number), abs=0.051)


def test_places_of_tensor_ranks_and_what_they_send(tmp_path):
    out = program.run(*MODEL, "--pipeline-parallel=2", "--tensor-parallel=2", "--steps=0", "--verbose", f"--out-dir={tmp_path}", ranks=4).stdout
    assert re.findall(r"^  process (\d)  stage (\d), data 0, tensor (\d) ", out, re.M) == [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0"), ("3", "1", "1")]
    assert "to its tensor-parallel group" in out
    assert "= 1 data-parallel process x 6 micro-batches x" in out


def test_places_of_one_process():
    out = program.run(*MODEL, "--steps=0", "--verbose").stdout
    assert re.search(r"^  process 0  stage 0, data 0, tensor 0  embedding, layers 0 to 3, head  \S+ .iB$", out, re.M)
