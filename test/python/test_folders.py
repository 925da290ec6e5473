"""Folders in Hugging Face's format: --init DIR, --model DIR and --export DIR, and what is refused."""

import json
import re
import shutil

import numpy
import pytest
import torch

import model_bounds
import model_folders
import program
import reference_llama
import reference_model
import safetensors_file
import safetensors_numpy

TRAIN = ["--seq-len=16", "--global-batch-tokens=64", "--sample-tokens=0", "--val-every=0"]
random = numpy.random.default_rng(7)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A token shard for a vocabulary of 150."""
    file = tmp_path_factory.mktemp("tokens") / "train_0.bin"
    program.write_token_file(file, random.integers(0, 150, 2000))
    return file


def exported(folder):
    return safetensors_numpy.load(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", model_folders.CONFIGS)
def test_a_folder_that_is_only_exported_stays_the_same(kind, tmp_path):
    config = {**model_folders.CONFIGS[kind], "my_key": [1, 2]}
    weights = model_folders.weights_of(config)
    names = [f"model.{layer}rotary_emb.inv_freq" for layer in ("", "layers.0.self_attn.")] if kind == "llama" else []
    passed_over = {name: numpy.ones(12, numpy.float32) for name in names}
    model_folders.write(tmp_path / "a", config, {**weights, **passed_over})
    (tmp_path / "a/tokenizer.json").write_text("{}")
    result = program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}", f"--out-dir={tmp_path / 'run'}")
    assert "my_key is kept, but not used" in result.stdout
    got, got_config = exported(tmp_path / "b")
    assert got_config == config
    assert {name.removeprefix("transformer."): array.shape for name, array in got.items()} == \
        {name: array.shape for name, array in weights.items()}
    assert all((got[name] == array).all() for name, array in weights.items())
    assert (tmp_path / "b/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_a_folder_gives_the_same_folder_on_any_mesh(kind, tmp_path, tokens):
    weights = model_folders.write(tmp_path / "a", model_folders.CONFIGS[kind], shards=3)
    common = [f"--init={tmp_path / 'a'}", "--steps=20", f"--train-data={tokens}", *TRAIN]
    one = program.train(tmp_path / "one", *common, f"--export={tmp_path / 'b'}")
    two = program.train(tmp_path / "two", *common, f"--export={tmp_path / 'c'}", "--zero-stage=3", ranks=2)
    assert two.losses == pytest.approx(one.losses, rel=1e-6)  # sums over ranks have another order
    assert one.record["configuration"]["lr"] == 3e-5
    (b, config), (c, _) = exported(tmp_path / "b"), exported(tmp_path / "c")
    assert config == model_folders.CONFIGS[kind]
    # AdamW's steps are at most the rate, and differ where a gradient is close to zero.
    assert all(numpy.abs(b[name] - c[name]).max() <= 20 * 2 * 3e-5 for name in b)
    assert b.keys() == weights.keys() and any((b[name] != weights[name]).any() for name in b)
    # The rows of GPT-2's table of positions that the context does not reach decay, and change in no other way.
    if kind == "gpt2":
        assert b["wpe.weight"].shape == (64, 64)


def test_a_run_needs_no_folder_to_go_on(tmp_path, tokens):
    model_folders.write(tmp_path / "a", model_folders.QWEN3)
    shutil.copytree(tmp_path / "a", tmp_path / "kept")
    common = [f"--train-data={tokens}", *TRAIN]
    whole = program.train(tmp_path / "whole", f"--init={tmp_path / 'a'}", "--steps=6", "--lr-schedule=constant", *common)
    program.train(tmp_path / "x", f"--init={tmp_path / 'a'}", "--steps=3", "--lr-schedule=constant", *common)
    shutil.rmtree(tmp_path / "a")
    text = program.run("--generate", f"--resume={tmp_path / 'x'}", "--sample-tokens=3", "--temperature=0").stdout
    assert len(text.split()) == 3
    result = program.run(f"--resume={tmp_path / 'x'}", f"--config={tmp_path / 'x/config.toml'}", "--steps=6",
                         f"--export={tmp_path / 'b'}", "--sample-tokens=0")
    assert "is gone, so" in result.stdout
    assert program.Run(tmp_path / "x").losses == whole.losses
    assert exported(tmp_path / "b")[1] == model_folders.QWEN3


def test_a_folder_as_model_begins_at_random(tmp_path, tokens):
    model_folders.write(tmp_path / "a", model_folders.LLAMA)
    run = program.train(tmp_path / "x", f"--model={tmp_path / 'a'}", "--steps=1", f"--train-data={tokens}", *TRAIN,
                        f"--export={tmp_path / 'b'}", "--export-dtype=bf16")
    assert abs(run.losses[0] - numpy.log(150)) < 0.3
    assert run.record["configuration"]["lr"] == 3e-4
    weights, config = exported(tmp_path / "b")
    assert config == {**model_folders.LLAMA, "torch_dtype": "bfloat16"}
    again = program.train(tmp_path / "y", f"--config={tmp_path / 'x/config.toml'}", f"--out-dir={tmp_path / 'y'}",
                          f"--export={tmp_path / 'c'}")
    assert again.losses == run.losses


def test_dtypes_round_to_nearest(tmp_path):
    config = {**model_folders.LLAMA, "torch_dtype": "float16"}
    weights = model_folders.weights_of(config)
    special = numpy.array([65504, -65519.9, 2**-14, 2**-24, 1.4 * 2**-24, 2**-25, 6.1e-5, 1 + 2**-11, 1 + 3 * 2**-11, -0.0], numpy.float32)
    weights["model.norm.weight"][:special.size] = special
    model_folders.write(tmp_path / "a", config, weights)
    program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}", f"--out-dir={tmp_path / 'run'}")
    got, _ = exported(tmp_path / "b")
    for name, array in weights.items():
        assert got[name].dtype == numpy.float16
        assert (got[name].view("u2") == array.astype(numpy.float16).view("u2")).all(), name
    program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'one.safetensors'}", "--export-dtype=fp16")
    one = safetensors_numpy.load(tmp_path / "one.safetensors")
    assert all((one[name].view("u2") == got[name].view("u2")).all() for name in weights)
    weights["model.norm.weight"][0] = 65520
    model_folders.write(tmp_path / "c", config, weights)
    result = program.run(f"--init={tmp_path / 'c'}", "--steps=0", f"--export={tmp_path / 'd'}", check=False)
    assert result.returncode == 1 and "fp16 ends at 65504; give --export-dtype bf16" in result.stderr
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob(".*"))


SLIDING = {"use_sliding_window": True, "max_window_layers": 1}
# Folders of other writers: the keys that are changed, and an option.
CHANGES = {
    "fewer layers": ({**model_folders.QWEN3, "layer_types": ["full_attention"] * 2}, ["--layers=1"],
                     {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "layers without a window": ({**model_folders.QWEN2, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}, ["--layers=3"],
                                {"num_hidden_layers": 3, "max_window_layers": 3}),
    "window that is off": ({**model_folders.QWEN2, "use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8}, [], {}),
    "window that is off, more layers": ({**model_folders.QWEN2, "use_sliding_window": False, "max_window_layers": 1, "sliding_window": 8},
                                        ["--layers=3"], {"num_hidden_layers": 3}),
    "window as long as the context": ({**model_folders.QWEN2, **SLIDING, "sliding_window": 128}, [], {}),
    "window as long as a shorter context": ({**model_folders.QWEN2, **SLIDING, "sliding_window": 8}, ["--seq-len=8"], {}),
    "null window": ({**model_folders.QWEN2, **SLIDING, "sliding_window": None}, [], {}),
    "full layers beside a window": ({**model_folders.QWEN3, **SLIDING, "sliding_window": 8, "layer_types": ["full_attention"] * 2}, [], {}),
    "layers of two types": ({**model_folders.QWEN3, **SLIDING, "sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]}, [], {}),
    "more layers of two types": ({**model_folders.QWEN3, **SLIDING, "sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"]},
                                 ["--layers=3"], {"num_hidden_layers": 3, "layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    "long window": ({**model_folders.MISTRAL, "sliding_window": 128, "layer_types": ["sliding_attention"] * 2}, [], {}),
    "biases that are named": ({**model_folders.QWEN2, "attention_bias": True}, [], {}),
    "other window": ({**model_folders.MISTRAL, "layer_types": ["sliding_attention"] * 2}, ["--window=0"],
                     {"layer_types": ["full_attention"] * 2}),
    "no window in any layer": ({**model_folders.MISTRAL, "layer_types": ["full_attention"] * 2}, [], {}),
    "explicit width": ({**model_folders.GPT2, "n_inner": 256}, ["--channels=32"], {"n_embd": 32, "n_inner": 128}),
    "explicit heads": ({**model_folders.NANOCHAT, "head_dim": 16}, ["--heads=2"], {"num_attention_heads": 2, "head_dim": 32}),
    "no cap": ({**model_folders.NANOCHAT, "final_logit_softcapping": None}, [], {}),
    "no cap any more": (model_folders.NANOCHAT, ["--logit-cap=0"], {"final_logit_softcapping": None}),
    "theta of version 5": ({**model_folders.LLAMA, "rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 333.0}}, ["--rope-theta=333"], {}),
    "theta of a scaling": ({**model_folders.LLAMA, "rope_scaling": {"type": "default", "rope_theta": 333.0}}, ["--rope-theta=333"], {}),
    "keys that are not given": ({key: value for key, value in model_folders.QWEN2.items() if key not in ("rope_theta", "rope_scaling", "rms_norm_eps")},
                                ["--rope-theta=10000", "--norm-eps=1e-6"], {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_what_an_option_changes_is_written(what, tmp_path):
    config, options, changes = CHANGES[what]
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    program.run(f"--model={tmp_path}", "--steps=0", f"--export={tmp_path / 'b'}", *options)
    assert exported(tmp_path / "b")[1] == {**config, **changes}


LLAMA = model_folders.LLAMA
REFUSED_CONFIGS = {
    "rope type": ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling has the rope_type 'yarn'"),
    "act": ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is \"gelu\", but this program computes only"),
    "bias": ({**LLAMA, "attention_bias": True}, "attention_bias is true"),
    "quantized": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config is given"),
    "code": ({**LLAMA, "auto_map": {"AutoModel": "x.y"}}, "auto_map is given"),
    "mixed layers": ({**model_folders.QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
                     'layer_types has "full_attention" and "sliding_attention"'),
    "other layers": ({**model_folders.QWEN3, "layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
    "nested rope": ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 99.0}}}, "rope_parameters has parameters for full_attention alone"),
    "cap of 0": ({**model_folders.NANOCHAT, "final_logit_softcapping": 0.0}, "final_logit_softcapping is 0; give null"),
    "window": ({**model_folders.QWEN2, **SLIDING, "sliding_window": 127},
               "use_sliding_window gives layers of this model a window of 127, which is not computed; give a --seq-len of at most 127"),
    "window of some layers": ({**model_folders.QWEN3, **SLIDING, "sliding_window": 127, "layer_types": ["full_attention", "sliding_attention"]},
                              'layer_types has "full_attention" and "sliding_attention"'),
    "biases": ({**model_folders.QWEN3, "attention_bias": True}, "attention_bias is true"),
    "heads": ({**model_folders.QWEN2, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
              "config.json: --heads 3 does not divide --channels 64; get the folder again"),
    "key heads": ({**LLAMA, "num_key_value_heads": 3}, "config.json: --kv-heads 3 does not divide --heads 4; get the folder again"),
    "partial rope": ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "scaled attention": ({**model_folders.GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    "type": ({**LLAMA, "model_type": "mamba"}, 'the model_type is "mamba", but this program knows only gpt2'),
    "no size": ({key: LLAMA[key] for key in LLAMA if key != "hidden_size"}, "hidden_size is missing"),
    "negative": ({**LLAMA, "hidden_size": -64}, "hidden_size is -64, but must be a whole number of 1 or more"),
    "not a number": ({**LLAMA, "num_attention_heads": "four"}, "num_attention_heads is \"four\""),
}


@pytest.mark.parametrize("what", REFUSED_CONFIGS)
def test_a_config_that_is_not_computed_is_refused(what, tmp_path):
    config, message = REFUSED_CONFIGS[what]
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    result = program.run(f"--model={tmp_path}", "--steps=0", check=False)
    assert result.returncode == 1 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr


def changed(weights, config):
    """Folders with a fault: their names, and what the error says."""
    name = "model.layers.1.mlp.up_proj.weight"
    yield "missing", {key: weights[key] for key in weights if key != name}, f'there is no tensor "{name}"'
    yield "extra", {**weights, "model.layers.2.mlp.up_proj.weight": weights[name]}, "is not a tensor of this model"
    yield "misshapen", {**weights, name: weights[name].T.copy()}, f"{name} has the shape"
    yield "infinite", {**weights, name: numpy.full_like(weights[name], numpy.inf)}, f"{name} is not finite"
    yield "fewer layers", {key: weights[key] for key in weights if ".layers.1." not in key}, \
        "; leave out options that change what its config.json says, or get the folder again"
    yield "no head", {key: weights[key] for key in weights if key != "lm_head.weight"}, 'there is no tensor "lm_head.weight"'


@pytest.mark.parametrize("fault", ["missing", "extra", "fewer layers", "misshapen", "infinite", "no head"])
def test_weights_that_do_not_fit_are_refused(fault, tmp_path):
    for name, weights, message in changed(model_folders.weights_of(LLAMA), LLAMA):
        if name != fault:
            continue
        model_folders.write(tmp_path, LLAMA, weights)
        result = program.run(f"--init={tmp_path}", "--steps=0", f"--export={tmp_path / 'b'}", check=False)
        assert result.returncode == 1 and message in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_advice_suits_a_folder(tmp_path, tokens):
    """A folder is not told to give options that its family lacks, or sizes that its weights do not have."""
    weights = model_folders.weights_of(model_folders.NANOCHAT)
    model_folders.write(tmp_path / "a", model_folders.NANOCHAT, {key: weights[key] for key in weights if key != "lm_head.weight"})
    result = program.run(f"--init={tmp_path / 'a'}", "--steps=0", check=False)
    assert 'there is no tensor "lm_head.weight"; leave out options' in result.stderr
    model_folders.write(tmp_path / "b", {**LLAMA, "intermediate_size": 80}, model_folders.weights_of(LLAMA))
    result = program.run(f"--init={tmp_path / 'b'}", "--steps=0", check=False)
    assert "but this model needs (80, 64); leave out options that change what its config.json says" in result.stderr
    (tmp_path / "large").mkdir()
    (tmp_path / "large/config.json").write_text(json.dumps({**LLAMA, "hidden_size": 2**40}))
    for options, advice in (([], "too large a model"), ([f"--channels={2**41}"], f"--channels {2**41}")):
        result = program.run(f"--model={tmp_path / 'large'}", "--steps=1", f"--train-data={tokens}", *TRAIN, *options, check=False)
        assert result.stderr.startswith(f"error: {advice}: ") and result.stderr.endswith(f"; give a smaller {'--channels' if options else '--model'}\n")
    # An option may mend it.
    model_folders.write(tmp_path / "c", {**LLAMA, "num_key_value_heads": 3}, model_folders.weights_of(LLAMA))
    program.run(f"--init={tmp_path / 'c'}", "--kv-heads=2", "--steps=0", f"--export={tmp_path / 'd'}")


def test_a_folder_validates_without_training_data(tmp_path, tokens):
    model_folders.write(tmp_path / "a", LLAMA)
    common = [f"--init={tmp_path / 'a'}", "--steps=0", f"--val-data={tokens}", *TRAIN]
    alone, beside = (program.run(*common, *more).stdout for more in ([], [f"--train-data={tokens}"]))
    pattern = r"validation after step 0: loss ([0-9.]+)"
    assert re.search(pattern, alone)[1] == re.search(pattern, beside)[1]
    assert "baseline" in beside and "baseline" not in alone  # of tokens that are counted in training data
    (tmp_path / "text.txt").write_text("a text")
    result = program.run(*common, f"--val-data={tmp_path / 'text.txt'}", check=False)
    assert "--val-data: the model of" in result.stderr and "make token shards of it with" in result.stderr


def test_an_exported_model_of_bytes_reads_texts(tmp_path):
    """A folder with a vocabulary of 256 and without a tokenizer."""
    program.run("--model=llama-tiny", "--steps=0", f"--export={tmp_path / 'a'}")
    (tmp_path / "text.txt").write_text("abcdefgh" * 200)
    common = [f"--train-data={tmp_path / 'text.txt'}", "--steps=1", *TRAIN]
    first = program.train(tmp_path / "x", f"--init={tmp_path / 'a'}", *common)
    shutil.copy(tmp_path / "a/model.safetensors", tmp_path / "one.safetensors")
    again = program.train(tmp_path / "y", "--model=llama-tiny", f"--init={tmp_path / 'one.safetensors'}", *common)
    assert first.losses == again.losses
    (tmp_path / "a/generation_config.json").write_text("{}")
    program.run(f"--model={tmp_path / 'a'}", *common, f"--out-dir={tmp_path / 'z'}")
    (tmp_path / "a/tokenizer.json").write_text("{}")
    result = program.run(f"--init={tmp_path / 'a'}", *common, f"--out-dir={tmp_path / 'w'}", check=False)
    assert "has its own tokenizer" in result.stderr


def test_an_index_names_files_of_its_folder_only(tmp_path):
    model_folders.write(tmp_path / "a", LLAMA, shards=2)
    index = tmp_path / "a/model.safetensors.index.json"
    good = index.read_text()
    for name in ("../a/model-00001-of-00002.safetensors", "/etc/passwd", "", ".."):
        index.write_text(good.replace("model-00001-of-00002.safetensors", name))
        result = program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}", check=False)
        assert result.returncode == 1 and "is not the name of a file in this folder" in result.stderr
    # A link may lead anywhere.
    index.write_text(good)
    shutil.move(tmp_path / "a/model-00001-of-00002.safetensors", tmp_path / "blob")
    (tmp_path / "a/model-00001-of-00002.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "a/consolidated.safetensors").write_bytes(b"another format")
    program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}")


def test_other_folders_are_named(tmp_path, tokens):
    result = program.run(f"--init={tmp_path}", "--steps=0", check=False)
    assert all(name in result.stderr for name in ("manifest.json", "run.json", "config.json"))
    tmp_path.joinpath("config.json").write_text(json.dumps(LLAMA))
    tmp_path.joinpath("pytorch_model.bin").write_bytes(b"PK")
    result = program.run(f"--init={tmp_path}", "--steps=0", f"--export={tmp_path / 'b'}", check=False)
    assert "files of torch.save only" in result.stderr
    result = program.run(f"--model={tmp_path}", "--steps=1", check=False)
    assert "has its own tokenizer" in result.stderr and "token shards" in result.stderr
    result = program.run("--model=qwen3-tiny", "--window=9", "--steps=1", f"--export={tmp_path / 'b'}", check=False)
    assert "Qwen3ForCausalLM cannot compute this model with --window 9" in result.stderr
    # What Hugging Face's library cannot compute is refused before the run.
    result = program.run(f"--model={tmp_path}", "--window=4", "--steps=1", f"--train-data={tokens}", f"--export={tmp_path / 'b'}", *TRAIN, check=False)
    assert "LlamaForCausalLM cannot compute this model with --window 4" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    result = program.run("--model=llama-tiny", "--steps=1", f"--export={tmp_path / 'full'}", check=False)
    assert "is not empty; give a new folder" in result.stderr


def test_one_file_of_weights_wins_over_an_index(tmp_path):
    """As in Hugging Face's library: the index may be that of an earlier save, and its shards may be gone."""
    model_folders.write(tmp_path / "a", LLAMA, model_folders.weights_of(LLAMA, seed=2), shards=3)
    weights = model_folders.write(tmp_path / "a", LLAMA)
    for exported_to in ("b", "c"):
        result = program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / exported_to}")
        assert "has model.safetensors, so its model.safetensors.index.json and the files that it names are not read" in \
            " ".join(result.stdout.split())
        assert all((array == weights[name]).all() for name, array in exported(tmp_path / exported_to)[0].items())
        for shard in (tmp_path / "a").glob("model-*.safetensors"):
            shard.unlink()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
# What config.json says, and the scaling that it means. The longest context is 64.
SCALINGS = {
    "of Llama 3.1": ({"rope_scaling": {**LLAMA3, ORIGINAL: 32}}, "8,1,4,32"),
    "other factors": ({"rope_scaling": {**LLAMA3, ORIGINAL: 64, "low_freq_factor": 2.0, "high_freq_factor": 8.0}}, "8,2,8,64"),
    "no original context": ({"rope_scaling": LLAMA3}, "8,1,4,64"),
    "no original context, version 5": ({"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, "8,1,4,64"),
    "null": ({"rope_scaling": {**LLAMA3, ORIGINAL: None}}, "8,1,4,64"),
    "original context beside": ({"rope_scaling": LLAMA3, ORIGINAL: 16}, "8,1,4,16"),
    "original context beside another": ({"rope_scaling": {**LLAMA3, ORIGINAL: 64}, ORIGINAL: 16}, "8,1,4,16"),
    "version 5, beside": ({"rope_parameters": {**LLAMA3, "rope_theta": 500000.0, ORIGINAL: 64}, ORIGINAL: 16}, "8,1,4,16"),
}


def validation_loss(folder, tokens, context, *options):
    result = program.run(f"--init={folder}", f"--train-data={tokens}", f"--val-data={tokens}", "--val-batches=0", "--steps=0",
                         f"--seq-len={context}", f"--global-batch-tokens={context}", "--sample-tokens=0", *options)
    return float(re.search(r"validation after step 0: loss ([0-9.]+)", result.stdout)[1])


def fp64_loss(config, weights, scaling, tokens, context):
    model = reference_llama.Llama(
        layers=config["num_hidden_layers"], heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"], channels=config["hidden_size"], mlp_size=config["intermediate_size"], seq_len=context,
        vocab_size=config["vocab_size"], rope_theta=config["rope_theta"], norm_eps=config["rms_norm_eps"], rope_scaling=scaling)
    weights = {name: torch.from_numpy(array).double() for name, array in weights.items()}
    windows = torch.from_numpy(tokens).unfold(0, context + 1, context)
    return reference_model.loss(weights, model, windows).item()


@pytest.mark.parametrize("what", SCALINGS)
def test_scaled_rotary_positions(what, tmp_path):
    """The loss of a folder against PyTorch in fp64, and that of its export, whose context is longer."""
    changes, scaling = SCALINGS[what]
    config = {**LLAMA, "max_position_embeddings": 64, **changes}
    # Weights that are large enough to tell positions apart.
    weights = {name: array if "norm" in name else 3.5 * array for name, array in model_folders.weights_of(config).items()}
    model_folders.write(tmp_path / "a", config, weights)
    context = 96
    tokens = random.integers(0, 150, 4 * context + 1)
    file = tmp_path / "tokens.bin"
    program.write_token_file(file, tokens)
    loss = validation_loss(tmp_path / "a", file, context, f"--export={tmp_path / 'b'}")
    assert abs(loss - fp64_loss(config, weights, scaling, tokens, context)) <= model_bounds.LOSS_FP32 + 0.5e-5  # 5 digits
    assert validation_loss(tmp_path / "b", file, context) == loss
    # The dictionary has the original context, unless it stands beside it.
    key = next(iter(changes))
    given = changes[key] if ORIGINAL in changes else {**changes[key], ORIGINAL: int(scaling.split(",")[3])}
    assert exported(tmp_path / "b")[1] == {**config, "max_position_embeddings": context, key: given}


def test_another_scaling_replaces_the_original_context_beside_it(tmp_path):
    config = {**LLAMA, "rope_scaling": {**LLAMA3, ORIGINAL: 64}, ORIGINAL: 16}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    program.run(f"--model={tmp_path}", "--steps=0", f"--export={tmp_path / 'b'}", "--rope-scaling=4,1,4,32")
    assert exported(tmp_path / "b")[1] == {**config, "rope_scaling": {**LLAMA3, "factor": 4.0, ORIGINAL: 32}, ORIGINAL: 32}


def test_an_empty_prompt_is_the_begin_of_text(tmp_path, tokens):
    def text(*options):
        return program.run("--generate", *options, "--sample-tokens=4", "--temperature=0").stdout.split()

    weights = model_folders.weights_of(LLAMA)
    for name, begin in (("a", 7), ("none", None), ("outside", 150)):
        model_folders.write(tmp_path / name, {**LLAMA, "bos_token_id": begin}, weights)
    expected = text(f"--init={tmp_path / 'a'}", "--prompt=7")[1:]
    first_token = text(f"--init={tmp_path / 'a'}", "--prompt=0")[1:]
    assert len(expected) == 4 and first_token != expected
    assert text(f"--init={tmp_path / 'a'}") == expected
    assert text(f"--init={tmp_path / 'none'}") == text(f"--init={tmp_path / 'outside'}") == first_token
    # A checkpoint knows it without the folder.
    program.train(tmp_path / "x", f"--init={tmp_path / 'a'}", "--steps=1", "--lr=0", f"--train-data={tokens}", *TRAIN)
    shutil.rmtree(tmp_path / "a")
    assert text(f"--resume={tmp_path / 'x'}") == expected


def test_all_files_of_a_tokenizer_are_copied(tmp_path):
    model_folders.write(tmp_path / "a", model_folders.MISTRAL)
    (tmp_path / "blobs").mkdir()
    names = ["tekken.json", "tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    for i, name in enumerate(names):
        (tmp_path / f"blobs/{i}").write_text(name)
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).symlink_to(tmp_path / f"blobs/{i}")  # as in the cache of Hugging Face's library
    (tmp_path / "a/README.md").write_text("another file")
    program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}")
    shutil.rmtree(tmp_path / "blobs")
    assert all((tmp_path / "b" / name).read_text() == name for name in names)
    assert not (tmp_path / "b/README.md").exists()


def dtypes_in(folder):
    return {dtype for file in folder.glob("*.safetensors") for dtype, _, _ in safetensors_file.load(file).values()}


# Arrays of a folder without torch_dtype, and the dtype of what it is exported as.
def in_bf16(weights):
    return {name: (array.view("u4") & 0xffff0000).view("f4") for name, array in weights.items()}


WEIGHT_DTYPES = {
    "bf16": (in_bf16, safetensors_numpy.save_bf16, "BF16", "bfloat16"),
    "fp16": (lambda weights: {name: array.astype("f2") for name, array in weights.items()}, safetensors_numpy.save, "F16", "float16"),
    "fp32": (lambda weights: weights, safetensors_numpy.save, "F32", "float32"),
    # The dtype that holds all of them.
    "several": (lambda weights: {name: array if "norm" in name else array.astype("f2") for name, array in weights.items()},
                safetensors_numpy.save, "F32", "float32"),
}


@pytest.mark.parametrize("kind", WEIGHT_DTYPES)
def test_without_a_dtype_that_of_the_weights_counts(kind, tmp_path, tokens):
    convert, save, dtype, name_in_config = WEIGHT_DTYPES[kind]
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    weights = convert(model_folders.weights_of(config))
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    # Not the model's: its dtype does not count.
    safetensors_numpy.save(tmp_path / "a/model-00003-of-00003.safetensors", {"model.rotary_emb.inv_freq": numpy.ones(12, "f4")})
    names = sorted(weights)
    for i in (0, 1):
        save(tmp_path / f"a/model-0000{i + 1}-of-00003.safetensors", {name: weights[name] for name in names[i::2]})
    files = {name: f"model-0000{i % 2 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    (tmp_path / "a/model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": {**files, "model.rotary_emb.inv_freq": "model-00003-of-00003.safetensors"}}))
    program.train(tmp_path / "x", f"--init={tmp_path / 'a'}", "--steps=1", "--lr=0", f"--train-data={tokens}", *TRAIN,
                  f"--export={tmp_path / 'b'}")
    shutil.rmtree(tmp_path / "a")
    program.run(f"--resume={tmp_path / 'x'}", "--steps=0", f"--export={tmp_path / 'c'}", f"--train-data={tokens}",
                "--sample-tokens=0")
    for folder in (tmp_path / "b", tmp_path / "c"):
        got, got_config = exported(folder)
        assert dtypes_in(folder) == {dtype}
        assert got_config == {**config, "torch_dtype": name_in_config}
        assert all((got[name] == array).all() for name, array in weights.items())


@pytest.mark.parametrize("given, exported_dtypes", [
    ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, {"torch_dtype": "float32", "dtype": "float32"}),
    ({"dtype": "bfloat16"}, {"dtype": "float32"}),
    ({"torch_dtype": None, "dtype": "bfloat16"}, {"torch_dtype": None, "dtype": "float32"}),
    ({"torch_dtype": None}, {"torch_dtype": "float32"}),
], ids=str)
def test_both_keys_of_the_dtype_are_changed(given, exported_dtypes, tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    tmp_path.joinpath("config.json").write_text(json.dumps({**config, **given}))
    program.run(f"--model={tmp_path}", "--steps=0", f"--export={tmp_path / 'b'}", "--export-dtype=fp32")
    assert exported(tmp_path / "b")[1] == {**config, **exported_dtypes} and dtypes_in(tmp_path / "b") == {"F32"}


@pytest.mark.parametrize("model, kind", [("llama-tiny", "llama"), ("qwen3-tiny", "qwen3"), ("nanochat-tiny", "nanochat"), ("tiny", "gpt2")])
def test_a_model_of_ours_is_a_folder_that_comes_back(model, kind, tmp_path):
    program.run(f"--model={model}", "--steps=0", f"--export={tmp_path / 'a'}")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config["model_type"] == kind and config["torch_dtype"] == "float32"
    assert {name: list(shape) for name, shape in model_folders.shapes_of(config).items()} == \
        {name: list(array.shape) for name, array in exported(tmp_path / "a")[0].items()}
    program.run(f"--init={tmp_path / 'a'}", "--steps=0", f"--export={tmp_path / 'b'}")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "b/config.json").read_text()


def test_a_distributed_checkpoint_of_pytorch(tmp_path):
    """Weights in boxes, beside an optimizer's state that is passed over; with a config.json, and without."""
    folder = tmp_path / "a"
    program.run(*program.SMALL, "--steps=0", f"--export={folder}", "--sample-tokens=0")
    whole, _ = exported(folder)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for rank in (0, 1):
        parts = {name: numpy.array_split(tensor, 2, axis=tensor.ndim - 1)[rank] for name, tensor in whole.items()}
        parts[f"optim.state.step.{rank}"] = numpy.zeros(1, numpy.float32)
        places = {name: {"saved_offsets": [0] * (part.ndim - 1) + [whole[name].shape[-1] // 2 * rank if name in whole else 0]}
                  for name, part in parts.items()}
        safetensors_numpy.save(sharded / f"shard-{rank:05}-model-00001-of-00001.safetensors", parts,
                               {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)})
    run = program.run(*program.SMALL, "--steps=0", f"--init={sharded}", f"--export={tmp_path}/b.safetensors", "--sample-tokens=0", ranks=2)
    assert run.returncode == 0
    again = safetensors_numpy.load(tmp_path / "b.safetensors")
    assert again.keys() == {name.removeprefix("transformer.") for name in whole}
    assert all(numpy.array_equal(again[name.removeprefix("transformer.")], tensor) for name, tensor in whole.items())
    shutil.copy(folder / "config.json", sharded)
    program.run("--steps=0", f"--init={sharded}", f"--export={tmp_path}/c.safetensors", "--sample-tokens=0")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    (sharded / "shard-00001-model-00001-of-00001.safetensors").unlink()
    refused = program.run("--steps=0", f"--init={sharded}", check=False)
    assert "has the shape" in refused.stderr and refused.stderr.count("\n") == 1
