"""./train_gpt for its users: its output and files, the effect of its options, and its refusals."""

import json
import math
import pathlib
import re
import subprocess

import numpy as np
import pytest

import program
import safetensors_numpy

QUICK = [*program.SMALL, "--steps=4"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A short run on the embedded stories, with all its output."""
    out_dir = tmp_path_factory.mktemp("stories")
    result = program.run(*QUICK, f"--out-dir={out_dir}", "--val-every=2", "--sample-tokens=30", "--prompt=Once")
    return program.Run(out_dir), result


def test_metrics(stories):
    run, _ = stories
    assert {"configuration", "commit", "mesh", "memory", "unigram_loss", "source_entropy"} <= run.record.keys()
    assert 0 < run.record["source_entropy"] < run.record["unigram_loss"] < math.log(256)
    assert run.column("step") == [1, 2, 3, 4]
    for line in run.lines:
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms", "phase_ms", "time"} <= line.keys()
        assert line["tokens"] == 384 * line["step"]
        assert line["tokens_per_s"] == pytest.approx(384 / line["step_ms"] * 1000, rel=1e-4)
        assert sum(line["phase_ms"].values()) <= line["step_ms"] * 1.001
        assert ("val_loss" in line) == (line["step"] % 2 == 0)
    # Before any update, a model's loss is about that of guessing.
    assert run.losses[0] == pytest.approx(math.log(256), rel=0.03)


def test_losses_have_nine_significant_digits(stories):
    run, _ = stories
    text = (run.out_dir / "metrics.jsonl").read_text()
    losses = re.findall(r'"loss":([0-9.]+)', text)
    assert len(losses) == 4
    digits = [len(loss.replace(".", "").lstrip("0")) for loss in losses]
    assert max(digits) == 9, losses


def test_memory_adds_up(stories):
    run, result = stories
    memory = run.record["memory"]
    parameters = run.record["parameters"]
    # fp32: parameters and gradients take 4 bytes each, AdamW's two moments 8, plus the stated padding.
    assert 4 * parameters <= memory["parameters"] == memory["gradients"]
    assert memory["moments"] == 2 * memory["parameters"]
    assert memory["master"] == 0
    assert "memory" in result.stdout


def test_gradients_in_bf16_take_half_the_memory(stories, tmp_path):
    """Half the memory for the gradients themselves. The fp32 sums of one micro-batch come on top: of the embeddings, a block
    and ln_f."""
    options = ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding", "--layers=12"]
    run = program.train(tmp_path, *QUICK, *options)
    memory = run.record["memory"]
    assert memory["parameters"] < memory["gradients"] < 2 * memory["parameters"]
    assert run.record["configuration"]["gradient-dtype"] == "bf16"
    assert run.record["configuration"]["stochastic-rounding"] is True
    config = (tmp_path / "config.toml").read_text()
    assert 'gradient-dtype = "bf16"' in config and "stochastic-rounding = true" in config
    again = program.train(tmp_path / "again", "--config", tmp_path / "config.toml")
    assert again.losses == run.losses


def test_output(stories):
    run, result = stories
    for text in ("unigram", "entropy", "validation", "best ", "sample after step 4", "Once",
                 str(run.out_dir)):
        assert text in result.stdout, text
    assert result.stderr == ""
    assert (run.out_dir / "config.toml").exists() and (run.out_dir / "checkpoint-00000004").is_dir()


def test_the_saved_configuration_repeats_the_run(stories, tmp_path):
    run, _ = stories
    config = run.out_dir / "config.toml"
    again = program.train(tmp_path / "again", "--config", config)
    assert again.losses == run.losses
    # The command line overrides the file. The last of repeated options counts.
    other = program.train(tmp_path / "other", "--config", config, "--steps=9", "--steps=3", "--seed=7")
    assert other.column("step") == [1, 2, 3]
    assert other.losses != run.losses[:3]
    assert other.record["configuration"]["seed"] == 7


def test_a_new_run_truncates_its_metrics(tmp_path):
    program.train(tmp_path / "a", *QUICK)
    assert program.train(tmp_path / "a", *QUICK, "--steps=2", "--overwrite").column("step") == [1, 2]
    file = tmp_path / "elsewhere" / "m.jsonl"
    program.run(*QUICK, f"--out-dir={tmp_path}/b", f"--metrics={file}", "--sample-tokens=0")
    assert len(file.read_text().splitlines()) == 5


def test_help_and_version():
    text = program.run("--help").stdout
    for option in ("--model", "--train-data", "--global-batch-tokens", "--lr-schedule", "--resume", "--top-k"):
        assert option in text
    assert re.match(r"train_gpt \d+\.\d+\.\d+ \(commit \S+\)\nGPUs: (CUDA \d+\.\d+ for sm_|no CUDA \(.+\)).*\n$", program.run("--version").stdout)


def test_print_model_shows_parts_and_shards():
    text = program.run("--print-model", "--model=gpt2", "--tensor-parallel=2", "--device=cpu").stdout
    assert "124,439,808 parameters" in text and "\nblock 0 to 11\n" in text and text.count("wte.weight") == 2
    assert re.search(r"h\.\*\.attn\.c_attn\.weight +\(3, 12, 64, 768\) +normal 0\.02, decays, here \(3, 6, 64, 768\)", text)
    assert re.search(r"attention +attn +\(1, 1024, 6, 64\) +kept", text)
    # Only layers recompute.
    assert text.count("  keeps ") == 3 and text.count("; with --recompute selective") == 1
    bare = program.run("--print-model", "--model=gpt2", "--bias=false", "--tied-head=false", "--device=cpu").stdout
    assert "bias" not in bare.replace("no biases", "") and "lm_head.weight" in bare


@pytest.mark.parametrize(("ranks", "options"), [
    (1, []), (2, []), (4, ["--zero-stage=3", "--tensor-parallel=2", "--sequence-parallel"]),
    (8, ["--zero-stage=2", "--zero-shard-size=2", "--pipeline-parallel=2", "--recompute=block"])])
def test_print_model_shows_what_a_step_sends(ranks, options):
    """The same as in the header of that run."""
    options = ["--model=tiny", "--device=cpu", "--micro-batch-size=1", *options]
    text = program.run("--print-model", *options, ranks=ranks).stdout
    header = program.run("--steps=0", *options, ranks=ranks).stdout
    found = re.search(r"\n  sends +((?:.+\n {14})*.+)\n", header)
    sends = "nothing" if found is None else re.sub(r"\n +", " ", found[1])
    assert text.endswith(f"\nSent: {sends}.\n")
    assert (ranks == 1) == (found is None)


def test_print_model_shows_shards_and_steps_that_there_are_not():
    text = program.run("--print-model", "--model=tiny", "--device=cpu", "--zero-stage=1", ranks=2).stdout
    # 12 C^2 + 13 C for 128 channels. Each tensor begins at a multiple of 128, and all are sharded in whole norm blocks.
    here, shard = (int(found.replace(",", "")) for found in re.search(
        r"  h\.\*: ([\d,]+) elements here with padding, in 2 shards of ([\d,]+)", text).groups())
    assert 198272 <= here < 198272 + 2 * 4096 and here == 2 * shard
    text = program.run("--print-model", "--model=tiny", "--device=cpu", "--pipeline-parallel=2").stdout
    assert text.count("sends 32.0 KiB per sequence to the next stage") == 1  # 64 tokens of 128 channels in fp32
    text = program.run("--print-model", "--model=tiny", "--device=cpu", "--global-batch-tokens=65").stdout
    assert "These options do not make a step: --global-batch-tokens 65" in text


@pytest.mark.parametrize("size", ["--layers=9223372036854775807", "--channels=1000000000000", "--seq-len=9223372036854775807",
                                  "--vocab-size=9223372036854775807"])
def test_print_model_shows_sizes_that_no_machine_bears(size):
    assert size[size.index("=") + 1:] in program.run("--print-model", size, "--device=cpu").stdout.replace(",", "")


def test_print_step_lists_the_actions(tmp_path):
    text = program.run(*QUICK, "--print-step", "--verbose", "--micro-batch-size=12").stdout
    assert text.count("backward") >= 2 * 4 and "update" in text
    assert "reduce_scatter" not in text
    text = program.run(*QUICK, "--print-step", "--verbose", ranks=2).stdout
    assert text.count("reduce_scatter") == text.count("gather_gradients") == 5


def test_print_step_prints_equal_blocks_once():
    blocks = ["--layers=7", "--channels=32", "--heads=2", "--seq-len=16", "--print-step"]
    short, whole = program.run(*blocks).stdout, program.run(*blocks, "--verbose").stdout
    assert "the same for" not in whole and len(re.findall(r"forward +block \d", whole)) == 7
    # Block 0 reads the embedding's output, so block 1 is the first of its kind. Block 6 comes after the update of the final layernorm.
    assert re.findall(r"forward +block (\d)", short) == ["0", "1", "6"] and "the same for block 2 to block 5 (actions 9 to 16)" in short
    # Together the printed actions and those named as the same are all actions.
    printed = {int(number) for number in re.findall(r"^ *(\d+)  ", short, re.MULTILINE)}
    same = {action for first, last in re.findall(r"\(actions (\d+) to (\d+)\)", short) for action in range(int(first), int(last) + 1)}
    assert not printed & same and printed | same == {int(number) for number in re.findall(r"^ *(\d+)  ", whole, re.MULTILINE)}


@pytest.mark.parametrize("options", [[], ["--pipeline-parallel=4"]], ids=["alone", "stages"])
def test_print_step_folds_the_blocks_of_each_micro_batch(options):
    """The list of several micro-batches does not grow with the layers, and hardly with the number of micro-batches."""
    def shown(layers, batch):
        model = ["--channels=32", "--heads=2", "--seq-len=16", "--micro-batch-size=1", "--print-step", *options]
        return len(program.run(*model, f"--layers={layers}", f"--global-batch-tokens={16 * batch}").stdout.splitlines())

    assert shown(40, 24) == shown(16, 24)
    assert shown(16, 96) <= shown(16, 24) + 8
    if not options:
        assert shown(100, 24) == shown(16, 24) <= 40


def test_print_step_shows_whole_micro_batches():
    """The first two are printed, from the load of the tokens to the last backward pass. The others are the same."""
    text = program.run("--layers=1", "--channels=32", "--heads=2", "--seq-len=16", "--micro-batch-size=1", "--global-batch-tokens=128",
                       "--print-step").stdout
    begin, end = map(int, re.search(r"the same for later micro-batches \(actions (\d+) to (\d+)\)", text).groups())
    loads = [int(number) for number in re.findall(r"^ *(\d+) .* load  ", text, re.MULTILINE)]
    assert len(loads) == 2 and begin - loads[1] == (end + 1 - begin) / 6
    assert re.search(rf"^ *{begin - 1} .* backward +embedding +1 ", text, re.MULTILINE)


@pytest.mark.parametrize("ranks, options, lines", [(2, ["--zero-stage=3"], 80), (2, ["--zero-stage=2"], 55),
                                                   (1, ["--recompute=block", "--recompute-every=4"], 55)])
def test_print_step_folds_layers_that_take_turns(ranks, options, lines):
    """With sharding, layers take two buffers in turn; with an interval of recompute, several layers make a period. A model of 40
    layers needs few lines more than one of 12."""
    model = ["--channels=32", "--heads=2", "--seq-len=16", "--micro-batch-size=1", f"--global-batch-tokens={16 * ranks}", "--print-step"]
    texts = [program.run(*model, f"--layers={layers}", *options, ranks=ranks).stdout for layers in (12, 40)]
    shown = [len(text.splitlines()) for text in texts]
    assert shown[0] <= lines and shown[1] <= shown[0] + 4, shown


def test_the_comment_of_train_gpt_shows_the_list_that_is_printed():
    story = (program.ROOT / "train_gpt.cu").read_text()
    command = re.search(r"`\./train_gpt (.*--print-step)`", story).group(1)
    shown = re.search(r"((?:^// {2,}[#\d].*\n)+)", story, re.MULTILINE).group(1).splitlines()
    printed = program.run(*command.split()).stdout.splitlines()[2:]
    assert len(shown) == len(printed) > 10
    for line, whole in zip(shown, printed):
        line = line.removeprefix("// ")
        assert whole.startswith(line.removesuffix(" ...")) if line.endswith(" ...") else line == whole.rstrip()


def test_help_is_printed_once_by_many_processes():
    assert program.run("--version", ranks=3).stdout.count("train_gpt") == 1


def test_steps_0_does_all_but_train(tmp_path):
    export = tmp_path / "initial.safetensors"
    result = program.run(*QUICK, "--steps=0", f"--out-dir={tmp_path / 'run'}", f"--export={export}", "--sample-tokens=5")
    assert "parameters" in result.stdout
    # The seed's initial weights are not evaluated.
    assert "validation after" not in result.stdout and "sample after" not in result.stdout
    assert program.Run(tmp_path / "run").lines == []
    assert safetensors_numpy.load(export)["wte.weight"].shape == (256, 32)
    result = program.run(*QUICK, "--steps=0", f"--init={export}", f"--out-dir={tmp_path / 'given'}", "--sample-tokens=5")
    assert "validation after step 0" in result.stdout and "sample after step 0" in result.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_look_at_what_would_run_leaves_nothing(ranks, tmp_path):
    def look(*options):
        command = ["--config=c.toml", "--steps=0", *options]
        program_file = str((program.ROOT / program.PROGRAM).resolve())
        result = subprocess.run([program_file, "--processes", str(ranks), *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return result.stdout

    (tmp_path / "c.toml").write_text("layers = 2\nheads = 2\nchannels = 32\nseq-len = 16\nlr = 6e-4\n")
    text = " ".join(look().split())
    assert {path.name for path in tmp_path.iterdir()} == {"c.toml"}
    # 24 sequences a step, from 90% of 2,000,000 bytes.
    assert "schedule 0 steps; the default 1,200 would be 460,800 tokens, 0.26 epochs; learning rate cosine" in text
    assert "results" not in text and "runs/" not in text
    look("--export=x.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"c.toml", "x.safetensors"}
    text = look("--init=x.safetensors", "--sample-tokens=3")
    assert "validation after step 0" in text and "sample after step 0" in text
    assert {path.name for path in tmp_path.iterdir()} == {"c.toml", "x.safetensors"}


def test_what_is_too_short_is_named_and_in_no_epoch(tmp_path):
    """Only one shard has whole sequences: 24 of 16 tokens, enough for one step."""
    for shard, tokens in enumerate([5, 400, 16]):
        program.write_token_file(tmp_path / f"{shard}.bin", range(tokens) if tokens < 256 else [7] * tokens)
    text = " ".join(program.run(*program.SMALL, "--steps=0", f"--train-data={tmp_path}/*.bin").stdout.split())
    assert (f"training 3 token shards {tmp_path}/*.bin, 421 tokens too short 2 of 3 shards, 21 tokens: a sample needs 17 tokens in a "
            "row (--seq-len 16 and one more) validation none") in text
    assert "the default 1,200 would be 460,800 tokens, 1200.00 epochs" in text


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The initial weights of the small model, as an option."""
    export = tmp_path_factory.mktemp("weights") / "initial.safetensors"
    program.run(*program.SMALL, "--steps=0", f"--export={export}")
    return f"--init={export}"


def test_export_and_init_are_inverse(tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    program.train(tmp_path / "a", *QUICK, f"--export={first}")
    program.train(tmp_path / "b", *QUICK, "--steps=0", f"--init={first}", f"--export={second}")
    assert first.read_bytes() == second.read_bytes()
    # The tensors that Hugging Face saves for GPT2LMHeadModel: with a prefix, the masks, and the tied head.
    tensors = safetensors_numpy.load(first)
    theirs = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    theirs["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), dtype=np.float32))
    theirs["lm_head.weight"] = tensors["wte.weight"]
    safetensors_numpy.save(tmp_path / "theirs.safetensors", theirs)
    program.train(tmp_path / "c", *QUICK, "--steps=0", f"--init={tmp_path / 'theirs.safetensors'}", f"--export={second}")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_left_out_with_a_note(prefix, weights, tmp_path):
    first, theirs, second = pathlib.Path(weights.removeprefix("--init=")), tmp_path / "theirs.safetensors", tmp_path / "second.safetensors"
    safetensors_numpy.save(theirs, {f"{prefix}transformer.{name}": tensor for name, tensor in safetensors_numpy.load(first).items()})
    result = program.run(*program.SMALL, "--steps=0", "--sample-tokens=0", f"--init={theirs}", f"--export={second}", f"--out-dir={tmp_path}/run")
    assert first.read_bytes() == second.read_bytes()
    assert f"note: all names in {theirs} begin with {prefix}, a prefix of PyTorch's wrappers, which is left out\n" in result.stdout


def test_a_table_that_a_file_lacks_is_the_tied_head(weights, tmp_path):
    """PyTorch's tools save a shared tensor by one of its names."""
    first, theirs, second = pathlib.Path(weights.removeprefix("--init=")), tmp_path / "theirs.safetensors", tmp_path / "second.safetensors"
    tensors = safetensors_numpy.load(first)
    tensors["lm_head.weight"] = tensors.pop("wte.weight")
    safetensors_numpy.save(theirs, tensors)
    result = program.run(*program.SMALL, "--steps=0", "--sample-tokens=0", f"--init={theirs}", f"--export={second}", f"--out-dir={tmp_path}/run")
    assert first.read_bytes() == second.read_bytes()
    assert f"note: {theirs} has no wte.weight: lm_head.weight, the tied head, takes its place\n" in result.stdout


def test_weights_that_a_checkpoint_replaces_are_noted(weights, tmp_path):
    program.run(*QUICK, f"--out-dir={tmp_path}", "--sample-tokens=0")
    result = program.run(*QUICK, f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume", "--steps=5", weights)
    assert f"note: {weights.replace('=', ' ')} is ignored: the checkpoint has its own weights\n" in result.stdout
    # No note if it comes from the run's own configuration, or if no checkpoint is found.
    begun = program.run(*QUICK, f"--out-dir={tmp_path}/b", "--sample-tokens=0", weights, "--resume-if-any")
    gone_on = program.run(*QUICK, f"--config={tmp_path}/b/config.toml", f"--out-dir={tmp_path}/b", "--resume", "--steps=5")
    assert "is ignored" not in begun.stdout + gone_on.stdout and "resuming from" in gone_on.stdout


def test_text_files(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall, " for i in range(400)))
    run = program.train(tmp_path / "a", *QUICK, f"--train-data={text}")
    assert "val_loss" in run.lines[-1] and "source_entropy" not in run.record
    size = text.stat().st_size
    result = program.run(*QUICK, f"--train-data={text}", f"--out-dir={tmp_path / 'b'}", "--sample-tokens=0")
    assert f"{size * 9 // 10:,}" in result.stdout and f"{size - size * 9 // 10:,}" in result.stdout
    # With separate validation data, all of the text is for training.
    (tmp_path / "val.txt").write_bytes(text.read_bytes())
    result = program.run(*QUICK, f"--train-data={text}", f"--val-data={tmp_path}/val.txt", f"--out-dir={tmp_path / 'c'}",
                         "--sample-tokens=0")
    assert result.stdout.count(f"{size:,}") == 2


def test_token_shards(tmp_path):
    random = np.random.RandomState(0)
    for i, wide in enumerate((False, True)):
        program.write_token_file(tmp_path / f"train_{i}.bin", random.randint(0, 1000, 3000), wide)
    run = program.train(tmp_path / "a", *QUICK, "--vocab-size=1000", f"--train-data={tmp_path}/train_*.bin")
    assert run.column("step") == [1, 2, 3, 4]
    assert "val_loss" not in run.lines[-1]  # shards without --val-data: no validation
    program.write_token_file(tmp_path / "val.bin", random.randint(0, 1000, 500))
    run = program.train(tmp_path / "b", *QUICK, "--vocab-size=1000", f"--train-data={tmp_path}/train_*.bin",
                        f"--val-data={tmp_path}/val.bin")
    assert run.lines[-1]["val_loss"] == pytest.approx(math.log(1000), rel=0.05)
    # Ids are printed if there is no tokenizer.
    result = program.run(*QUICK, "--vocab-size=1000", f"--train-data={tmp_path}/train_*.bin", f"--out-dir={tmp_path}/c",
                         "--sample-tokens=3", "--prompt=17 4")
    assert re.search(r"^17 4 \d+ \d+ \d+$", result.stdout, re.MULTILINE)


def test_a_shard_in_capitals_is_no_text(tmp_path):
    program.write_token_file(tmp_path / "X.BIN", np.random.RandomState(0).randint(0, 256, 3000))
    text = program.run(*program.SMALL, "--steps=0", f"--train-data={tmp_path}/X.BIN").stdout
    assert f"token shard {tmp_path}/X.BIN, 3,000 tokens" in " ".join(text.split())


@pytest.mark.parametrize("vocabulary, noted", [(256, False), (50257, True)])
def test_bytes_are_noted_where_the_vocabulary_has_more(tmp_path, vocabulary, noted):
    """Both the bytes of a text, and those of shards whose manifest says so."""
    tokens = np.tile(np.arange(1, 101), 10)
    others = np.tile(np.arange(157, 257), 10)
    (tmp_path / "text.txt").write_bytes(bytes(tokens.astype(np.uint8)))
    for tokenizer in ("bytes", "gpt2"):
        (tmp_path / tokenizer).mkdir()
        (tmp_path / tokenizer / "manifest.json").write_text(json.dumps({"settings": {"tokenizer": tokenizer}}))
        program.write_token_file(tmp_path / tokenizer / "train.bin", tokens)
    for name, manifest in {"broken": "[", "surrogate": '{"settings": {"tokenizer": "bytes", "source": "caf\\udce9"}}', "none": ""}.items():
        for kind, content in {"bytes": tokens, "gpt2": others}.items():
            folder = tmp_path / name / kind
            folder.mkdir(parents=True)
            program.write_token_file(folder / "train.bin", content)
            if manifest:
                (folder / "manifest.json").write_text(manifest)

    def notes(data, validation=None):
        options = [f"--train-data={tmp_path}/{data}", *([f"--val-data={tmp_path}/{validation}"] if validation else [])]
        out = program.run(*program.SMALL, f"--vocab-size={vocabulary}", *options, "--steps=0", "--sample-tokens=0").stdout
        return [line for line in out.splitlines() if line.startswith("note: ") and "does not say which tokenizer" not in line]

    text = (f"note: {tmp_path}/text.txt has 256 different tokens (bytes), but the vocabulary is 50,257; "
            f"`python data/text.py {tmp_path}/text.txt` converts it to GPT-2's tokens, and --model mini is for bytes")
    assert notes("text.txt") == ([text] if noted else [])
    assert len(notes("bytes/*.bin")) == noted
    assert notes("gpt2/*.bin") == []
    # Without a manifest, the tokens themselves show it.
    looks = " looks like bytes (its first tokens are all below 256), but the vocabulary is "
    for name in ("broken", "surrogate", "none"):
        unreadable = [f"note: {tmp_path}/{name}/{{}}/manifest.json cannot be read as JSON in UTF-8, so the tokenizer of the shards is not known"]
        unreadable *= noted and name != "none"
        *before, last = notes(f"{name}/bytes/*.bin") or [""]
        assert before == [note.format("bytes") for note in unreadable] and (looks in last) == noted
        if vocabulary > 256:
            assert notes(f"{name}/gpt2/*.bin") == [note.format("gpt2") for note in unreadable]
    # The same is true of validation data.
    assert notes("gpt2/*.bin", "text.txt") == ([text] if noted else [])
    assert notes("gpt2/*.bin", "bytes/*.bin") == notes("bytes/*.bin") and notes("gpt2/*.bin", "none/bytes/*.bin") == notes("none/bytes/*.bin")


def test_one_batch_is_repeated(tmp_path):
    program.write_token_file(tmp_path / "one.bin", np.random.RandomState(1).randint(0, 256, 385))
    run = program.train(tmp_path / "run", *QUICK, "--steps=40", "--lr=1e-2", f"--train-data={tmp_path}/one.bin")
    assert run.losses[-1] < 0.7 * run.losses[0]  # memorised: the tokens are random


def test_the_whole_validation_data(weights, tmp_path):
    """0 batches means all of it, on any mesh: one prediction less than it has tokens."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(np.random.RandomState(2).randint(97, 123, 5003).astype(np.uint8)))
    losses = []
    for ranks in (1, 2):
        result = program.run(*program.SMALL, weights, "--steps=0", "--val-batches=0", f"--train-data={text}", f"--val-data={text}",
                             f"--out-dir={tmp_path / str(ranks)}", "--sample-tokens=0", ranks=ranks)
        losses.append(float(re.search(r"loss ([0-9.]+)", result.stdout.split("validation after")[1])[1]))
    assert losses[0] == pytest.approx(losses[1], abs=1.1e-5)  # both printed with 5 decimals


def test_samples(tmp_path):
    def sample(*options):
        text = program.run(*QUICK, f"--out-dir={tmp_path}/run", "--overwrite", "--sample-tokens=40", "--prompt=The", *options).stdout
        return text.split("sample after step 4")[1].split("-" * 72)[0]

    assert sample() == sample()
    assert sample() != sample("--seed=3")
    assert sample("--temperature=0") == sample("--top-k=1")
    text = program.run(*QUICK, f"--out-dir={tmp_path}/run", "--overwrite", "--sample-tokens=10", "--sample-every=2").stdout
    assert text.count("sample after step") == 2


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    result = program.run(*program.SMALL, "--steps=200", "--lr=1e30", "--grad-clip=0", f"--out-dir={tmp_path}",
                         "--checkpoint-every=1", check=False)
    assert result.returncode == 1
    assert re.search(r"^error: step \d+: the loss is", result.stderr), result.stderr


def test_configuration_is_recorded_by_option_names(stories):
    run, _ = stories
    configuration = run.record["configuration"]
    assert configuration["seq-len"] == 16 and configuration["lr-schedule"] == "cosine"
    toml = (run.out_dir / "config.toml").read_text()
    given = {option.removeprefix("--").split("=")[0] for option in QUICK} | {"out-dir", "val-every", "sample-tokens", "prompt"}
    for name, value in configuration.items():
        # A value that was not given stands in a comment.
        assert (f"\n{name} = " in toml) == (name in given), name
        assert (f"\n# {name} = " in toml) == (value is not None and name not in given), name
    assert json.dumps(configuration)


def test_the_unigram_loss_is_counted(tmp_path):
    """A model that counts the bytes of the first 90%, with one added to each count. Its loss is that on the last 10%."""
    text = bytes(np.random.RandomState(3).choice([97, 98, 99, 200], 4000, p=[0.5, 0.3, 0.15, 0.05]).astype(np.uint8))
    (tmp_path / "text.txt").write_bytes(text)
    run = program.train(tmp_path / "run", *QUICK, f"--train-data={tmp_path}/text.txt")
    split = len(text) * 9 // 10
    counts = np.bincount(np.frombuffer(text[:split], np.uint8), minlength=256) + 1.0
    expected = -np.log(counts[np.frombuffer(text[split:], np.uint8)] / counts.sum()).mean()
    assert run.record["unigram_loss"] == pytest.approx(expected, rel=1e-9)


def test_val_batches_are_global_batches(weights, tmp_path):
    """The option counts global batches of windows: one batch with three times the tokens equals three batches."""
    def val_loss(name, batches, tokens):
        result = program.run(*program.SMALL, weights, "--steps=0", f"--val-batches={batches}", f"--global-batch-tokens={tokens}",
                             f"--out-dir={tmp_path}/{name}", "--sample-tokens=0")
        return re.search(r"validation after step 0: loss ([0-9.]+)", result.stdout)[1]

    assert val_loss("a", 3, 384) == val_loss("b", 1, 3 * 384) != val_loss("c", 1, 384)


def test_phases_are_where_the_time_goes(tmp_path):
    run = program.train(tmp_path, *QUICK, ranks=2)
    for line in run.lines:
        phases = line["phase_ms"]
        assert set(phases) == {"data", "forward", "backward", "communication", "norm", "update"}
        assert all(phases[name] > 0 for name in ("data", "forward", "backward", "norm")), phases
        assert phases["update"] > 0 or line is run.lines[0], "only in the first step no update is pending"
        # The time between the actions is short, but a busy machine may lose any time there.
        assert sum(phases.values()) <= line["step_ms"] * 1.001 + 0.01


def test_a_checkpoint_appears_whole(tmp_path):
    """While checkpoints are saved, the directory shows only whole ones."""
    process = subprocess.Popen([program.PROGRAM, *program.SMALL, "--steps=60", "--checkpoint-every=1", "--sample-tokens=0",
                                f"--out-dir={tmp_path}/run"], cwd=program.ROOT, stdout=subprocess.DEVNULL)
    seen, files = set(), {"weights-00000-1.safetensors", "state-00000-1.safetensors", "checksums-00000.json", "manifest.json"}
    while process.poll() is None:
        for folder in (tmp_path / "run").glob("checkpoint-*"):
            if folder.name.endswith(".partial") or folder.name in seen:
                continue
            assert {path.name for path in folder.iterdir()} == files, folder
            seen.add(folder.name)
    assert process.returncode == 0 and len(seen) > 30


def test_a_model_named_on_the_command_line_has_its_own_sizes(tmp_path):
    program.train(tmp_path / "a", *QUICK)
    text = program.run(f"--config={tmp_path}/a/config.toml", "--model=mini", "--global-batch-tokens=256",
                       "--print-step", "--verbose").stdout
    assert "block 5" in text  # the last of mini's 6 layers
