"""scripts/tensorboard.py: its event files, read back by an independent parser of the formats (records with CRC-32C, protobuf's
wire format), and how TensorBoard shows them."""

import errno
import math
import os
import signal
import struct
import subprocess
import sys
import time

import program
import pytest
from made_runs import ABOUT, SCRIPTS, append, falling, full_line, full_lines, write_lines

import metrics
import tensorboard

SCRIPT = SCRIPTS / "tensorboard.py"
CRC_TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    CRC_TABLE.append(byte)


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    """The whole records of an event file. A record that is cut off at the end is left out."""
    place = 0
    while place + 12 <= len(data):
        length, crc = struct.unpack_from("<QI", data, place)
        assert crc == masked_crc(data[place:place + 8])
        if place + 16 + length > len(data):
            return
        content = data[place + 12:place + 12 + length]
        assert struct.unpack_from("<I", data, place + 12 + length)[0] == masked_crc(content)
        yield content
        place += 16 + length


def varint(data, place):
    value = shift = 0
    while True:
        value |= (data[place] & 0x7F) << shift
        shift, place = shift + 7, place + 1
        if data[place - 1] < 0x80:
            return value, place


def message(data):
    """{field: [values]}: numbers as stored, texts and messages as bytes."""
    fields, place = {}, 0
    while place < len(data):
        key, place = varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = varint(data, place)
        elif kind == 2:
            length, place = varint(data, place)
            value, place = data[place:place + length], place + length
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[kind]
            value, place = struct.unpack_from(form, data, place)[0], place + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def events(folder):
    """All events in the order in which TensorBoard reads them: (wall time, step, {tag: number or None}, forget)."""
    for path in sorted(folder.glob("*tfevents*")):
        for record in records(path.read_bytes()):
            event = message(record)
            values = {}
            for summary in event.get(5, []):
                for value in map(message, message(summary).get(1, [])):
                    values[value[1][0].decode()] = value[2][0] if 2 in value else None
            forget = any(message(log).get(1) == [1] for log in event.get(7, []))  # SessionLog.START
            yield event[1][0], event.get(2, [0])[0], values, forget


def written(folder, tag="train/loss"):
    """The steps of a tag in the files, including those that TensorBoard forgets."""
    return [step for _, step, values, _ in events(folder) if tag in values]


def shown(folder, tag="train/loss"):
    """The points that TensorBoard shows for a tag, {step: number}. A session start removes all points from its step on. No step
    occurs twice."""
    points = {}
    for _, step, values, forget in events(folder):
        if forget:
            points = {known: value for known, value in points.items() if known < step}
        if tag in values:
            assert step not in points
            points[step] = values[tag]
    return points


def convert(*words):
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=60 * program.PATIENCE)


def convert_here(path):
    """One call of the script on one run, in this process. Returns the number of steps that it wrote."""
    converter = tensorboard.Converter(path, "run", path.parent / "tensorboard")
    steps = converter.advance()
    converter.events.close()
    return steps


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def folder(path):
    return path.parent / "tensorboard"


def test_every_number_of_a_run(path, folder):
    lines = full_lines(falling(3))
    lines[1] |= {"val_loss": 2.25, "hellaswag_acc": 0.35, "hellaswag_acc_norm": 0.3, "mfu": 0.4}
    write_lines(path, lines)
    done = convert(path.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"run: 3 steps into {folder}\n", "")
    losses = shown(folder)
    assert losses == pytest.approx(dict(enumerate(falling(3), 1)), rel=1e-7)
    for tag, value in (("grad_norm", 1.5), ("lr", 1e-3), ("tokens_per_second", 15360), ("phase_ms/backward", 60), ("step_ms", 100)):
        assert shown(folder, tag) == pytest.approx(dict.fromkeys([1, 2, 3], value))
    for tag, value in (("val/loss", 2.25), ("hellaswag/acc", 0.35), ("hellaswag/acc_norm", 0.3), ("mfu", 0.4)):
        assert shown(folder, tag) == pytest.approx({2: value})
    assert shown(folder, "tokens") == {1: 1536, 2: 3072, 3: 4608}
    assert {step: wall for wall, step, values, _ in events(folder) if "lr" in values} == {1: 1.7e9 + 1, 2: 1.7e9 + 2, 3: 1.7e9 + 3}
    tags = {tag for _, _, values, _ in events(folder) for tag in values}
    assert {"configuration/text_summary", "run/text_summary", "_hparams_/session_start_info"} <= tags
    assert b"| global-batch-tokens | 1536 |" in next(folder.iterdir()).read_bytes()
    assert not {"step", "time"} & tags


def test_what_is_not_finite_is_shown_so(path, folder):
    write_lines(path, [full_line(1, 2.0), full_line(2, None, grad_norm=None), full_line(3, 1e300)])
    convert_here(path)
    losses = shown(folder)
    assert losses[1] == 2 and math.isnan(losses[2]) and losses[3] == math.inf
    assert math.isnan(shown(folder, "grad_norm")[2])


def test_times_that_were_not_recorded_are_counted_back(path, folder):
    lines = full_lines(falling(3))
    for line in lines:
        del line["time"]
    os.utime(write_lines(path, lines), (2e9, 2e9))
    convert_here(path)
    assert [wall for wall, _, values, _ in events(folder) if "lr" in values] == pytest.approx([2e9 - 0.2, 2e9 - 0.1, 2e9])


def test_a_second_call_goes_on(path, folder):
    write_lines(path, full_lines(falling(4)))
    assert convert_here(path) == 4
    files = sorted(folder.iterdir())
    assert convert_here(path) == 0 and sorted(folder.iterdir()) == files
    append(path, full_lines([0.7, 0.6], first=5))
    assert convert_here(path) == 2
    assert written(folder) == [1, 2, 3, 4, 5, 6]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("cut", [1, 30, 150])
def test_a_call_that_was_killed_while_it_wrote(path, folder, cut):
    write_lines(path, full_lines(falling(4)))
    convert_here(path)
    file = next(folder.iterdir())
    file.write_bytes(file.read_bytes()[:-cut])
    assert written(folder) == [1, 2, 3]
    assert convert_here(path) == 1
    assert written(folder) == [1, 2, 3, 4] == list(shown(folder))


@pytest.mark.parametrize("lines, about", [
    (full_lines([*falling(3), 0.5, 0.4]), ABOUT),  # resumed from step 3, without a follower meanwhile
    (full_lines(falling(2)), ABOUT),
    ([*full_lines(falling(3)), full_line(4, falling(4)[-1], val_loss=1.0)], ABOUT),
    ([full_line(1, 9.0), *full_lines(falling(4))[1:]], ABOUT),  # the same end, but another beginning
    ([full_line(0, 6.0), *full_lines(falling(4))], ABOUT),  # a step that the files do not have
    (full_lines(falling(4))[1:], ABOUT),
    (full_lines([9.0, 8.0]), ABOUT | {"identity": "another"}),
])
def test_what_is_the_runs_no_more_is_written_afresh(path, folder, lines, about):
    write_lines(path, full_lines(falling(4)))
    convert_here(path)
    others = folder / "events.out.tfevents.1.other"
    others.write_bytes(b"")
    write_lines(path, lines, about)
    assert convert_here(path) == len(lines)
    assert written(folder) == [line["step"] for line in lines]
    assert shown(folder) == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert others.exists()
    # A TensorBoard that has read the old files forgets them.
    assert [step for _, step, _, forget in events(folder) if forget] == [0]


@pytest.mark.parametrize("line", [{"step": 0, "val_loss": 2.5}, full_line(1, None)])
def test_a_second_call_goes_on_after_what_is_no_common_step(path, folder, line):
    """Weights that were only evaluated, and a loss that is not finite."""
    write_lines(path, [line])
    assert [convert_here(path), convert_here(path)] == [1, 0]
    append(path, full_lines([0.7], first=2))
    assert convert_here(path) == 1 and len(list(folder.iterdir())) == 2


def test_a_second_call_after_a_follower_of_a_resumed_run(path, folder):
    """Points that TensorBoard forgets are not compared."""
    write_lines(path, full_lines(falling(4)))
    converter = tensorboard.Converter(path, "run", folder)
    converter.advance()
    write_lines(path, full_lines([*falling(2), 0.5]))
    assert converter.advance() == 1
    converter.events.close()
    assert convert_here(path) == 0 and list(shown(folder)) == [1, 2, 3]


def test_following_a_run_that_is_resumed_and_replaced(path, folder):
    converter = tensorboard.Converter(path, "run", folder)
    assert converter.advance() == 0 and not folder.exists()  # it has not begun
    write_lines(path, [])
    assert converter.advance() == 0
    append(path, full_lines(falling(5)))
    assert converter.advance() == 5 and converter.advance() == 0
    append(path, full_lines([0.5], first=6))
    assert converter.advance() == 1
    assert written(folder) == [1, 2, 3, 4, 5, 6] and len(list(folder.iterdir())) == 1
    write_lines(path, full_lines(falling(3)))  # resumed from step 3 ...
    assert converter.advance() == 0
    assert list(shown(folder)) == [1, 2, 3]
    append(path, full_lines([0.4], first=4))  # ... and on
    assert converter.advance() == 1
    assert shown(folder) == pytest.approx(dict(enumerate([*falling(3), 0.4], 1)), rel=1e-7)
    write_lines(path, [*full_lines(falling(3)), full_line(4, 0.4, val_loss=0.3), full_line(5, 0.2)])
    assert converter.advance() == 2
    assert list(shown(folder)) == [1, 2, 3, 4, 5] and shown(folder, "val/loss") == pytest.approx({4: 0.3})
    write_lines(path, full_lines([7.0, 6.0]), ABOUT | {"identity": "another"})
    assert converter.advance() == 2
    assert shown(folder) == {1: 7.0, 2: 6.0} and written(folder) == [1, 2]
    converter.events.close()
    append(path, full_lines([5.0], first=3))
    assert convert_here(path) == 1 and written(folder) == [1, 2, 3]


@pytest.mark.parametrize("steps", [6, 5])
def test_following_goes_on_after_a_line_that_was_damaged(path, folder, steps):
    """The lines read before it are also written, even if the damaged line was the last."""
    write_lines(path, full_lines(falling(3)))
    converter = tensorboard.Converter(path, "run", folder)
    converter.advance()
    append(path, full_lines(falling(5)[3:], first=4))
    with open(path, "a") as file:
        file.write("garbage\n")
    append(path, full_lines([0.5], first=6))
    for _ in range(2):
        with pytest.raises(metrics.MetricsError, match="line 7: not JSON"):
            converter.advance()
    write_lines(path, full_lines([*falling(5), 0.5][:steps]))
    assert converter.advance() == steps - 3 and converter.advance() == 0
    assert written(folder) == list(range(1, steps + 1)) == list(shown(folder))
    converter.events.close()


def test_following_after_an_error_in_another_run(path, folder):
    """Rows that were read before the error have not become events, so they must not count as written."""
    write_lines(path, full_lines(falling(4)))
    converter = tensorboard.Converter(path, "run", folder)
    converter.advance()
    write_lines(path, [*full_lines([9.0, 8.0]), {"step": 3}])
    with pytest.raises(metrics.MetricsError):
        converter.advance()
    write_lines(path, full_lines([9.0, 8.0, 7.0]))
    converter.advance()
    assert shown(folder) == {1: 9.0, 2: 8.0, 3: 7.0}
    converter.events.close()


@pytest.mark.parametrize("grows", [True, False])
def test_following_goes_on_after_a_disk_was_full(path, folder, monkeypatch, grows):
    write_lines(path, full_lines(falling(3)))
    converter = tensorboard.Converter(path, "run", folder)
    converter.advance()
    [file] = folder.iterdir()
    write = tensorboard.EventFolder.write

    def torn(events, event):
        """Writes only the part of the event for which there is room."""
        if event.step < 5:
            return write(events, event)
        events.flush()
        length = struct.pack("<Q", 300)
        with open(file, "ab") as begun:
            begun.write(length + struct.pack("<I", masked_crc(length)) + b"begin")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append(path, full_lines(falling(6)[3:], first=4))
    with monkeypatch.context() as full:
        full.setattr(tensorboard.EventFolder, "write", torn)
        with pytest.raises(metrics.MetricsError) as stop:
            converter.advance()
    assert str(stop.value) == f"cannot write {folder}: No space left on device"
    empty = folder / f"events.000009.out.tfevents.1.x{tensorboard.SUFFIX}"
    empty.touch()
    if grows:
        append(path, full_lines([0.5], first=7))
    assert converter.advance() == 2 + grows and converter.advance() == 0
    assert written(folder) == list(range(1, 7 + grows)) == list(shown(folder))
    assert not empty.exists() and len(list(folder.iterdir())) == 2
    converter.events.close()


def test_follow_waits_and_ends_with_ctrl_c(tmp_path):
    paths = [tmp_path / name / "metrics.jsonl" for name in ("a", "b")]
    write_lines(paths[0], full_lines(falling(2)))
    command = [sys.executable, SCRIPT, tmp_path / "a", tmp_path / "b", "--follow", "--interval", "0.02", "--logdir", tmp_path / "events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == f"a: 2 steps into {tmp_path}/events/a\n"
            append(paths[0], full_lines([1.0], first=3))
            write_lines(paths[1], full_lines(falling(4)))
            assert job.stdout.readline() == f"b: 4 steps into {tmp_path}/events/b\n"
            deadline = time.monotonic() + 60 * program.PATIENCE
            while len(written(tmp_path / "events/a")) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            job.send_signal(signal.SIGINT)
            output, complaint = job.communicate(timeout=60 * program.PATIENCE)
        finally:
            job.kill()
    assert (job.returncode, output, complaint) == (0, "", "")
    assert written(tmp_path / "events/a") == [1, 2, 3] and written(tmp_path / "events/b") == [1, 2, 3, 4]


@pytest.mark.parametrize("words, complaint", [
    (["nothing"], "there is no "),
    (["damaged.jsonl"], "line 2: no numbers"),
    (["empty.jsonl"], "empty.jsonl is empty"),
    (["good.jsonl", "--logdir", "good.jsonl"], "cannot write "),
    (["good.jsonl", "--follow", "--interval", "0"], "--interval 0 is not a number of seconds"),
])
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "good.jsonl", full_lines(falling(2)))
    write_lines(tmp_path / "damaged.jsonl", [{"step": 1}])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit) as stop:
        tensorboard.main(words)
    assert stop.value.code.startswith("error: ") and complaint in stop.value.code and "\n" not in stop.value.code
