"""Metrics files of invented runs, for the tests of the scripts that read them (scripts/)."""

import json
import pathlib
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # before a package with the name of one of ours

ABOUT = {"configuration": {"model": "tiny", "layers": 4, "heads": 4, "channels": 128, "seq-len": 64, "steps": 40,
                           "global-batch-tokens": 1536, "dtype": "fp32"},
         "mesh": {"world": 2}, "parameters": 835072, "unigram_loss": 2.9, "source_entropy": 0.6,
         "memory": {"parameters": 3 << 20, "gradients": 3 << 20, "moments": 6 << 20, "activations": 28 << 20, "master": 0}}


def falling(count):
    return [0.8 + 4.7 * 0.9**step for step in range(count)]


def full_line(step, loss, **more):
    """The line that the trainer writes after a step."""
    return {"step": step, "loss": loss, "grad_norm": 1.5, "lr": 1e-3, "tokens": 1536 * step, "tokens_per_s": 15360.0,
            "step_ms": 100.0, "phase_ms": {"data": 1.0, "forward": 30.0, "backward": 60.0, "communication": 5.0},
            "time": 1.7e9 + step} | more


def full_lines(losses, first=1, **more):
    return [full_line(step, loss, **more) for step, loss in enumerate(losses, first)]


def as_text(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_lines(path, lines, about=ABOUT):
    """Writes a metrics file and replaces the old one as a whole, as a resumed run does."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(as_text([{"run": about}, *lines]))
    new.replace(path)
    return path


def append(path, lines):
    with open(path, "a") as file:
        file.write(as_text(lines))
