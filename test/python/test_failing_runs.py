"""Failures in the middle of a run: one line, status 1, and the results saved before are whole."""

import json
import os
import re
import resource
import signal
import subprocess
import time

import numpy as np
import pytest
import boxes
import program
import safetensors_numpy
from refused import SECONDS, command_of, contents, one_error, run
from wrong_files import CHECKPOINT, INIT, weights
from wrong_options import SHARD, shard

class Running:
    """The program running in a folder, on `ranks` processes."""

    def __init__(self, arguments, folder, ranks):
        command, environment = command_of(arguments, folder, ranks)
        self.folder = folder
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)

    def wait_for(self, path):
        deadline = time.monotonic() + 3 * SECONDS
        while not (self.folder / path).exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"no {path}"
            time.sleep(0.01)

    def end(self):
        try:
            stderr = self.process.communicate(timeout=SECONDS)[1]
        finally:
            self.process.terminate()  # mpirun then ends its ranks
        return self.process.returncode, stderr


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def overwrite_tokens(path):
    with open(path, "r+b") as file:  # in place, so the file keeps its length all the time
        file.seek(1024)
        file.write(b"\xff" * 1200)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage, words", [
    (overwrite_tokens, ["x.bin' has token 65535", "--vocab-size"]),
    (lambda path: os.truncate(path, 1100), ["x.bin' has 1,100 bytes, but had 2,224"]),
], ids=["token past the vocabulary", "file cut"])
def test_data_that_is_damaged_while_they_are_read(damage, words, ranks, tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    shard()(folder)
    good = (folder / "x.bin").read_bytes()
    arguments = [*SHARD, "--out-dir={}/run", "--checkpoint-every=100", "--steps=1000000000", "--val-every=0"]
    running = Running(arguments, folder, ranks)
    running.wait_for("run/checkpoint-00000100")
    damage(folder / "x.bin")
    status, stderr = running.end()
    line = one_error(stderr)
    assert status == 1
    for word in words:
        assert word in line
    # The saved results are whole.
    (folder / "x.bin").write_bytes(good)
    result = run([*arguments, "--resume", "--steps=0"], folder, 1)
    assert result.returncode == 0, result.stderr


def limited(size):
    """Files of this process cannot exceed the size. This replaces a full disk, because mounting one needs privileges."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# The weights of the small model are 136 KB, its moments 272 KB.
@pytest.mark.parametrize("size, name", [(100_000, "weights-00000-1.safetensors"), (200_000, "state-00000-1.safetensors")])
def test_a_full_disk_keeps_the_last_checkpoint(size, name, tmp_path):
    arguments = ["--out-dir={}/run"]
    assert run([*arguments, "--steps=2"], tmp_path, 1).returncode == 0
    before = contents(tmp_path / "run/checkpoint-00000002")
    result = run([*arguments, "--resume"], tmp_path, 1, limited(size))
    line = one_error(result.stderr)
    assert result.returncode == 1
    assert f"cannot write {tmp_path}/run/checkpoint-00000004.partial/{name}: File too large" in line
    assert "the earlier checkpoints are whole" in line
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000002"]
    assert contents(tmp_path / "run/checkpoint-00000002") == before
    result = run([*arguments, "--resume"], tmp_path, 1)
    assert result.returncode == 0, result.stderr
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000002", "checkpoint-00000004"]


@pytest.mark.parametrize("options", [[], ["--zero-stage=3"]], ids=["whole", "in shards"])
def test_a_full_disk_at_the_first_checkpoint(options, tmp_path):
    """With two processes, each of which writes a part. Half of the moments are 7.2 MB, and Open MPI's own files are less than
    6 MB."""
    larger = ["--layers=4", "--channels=192", "--heads=4", "--seq-len=64"]
    result = run(["--out-dir={}/run", "--steps=2", *larger, *options], tmp_path, 2, limited(6_000_000))
    line = one_error(result.stderr)
    assert result.returncode == 1 and checkpoints(tmp_path / "run") == []
    assert "-1.safetensors: File too large; make room, and start again: there is no earlier checkpoint" in line


def test_a_place_for_the_best_checkpoint_that_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/best").write_text("of the user")
    result = run(["--out-dir={}/run", "--steps=4", "--checkpoint-every=1", "--val-every=2", "--keep-best", "--overwrite"], tmp_path, 1)
    assert one_error(result.stderr).endswith(f"run/best: {tmp_path}/run/best is not a directory")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["best"]


# A checkpoint of this model has less than 100 KB, and the metrics of 500 steps have more.
TINY = ["--layers=1", "--channels=16", "--global-batch-tokens=64", "--val-every=0", "--val-batches=1", "--log-every=1"]
NO_ROOM = "cannot write {}/run/metrics.jsonl: File too large"


def test_a_disk_that_fills_up_under_the_metrics(tmp_path):
    """The run goes on to its end, and the checkpoint is whole. The lines that had room are too."""
    result = run([*TINY, "--out-dir={}/run", "--steps=500"], tmp_path, 1, limited(100_000))
    assert result.returncode == 1
    no_room = NO_ROOM.format(tmp_path)
    assert one_error(result.stderr) == f"{no_room}; its last lines are missing, but the run is complete and saved"
    assert result.stdout.count("note: ") == 1 and f"note: {no_room}; the run goes on, and writes the missing lines when it can" in result.stdout
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000500"]
    written = (tmp_path / "run/metrics.jsonl").read_text()
    lines = written[:written.rindex("\n")].splitlines()  # the last one may end just where the room does
    assert len(written) == 100_000 and 100 < len(lines) < 500
    steps = [json.loads(line)["step"] for line in lines[1:]]
    assert steps == list(range(1, len(steps) + 1))
    result = run([*TINY, "--out-dir={}/run", "--steps=501", "--resume"], tmp_path, 1)
    assert result.returncode == 0 and program.Run(tmp_path / "run").column("step") == [*steps, 501]


def test_the_metrics_are_whole_once_there_is_room_again(tmp_path):
    options = [option.replace("{}", str(tmp_path)) for option in [*TINY, "--out-dir={}/run", "--steps=1000000", "--sample-tokens=0"]]
    process = subprocess.Popen([program.ROOT / program.PROGRAM, "--heads=2", "--seq-len=16", *options], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)))
    try:
        for line in process.stdout:
            if line.startswith("note: cannot write"):
                break
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "note: " not in process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()
    assert process.returncode == 75
    steps = program.Run(tmp_path / "run").column("step")
    assert steps == list(range(1, len(steps) + 1)) and (tmp_path / "run/metrics.jsonl").stat().st_size > 100_000
    assert checkpoints(tmp_path / "run") == [f"checkpoint-{len(steps):08}"]


def test_a_full_disk_leaves_the_metrics_of_the_run_before(tmp_path):
    assert run(["--out-dir={}/run", "--metrics={}/m.jsonl"], tmp_path, 1).returncode == 0
    before = contents(tmp_path)
    result = run(["--out-dir={}/other", "--metrics={}/m.jsonl"], tmp_path, 1, limited(100))
    assert result.returncode == 1
    assert "File too large" in one_error(result.stderr)
    assert contents(tmp_path) == before


def test_export_makes_its_directory(tmp_path):
    assert run(["--out-dir={}/run", "--export={}/a/b/x.safetensors"], tmp_path, 1).returncode == 0
    assert "wte.weight" in safetensors_numpy.load(tmp_path / "a/b/x.safetensors")


@pytest.mark.parametrize("leads_to_file", [True, False])
def test_export_goes_where_a_link_leads(leads_to_file, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "link.safetensors").symlink_to("next")
    (tmp_path / "next").symlink_to(tmp_path / "shared/x.safetensors")
    if leads_to_file:
        (tmp_path / "shared/x.safetensors").touch()
    assert run(["--out-dir={}/run", "--export={}/link.safetensors"], tmp_path, 1).returncode == 0
    assert (tmp_path / "link.safetensors").is_symlink() and (tmp_path / "next").is_symlink()
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["x.safetensors"]
    assert "wte.weight" in safetensors_numpy.load(tmp_path / "shared/x.safetensors")


def test_the_name_of_a_link_decides_the_format_of_an_export(tmp_path):
    (tmp_path / "shared").mkdir()
    for link, target in (("out.safetensors", "w.bin"), ("noext", "q.safetensors")):
        (tmp_path / link).symlink_to(f"shared/{target}")
        assert run([f"--out-dir={{}}/run-{link}", f"--export={{}}/{link}"], tmp_path, 1).returncode == 0
        assert (tmp_path / link).is_symlink()
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {"w.bin", "q.safetensors"}
    for file in ("w.bin", "q.safetensors/model.safetensors"):
        assert "wte.weight" in safetensors_numpy.load(tmp_path / "shared" / file)


def test_an_export_that_fails_after_all_says_how_to_make_it(tmp_path):
    running = Running(["--out-dir={}/run", "--export={}/a/x.safetensors", "--steps=300"], tmp_path, 1)
    running.wait_for("run/config.toml")
    (tmp_path / "a/x.safetensors.partial").mkdir(parents=True)
    status, stderr = running.end()
    assert status == 1
    line = one_error(stderr)
    assert "x.safetensors: Is a directory" in line
    what, command = line.split("; the rest of the run is complete; to export its checkpoint: ")
    assert (tmp_path / "run/checkpoint-00000300").is_dir()
    (tmp_path / "a/x.safetensors.partial").rmdir()
    result = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, command + result.stderr
    exported, saved = safetensors_numpy.load(tmp_path / "a/x.safetensors"), boxes.weights(tmp_path / "run/checkpoint-00000300")
    assert exported.keys() == saved.keys() and all((exported[name] == saved[name]).all() for name in saved)


# ---- numbers that are not finite


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_absurd_learning_rate_ends_the_run(ranks, tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    arguments = ["--out-dir={}/run", "--checkpoint-every=1"]
    assert run(arguments, folder, 1).returncode == 0
    before = contents(folder / CHECKPOINT)
    result = run([*arguments, "--resume", "--steps=50", "--lr=1e30"], folder, ranks)
    assert result.returncode == 1
    line = one_error(result.stderr)
    step, tensor = re.match(r"step (\d+): the loss is (?:nan|inf).* first tensor that is not finite is (.*?); "
                            "resume from the last checkpoint, or start again, with a smaller --lr", line).groups()
    assert int(step) > 5
    assert re.search(r"(wte|wpe|h\.[01]|ln_f|lm_head)", tensor)
    # Step 5 was completed, so its checkpoint and the earlier ones exist, but none of the failed step.
    assert contents(folder / CHECKPOINT) == before
    assert f"checkpoint-{int(step):08}" not in checkpoints(folder / "run")
    assert len(program.Run(folder / "run").lines) == int(step) - 1
    result = run(["--out-dir={}/other", "--resume={}/" + CHECKPOINT, "--steps=5"], folder, 1)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps, words", [
    (4, ["step 1: the update made the weight wte.weight not finite, so nothing is saved; start again with a smaller --lr"]),
    (1, ["the validation after step 1 is nan", "the weight wte.weight"]),
], ids=["saving", "validating"])
def test_weights_that_are_not_finite_are_not_saved(steps, words, ranks, tmp_path):
    """A decay multiplies the weights by -1e66, after a finite loss and gradient."""
    folder = tmp_path / "case"
    folder.mkdir()
    result = run(["--out-dir={}/run", "--checkpoint-every=1", f"--steps={steps}", "--val-every=0", "--weight-decay=1e38",
                  "--lr=1e30"], folder, ranks)
    assert result.returncode == 1
    line = one_error(result.stderr)
    for word in words:
        assert word in line
    assert checkpoints(folder / "run") == []


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_what_would_do_is_what_there_is(saved, init, tmp_path):
    """The message mentions a checkpoint to resume from only if one exists."""
    arguments = ["--out-dir={}/run", "--steps=9", "--lr=1e30", "--warmup-steps=0"]
    if init:
        weights(lambda tensors: None)(tmp_path)
        arguments += INIT
    if saved:
        arguments += ["--checkpoint-every=1"]
    line = one_error(run(arguments, tmp_path, 1).stderr)
    assert line.startswith("step 2: ") and (checkpoints(tmp_path / "run") != []) == saved
    assert line.endswith("; resume from the last checkpoint, or start again, with a smaller --lr or more --warmup-steps" if saved else
                         "; start again with a smaller --lr or more --warmup-steps; --checkpoint-every saves checkpoints on the way")


def test_a_checkpoint_whose_next_step_is_not_finite(tmp_path):
    """Its weights are finite, but every forward pass with them fails. Only an earlier checkpoint can be resumed."""
    arguments = ["--out-dir={}/run", "--val-every=0", "--lr=1e10", "--warmup-steps=0", "--grad-clip=0", "--checkpoint-every=1"]
    assert "; resume from the last checkpoint" in one_error(run(arguments, tmp_path, 1).stderr)
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000001"]
    assert "; resume from an earlier checkpoint" in one_error(run([*arguments, "--resume"], tmp_path, 1).stderr)


# With the outputs of the blocks' layers kept, and with blocks that overwrite each other's.
RECOMPUTES = [["--recompute=none"], ["--recompute=selective"], ["--recompute=block"]]


@pytest.mark.parametrize("recompute", RECOMPUTES, ids=lambda option: option[0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_that_is_not_finite_names_the_first_output(ranks, recompute, tmp_path):
    """A step is so large that the weights, though finite, overflow the forward pass."""
    result = run(["--out-dir={}/run", "--steps=1", "--lr=1e10", "--warmup-steps=0", "--grad-clip=0", *recompute], tmp_path, ranks)
    assert result.returncode == 1
    assert re.search(r"validation after step 1 is nan; the first tensor that is not finite is the output of h\.0\.attn;",
                     one_error(result.stderr))


def overflowing_output(tensors):
    tensors["h.1.ln_2.weight"][:] = 1
    tensors["h.1.mlp.c_fc.weight"] = np.sign(tensors["h.1.mlp.c_fc.weight"]) * np.float32(3e38)


def overflowing_row(tensors):
    tensors["wte.weight"][200] = 3e38


def overflowing_gradient(tensors):
    """The output of h.1.ln_2 is tiny and the weights after it are huge. Its gradient is huge too: 1e38 times the incoming gradient,
    which the large logits make larger than 3."""
    tensors["h.1.ln_2.weight"][:] = 2e-38
    tensors["h.1.ln_2.bias"][:] = 0
    tensors["h.1.mlp.c_fc.weight"] = np.sign(tensors["h.1.mlp.c_fc.weight"]) * np.float32(1e38)
    tensors["h.1.mlp.c_proj.weight"][:] *= 50
    tensors["wte.weight"] *= 5000
    tensors["ln_f.weight"][:] = 1e4


def overflowing_norm(tensors):
    """Each gradient is finite, but the sum of their squares is not."""
    tensors["ln_f.weight"][:] = 1e30
    tensors["wte.weight"] *= np.float32(1e-30)


# One batch with a single token of 200, in the share of the last rank.
TOKENS = [*(65,) * 383, 200, 65]


@pytest.mark.parametrize("ranks, recompute", [(1, RECOMPUTES[0]), (2, RECOMPUTES[0]), (1, RECOMPUTES[1]),
                                              (2, [*RECOMPUTES[2], "--zero-stage=3", "--micro-batch-size=1"])],
                         ids=["1", "2", "1, selective", "2, block, ZeRO-3"])
@pytest.mark.parametrize("change, tensor", [
    (overflowing_output, "the output of h.1.mlp.c_fc"),
    (overflowing_row, "the output of h.0.ln_1"),
    (overflowing_gradient, "the gradient of h.1.ln_2.bias"),
    (overflowing_norm, "the norm of all gradients, each of which is finite"),
], ids=lambda value: value.__name__ if callable(value) else "")
def test_the_first_tensor_that_is_not_finite_is_named(change, tensor, ranks, recompute, tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    weights(change)(folder)
    shard(tokens=TOKENS)(folder)
    result = run([*INIT, *SHARD, *recompute, "--out-dir={}/run", "--checkpoint-every=1"], folder, ranks)
    assert result.returncode == 1
    line = one_error(result.stderr)
    assert line.startswith("step 1: ") and f"the first tensor that is not finite is {tensor};" in line
    assert line.endswith("; there was no update yet, so the weights of --init are the cause; give other weights")
    assert checkpoints(folder / "run") == []
