"""Cases of test_wrong_input.py: files of weights, checkpoints, and places where results cannot be written."""

import gzip
import io
import json
import os
import pickle
import shutil

import numpy as np
import safetensors_numpy
from refused import Case, run
from wrong_options import ANY_TEXT, TEXT, all_of, file, shard

# ---- safetensors files


def raw(header, data=b"", length=None):
    """Writes x.safetensors with any header (a text or an object) and a possibly false length."""
    def write(folder):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(text) if length is None else length
        (folder / "x.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return write


def weights(change=None, dtype=np.float32, vocabulary=256):
    """Writes x.safetensors with the tensors of the small model, changed in place by `change`."""
    def write(folder):
        C, T = 32, 16
        random = np.random.RandomState(0)
        tensors = {"wte.weight": (vocabulary, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
        for layer in range(2):
            for name, shape in {"ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C),
                                "attn.c_attn.bias": (3 * C,), "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,),
                                "ln_2.weight": (C,), "ln_2.bias": (C,), "mlp.c_fc.weight": (C, 4 * C),
                                "mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (4 * C, C),
                                "mlp.c_proj.bias": (C,)}.items():
                tensors[f"h.{layer}.{name}"] = shape
        tensors = {name: (random.standard_normal(shape) * 0.02).astype(dtype) for name, shape in tensors.items()}
        if change:
            change(tensors)
        safetensors_numpy.save(folder / "x.safetensors", tensors)
    return write


def replaced(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def without_biases(tensors):
    for name in [name for name in tensors if name.endswith(".bias")]:
        del tensors[name]


def alone(bias):
    """Removes all biases but this one."""
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(".bias") and name != bias]


def renamed(change):
    """Gives every tensor the name change(name)."""
    def rename(tensors):
        old = dict(tensors)
        tensors.clear()
        tensors.update({change(name): tensor for name, tensor in old.items()})
    return rename


def without_tensor(name):
    return lambda tensors: tensors.pop(name)


def table_as_head(tensors):
    tensors["lm_head.weight"] = tensors.pop("wte.weight")


def holding(name, index, value):
    def change(tensors):
        tensors[name][index] = value
    return change


def cut(maker, size, name="x.safetensors"):
    def write(folder):
        maker(folder)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:size])
    return write


def npz():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(100))
    return file.getvalue()


INIT = ["--init={}/x.safetensors"]
ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def tensor_of(**changes):
    return {"a": {**ONE["a"], **changes}}


SAFETENSORS = [
    Case("weights missing", ["--init=none.safetensors"], ["--init: cannot open none.safetensors: No such file"], ranks=(1, 2, 4)),
    Case("weights are a directory", ["--init={}"], ["manifest.json", "run.json", "config.json", "give one of these"]),
    Case("weights empty", INIT, ["x.safetensors is not a safetensors file: it has only 0 bytes"],
         file("x.safetensors", b"")),
    Case("weights are a text", INIT, ["x.safetensors is a text; give a .safetensors file"], file("x.safetensors", TEXT)),
    Case("header cut off", INIT, ["x.safetensors is truncated"], cut(weights(), 100), ranks=(1, 2)),
    Case("header length zero", INIT, ["x.safetensors", "not JSON"], raw(b"")),
    Case("header length absurd", INIT, ["x.safetensors is not a safetensors file: it does not begin with the length of a header"], raw(ONE, bytes(8), 2**64 - 1)),
    Case("header length one too many", INIT, ["x.safetensors"], raw(ONE, bytes(8), len(json.dumps(ONE)) + 1)),
    Case("header not JSON", INIT, ["x.safetensors", "its header is not JSON at byte 8"], raw(b'{"a": nonsense}')),
    Case("header nested without end", INIT, ["x.safetensors", "nested too deeply"], raw(b'{"a":' + b"[" * 100000)),
    Case("header a list", INIT, ["x.safetensors", "the header is not a JSON object"], raw([1, 2])),
    Case("header names a tensor twice", INIT, ["\"a\" occurs twice"], raw(b'{"a":{},"a":{}}')),
    Case("tensor without offsets", INIT, ['tensor "a": needs dtype, shape and data_offsets'],
         raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8))),
    Case("tensor of an unknown dtype", INIT, ['tensor "a": its dtype is unknown'], raw(tensor_of(dtype="F31"), bytes(8))),
    Case("tensor of a negative size", INIT, ['tensor "a": its shape is not'], raw(tensor_of(shape=[-2]), bytes(8))),
    Case("tensor beyond 64 bits", INIT, ['tensor "a": its shape is too large'],
         raw(tensor_of(shape=[2**62, 2**62]), bytes(8))),
    Case("tensor larger than its data", INIT, ['tensor "a": its data_offsets do not match its shape'],
         raw(tensor_of(shape=[3]), bytes(8))),
    Case("tensor beyond the file", INIT, ['tensor "a": its data end at 8, but the file holds only 7'],
         raw(ONE, bytes(7)), ranks=(1, 2)),
    Case("tensors overlap", INIT, ['tensor "b": its data begin at 4, but the tensor before it ends at 8'],
         raw({**ONE, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8))),
    Case("gap between tensors", INIT, ['tensor "a": its data begin at 4'], raw(tensor_of(data_offsets=[4, 12]), bytes(12))),
    Case("data that no tensor has", INIT, ["the tensors have 8 bytes, but the file holds 9"], raw(ONE, bytes(9))),
    Case("weights cut off", INIT, ["truncated", "x.safetensors"], cut(weights(), -1), ranks=(1, 2)),
    Case("tensor missing", INIT, ["x.safetensors: there is no tensor \"h.1.ln_2.bias\""],
         weights(lambda tensors: tensors.pop("h.1.ln_2.bias"))),
    Case("tensor of no such model", INIT, ['x.safetensors: "h.2.ln_1.bias" is not a tensor of this model of 2 blocks'],
         weights(replaced("h.2.ln_1.bias", np.zeros(32, np.float32)))),
    Case("tensor with an endless name", INIT, ['safetensors: "' + 99 * "x" + '..." is not a tensor of this model'],
         weights(replaced(50000 * "x", np.zeros(32, np.float32)))),
    Case("weights of a single byte", INIT, ["x.safetensors is not a safetensors file: it has only 1 byte"],
         file("x.safetensors", b"x")),
    Case("weights of a larger vocabulary", INIT,
         ["x.safetensors: wte.weight has the shape (300, 32), but this model needs (256, 32)"], weights(vocabulary=300),
         ranks=(1, 2)),
    Case("weights of a wider model", [*INIT, "--channels=64"],
         ["wte.weight has the shape (256, 32), but this model needs (256, 64)"], weights()),
    Case("weights of a deeper model", [*INIT, "--layers=1"], ["h.1.", "not a tensor of this model of 1 block;"], weights()),
    Case("weights of a shallower model", [*INIT, "--layers=3"], ['there is no tensor "h.2.ln_1.weight"'], weights()),
    Case("weights of another context", [*INIT, "--seq-len=8"],
         ["wpe.weight has the shape (16, 32), but this model needs (8, 32)"], weights()),
    Case("tensor transposed", INIT, ["h.0.mlp.c_fc.weight has the shape (128, 32), but this model needs (32, 128): this is the layout of nn.Linear"],
         weights(replaced("h.0.mlp.c_fc.weight", np.zeros((128, 32), np.float32)))),
    Case("table transposed", INIT, ["wte.weight has the shape (32, 256), but this model needs (256, 32); give the sizes"],
         weights(replaced("wte.weight", np.zeros((32, 256), np.float32)))),
    Case("tensor by two names", INIT, ['x.safetensors: "transformer.wte.weight" and "wte.weight" are both the model\'s "wte.weight"; remove one'],
         weights(lambda tensors: tensors.update({"transformer.wte.weight": tensors["wte.weight"]})), ranks=(1, 2)),
    Case("some names of a compiled model", INIT, ['"_orig_mod.ln_f.bias" begins with _orig_mod.', "torch.compile", '"h.0.attn.c_attn.bias" does not'],
         weights(all_of(without_tensor("ln_f.bias"), replaced("_orig_mod.ln_f.bias", np.zeros(32, np.float32))))),
    Case("some names of a compiled model in a wrapper", INIT, ['"module._orig_mod.ln_f.bias" begins with module._orig_mod.', '"module.h.0.attn.c_attn.bias" does not'],
         weights(all_of(without_tensor("ln_f.bias"), replaced("_orig_mod.ln_f.bias", np.zeros(32, np.float32)), renamed("module.{}".format)))),
    Case("a tied head where the model has its own", [*INIT, "--tied-head=false"],
         ['there is no tensor "wte.weight", only lm_head.weight, so the file\'s head is tied; leave out --tied-head=false'],
         weights(table_as_head)),
    Case("one shard of the weights", ["--init={}/model-00001-of-00002.safetensors"],
         ['there is no tensor "ln_f.weight"; give the folder that holds the index, the shards and config.json'],
         all_of(weights(without_tensor("ln_f.weight")),
                lambda folder: (folder / "x.safetensors").rename(folder / "model-00001-of-00002.safetensors")), ranks=(1, 2)),
    Case("index of shards", ["--init={}/model.safetensors.index.json"],
         ["model.safetensors.index.json is an index of shards, without weights; give the folder that holds the index"],
         file("model.safetensors.index.json", b'{\n  "metadata": {\n    "total_size": 8\n  },\n  "weight_map": {\n    "a": "b.safetensors"\n  }\n}\n'),
         ranks=(1, 2)),
    Case("configuration instead of weights", INIT, ["x.safetensors is a JSON file; give the .safetensors file"],
         file("x.safetensors", b'{"model_type": "gpt2"}')),
    Case("folder of weights", ["--init={}"], ["give one of these, or its weights alone: --init ", "/model.safetensors"],
         all_of(weights(), lambda folder: (folder / "x.safetensors").rename(folder / "model.safetensors"))),
    *(Case(f"{what} instead of weights, {number}", INIT, [f"x.safetensors is {what}", advice], file("x.safetensors", content))
      for number, (what, advice, content) in enumerate((
          ("a zip archive, as torch.save writes", "safetensors.torch.save_file", b"PK\x03\x04\x00\x00\x08\x08" + bytes(100)),
          ("a pickle of Python", "safetensors.torch.save_file", pickle.dumps({"wte.weight": list(range(100))})),
          ("a GGUF file", "give the safetensors file of the same model", b"GGUF\x03\x00\x00\x00" + bytes(100)),
          ("only a pointer to a file in Git LFS", "git lfs pull", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
          ("an .npz file of NumPy", "safetensors.numpy.save_file", npz()),
          ("an array of NumPy", "safetensors.numpy.save_file", b"\x93NUMPY\x01\x00" + bytes(100)),
          ("compressed by gzip", "unpack it with gunzip", gzip.compress(bytes(10**6), mtime=0)),
          ("an HDF5 file", "give the safetensors file of the same model", b"\x89HDF\r\n\x1a\n" + bytes(100)),
          ("a token shard", "give it to --train-data or --val-data", np.array([20240520, 1, 2, *[0] * 254], "<i4").tobytes()),
          ("a token shard", "give it to --train-data or --val-data", np.array([20240801, 7, 1, *[0] * 254], "<i4").tobytes()),
          ("a text", "give a .safetensors file", ("steps = 30\n" + 4000 * "é").encode()),
          ("a web page", "download the file itself", b"<!doctype html>\n<html></html>\n")))),
    # The length of its header begins like a pickle.
    Case("header cut off after a length like a pickle's magic", INIT, ["x.safetensors is truncated"], raw(b"{", length=0x0280)),
    Case("tensor of whole numbers", INIT, ['tensor "ln_f.bias" has the dtype I32', "F32"],
         weights(replaced("ln_f.bias", np.zeros(32, np.int32))), late=True),
    Case("a head of its own", INIT, ["lm_head.weight differs from wte.weight", "try --tied-head=false"],
         weights(replaced("lm_head.weight", np.ones((256, 32), np.float32))), ranks=(1, 2), late=True),
    Case("a head of its own of another size", INIT, ["lm_head.weight differs from wte.weight"],
         weights(replaced("lm_head.weight", np.ones((300, 32), np.float32))), late=True),
    Case("an own head of another vocabulary", [*INIT, "--tied-head=false"],
         ["lm_head.weight has the shape (300, 32), but this model needs (256, 32)"],
         weights(replaced("lm_head.weight", np.ones((300, 32), np.float32)))),
    Case("biases where the model has none", [*INIT, "--bias=false"],
         ['x.safetensors: "h.0.attn.c_attn.bias" is a bias, but this model has no biases; leave out --bias=false'],
         weights(alone("h.0.attn.c_attn.bias")), ranks=(1, 2)),
    Case("one bias, with a prefix, where the model has none", [*INIT, "--bias=false", "--tied-head=false"],
         ['"transformer.ln_f.bias" is a bias, but this model has no biases; leave out --bias=false'],
         weights(all_of(without_biases, replaced("transformer.ln_f.bias", np.zeros(32, np.float32))))),
    Case("no biases where the model has them", INIT, ['x.safetensors: there is no tensor "h.0.ln_1.bias"', "and no other bias; try --bias=false"],
         weights(without_biases), ranks=(1, 2)),
    Case("a bias that the model with biases lacks", INIT, ['"wte.bias" is not a tensor of this model'],
         weights(replaced("wte.bias", np.zeros(32, np.float32)))),
    Case("weight infinite", INIT, ["x.safetensors: h.1.mlp.c_proj.weight", "inf at (127, 3)", "no loss would be finite"],
         weights(holding("h.1.mlp.c_proj.weight", (127, 3), np.inf)), ranks=(1, 2), late=True),
    Case("weight nan", INIT, ["--init: ", "x.safetensors: ln_f.bias", "nan at (31)"], weights(holding("ln_f.bias", 31, np.nan)), late=True),
    Case("weight beyond fp32", INIT, ["x.safetensors: wte.weight", "inf at (0, 0)"],
         weights(holding("wte.weight", (0, 0), 1e300), dtype=np.float64), late=True),
    Case("weight infinite in half precision", INIT, ["x.safetensors: wpe.weight", "-inf at (15, 31)"],
         weights(holding("wpe.weight", (15, 31), -np.inf), dtype=np.float16), late=True),
]

# ---- checkpoints

# A whole checkpoint of the small model after 4 steps, made once. Each case copies it to its folder.
CHECKPOINT = "run/checkpoint-00000004"
made = {}


def make_checkpoint(folder):
    result = run(["--out-dir={}/run"], folder, 1)
    assert result.returncode == 0, result.stderr
    made["run"] = folder / "run"


def checkpoint(change=lambda folder: None):
    def write(folder):
        shutil.copytree(made["run"], folder / "run")
        change(folder / CHECKPOINT)
    return write


def manifest(change):
    def write(folder):
        path = folder / "manifest.json"
        path.write_text(change(path.read_text()))
    return checkpoint(write)


def flipped(name, place):
    def write(folder):
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 1
        (folder / name).write_bytes(data)
    return checkpoint(write)


def without(name):
    return checkpoint(lambda folder: (folder / name).unlink())


RESUME = ["--resume={}/" + CHECKPOINT]
WEIGHTS, STATE = "weights-00000-1.safetensors", "state-00000-1.safetensors"
NEWEST = ["--out-dir={}/run", "--resume"]

DAMAGED_MANIFEST = ["the checkpoint is damaged: ", "manifest.json is not a manifest; take an older one"]

CHECKPOINTS = [
    Case("no such checkpoint", ["--resume=none"], ["no checkpoint: none is not a directory"], ranks=(1, 2, 4)),
    Case("checkpoint is a file", ["--resume={}/x"], ["x is not a directory"], file("x", b"x")),
    Case("directory without a manifest", ["--resume={}"], ["neither manifest.json nor"]),
    Case("checkpoint leads to itself", ["--resume={}/x"], ["no checkpoint: ", "x: ", "symbolic links"],
         lambda folder: (folder / "x").symlink_to("x"), ranks=(1, 2)),
    Case("checkpoint of too long a name", ["--resume=" + "x" * 300], ["no checkpoint: ", "File name too long"]),
    Case("newest checkpoint in what leads to itself", ["--out-dir={}/x", "--resume"], ["cannot read ", "symbolic links"],
         lambda folder: (folder / "x").symlink_to("x")),
    Case("one of the checkpoints leads to itself", [*NEWEST, "--steps=3"], ["is at step 4, beyond --steps 3"],
         checkpoint(lambda folder: (folder.parent / "checkpoint-00000009").symlink_to("checkpoint-00000009"))),
    Case("the run's record leads to itself", NEWEST, ["run.json: ", "symbolic links"],
         checkpoint(lambda folder: ((folder.parent / "run.json").unlink(),
                                    (folder.parent / "run.json").symlink_to("run.json")))),
    Case("manifest missing", NEWEST, [CHECKPOINT, "neither manifest.json nor"], without("manifest.json"), ranks=(1, 2)),
    Case("manifest empty", RESUME, DAMAGED_MANIFEST, manifest(lambda text: "")),
    Case("manifest cut off", RESUME, DAMAGED_MANIFEST, manifest(lambda text: text[:-20]), ranks=(1, 2)),
    Case("manifest of something else", RESUME, DAMAGED_MANIFEST, manifest(lambda text: "{}")),
    Case("manifest a list", RESUME, DAMAGED_MANIFEST, manifest(lambda text: "[1]")),
    Case("manifest a pipe", RESUME, ["manifest.json is a pipe"],
         checkpoint(lambda folder: ((folder / "manifest.json").unlink(), os.mkfifo(folder / "manifest.json"))), ranks=(1, 2)),
    Case("manifest of another version", RESUME, ["manifest.json is not a manifest that this program can read", "versions 2 and 3"],
         manifest(lambda text: text.replace('"version": 3', '"version": 4'))),
    Case("manifest longer", RESUME, ["manifest.json does not match its own checksum"], manifest(lambda text: text + "\n")),
    Case("manifest's step changed", RESUME, ["manifest.json does not match its own checksum"],
         manifest(lambda text: text.replace('"step": 4', '"step": 3'))),
    Case("manifest is a directory", RESUME, ["manifest.json: Is a directory"],
         checkpoint(lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()))),
    Case("an optimizer's moments as weights", ["--init={}/" + CHECKPOINT + "/" + STATE],
         [STATE + " holds an optimizer's state, not weights; give the folder of the checkpoint"], checkpoint(), ranks=(1, 2)),
    Case("checkpoint without weights", RESUME, ["the checkpoint is damaged", WEIGHTS + ": No such file"],
         without(WEIGHTS), ranks=(1, 2), late=True),
    Case("checkpoint without moments", RESUME, ["the checkpoint is damaged", STATE + ": No such file"],
         without(STATE), late=True),
    Case("checkpoint's weights cut off", NEWEST, [WEIGHTS + " has 1,000 bytes, but its manifest says", "an older one"],
         checkpoint(lambda folder: os.truncate(folder / WEIGHTS, 1000)), late=True),
    Case("checkpoint's weights damaged", RESUME, [WEIGHTS + " does not have its checksum, in the block at byte 0"],
         flipped(WEIGHTS, -1), ranks=(1, 2), late=True),
    Case("checkpoint's moments damaged", RESUME, [STATE + " does not have its checksum"], flipped(STATE, -5), late=True),
    Case("checkpoint's header damaged", RESUME, [STATE + " is truncated or not a safetensors file"], flipped(STATE, 3), late=True),
    Case("checkpoint's checksums damaged", RESUME, ["checksums-00000.json does not have the checksum in its manifest"],
         flipped("checksums-00000.json", 60), ranks=(1, 2), late=True),
    Case("checkpoint without its checksums", RESUME, ["the checkpoint is damaged", "checksums-00000.json: No such file"],
         without("checksums-00000.json"), late=True),
    Case("checkpoint of a narrower model", [*RESUME, "--channels=64"],
         [CHECKPOINT + " has another model: its --channels is 32, this run's is 64"], checkpoint(), ranks=(1, 2)),
    Case("checkpoint of a deeper model", [*RESUME, "--layers=1"], ["its --layers is 2, this run's is 1"], checkpoint()),
    Case("checkpoint of other heads", [*RESUME, "--heads=4"], ["its --heads is 2, this run's is 4"], checkpoint()),
    Case("checkpoint with biases", [*RESUME, "--bias=false"],
         [CHECKPOINT + " has another model, with --bias=true; leave out --bias=false"], checkpoint(), ranks=(1, 2)),
    Case("checkpoint with a tied head", [*RESUME, "--tied-head=false"],
         [CHECKPOINT + " has another model, with --tied-head=true; leave out --tied-head=false"], checkpoint()),
    Case("text of a checkpoint with biases", ["--generate", *RESUME, "--bias=false"],
         [CHECKPOINT + " has another model, with --bias=true; leave out --bias=false"], checkpoint()),
    Case("checkpoint beyond the last step", [*NEWEST, "--steps=3"], ["is at step 4, beyond --steps 3"], checkpoint()),
]

# ---- outputs

OUTPUTS = [
    Case("out-dir is a file", ["--out-dir={}/x"], ["--out-dir: cannot write", "x is not a directory"], file("x", b"x"),
         ranks=(1, 2)),
    Case("out-dir below a file", ["--out-dir={}/x/y/z"], ["--out-dir: cannot write", "x is not a directory"],
         file("x", b"x")),
    Case("out-dir where nothing can be made", ["--out-dir=/proc/run"], ["--out-dir: cannot create files in /proc"],
         ranks=(1, 2, 4)),
    Case("out-dir leads nowhere", ["--out-dir={}/x/y"], ["--out-dir: cannot create files in", "x: No such file"],
         lambda folder: (folder / "x").symlink_to("nowhere")),
    Case("out-dir of too long a name", ["--out-dir={}/" + "x" * 300], ["--out-dir: ", "File name too long"]),
    Case("default out-dir cannot be made", [], ["--out-dir: cannot write runs/", "runs is not a directory"],
         file("runs", b"x")),
    Case("metrics are a directory", ["--metrics={}/x"], ["--metrics: ", "x is a directory"],
         lambda folder: (folder / "x").mkdir(), ranks=(1, 2)),
    Case("metrics below a file", ["--metrics={}/x/y"], ["--metrics: cannot write", "x is not a directory"],
         file("x", b"x")),
    Case("metrics where nothing can be made", ["--metrics=/proc/m.jsonl"], ["--metrics: cannot create files in /proc"]),
    Case("metrics in a directory's place", ["--out-dir={}/run"], ["--out-dir: ", "metrics.jsonl is a directory"],
         lambda folder: (folder / "run/metrics.jsonl").mkdir(parents=True)),
    Case("metrics to a pipe", ["--metrics={}/x"], ["--metrics: ", "x is a pipe"], lambda folder: os.mkfifo(folder / "x"),
         ranks=(1, 2)),
    Case("metrics in a pipe's place", ["--out-dir={}/run"], ["--out-dir: ", "metrics.jsonl is a pipe"],
         lambda folder: ((folder / "run").mkdir(), os.mkfifo(folder / "run/metrics.jsonl"))),
    Case("metrics lead to themselves", ["--metrics={}/x"], ["--metrics: cannot write ", "x: ", "symbolic links"],
         lambda folder: (folder / "x").symlink_to("x")),
    Case("data in the metrics' place", ["--train-data={}/run/metrics.jsonl", "--out-dir={}/run"],
         ["--out-dir: ", "metrics.jsonl would overwrite", "which this run reads"],
         lambda folder: ((folder / "run").mkdir(), (folder / "run/metrics.jsonl").write_bytes(TEXT))),
    # Through a link, so that a faulty program does not replace the device.
    Case("metrics on a full disk", ["--metrics={}/full"], ["full: No space left"],
         lambda folder: (folder / "full").symlink_to("/dev/full"), ranks=(1, 2), late=True),
    Case("metrics over the data", [*ANY_TEXT, "--metrics={}/x.txt"], ["--metrics", "x.txt would overwrite"],
         file("x.txt", TEXT), ranks=(1, 2)),
    Case("metrics over the data by another name", [*ANY_TEXT, "--metrics={}/./link"], ["would overwrite"],
         all_of(file("x.txt", TEXT), lambda folder: (folder / "link").symlink_to("x.txt"))),
    Case("metrics over a shard of many", ["--train-data={}/*.bin", "--metrics={}/b.bin"], ["b.bin would overwrite"],
         all_of(shard("a.bin"), shard("b.bin"))),
    Case("metrics over the weights", [*INIT, "--metrics={}/x.safetensors"], ["x.safetensors would overwrite"], weights()),
    Case("export over the data", [*ANY_TEXT, "--export={}/x.txt"], ["--export", "x.txt would overwrite"],
         file("x.txt", TEXT)),
    Case("export over the metrics", ["--metrics={}/x", "--export={}/x"], ["--export and --metrics name the same file"]),
    Case("export into a folder with files", ["--export={}/x"], ["--export: ", "x is not empty; give a new folder"],
         lambda folder: ((folder / "x").mkdir(), (folder / "x/y").touch()), ranks=(1, 2)),
    Case("export of a folder over a file", ["--export={}/x"], ["--export: ", "x is a file, but a name without .safetensors means a folder"],
         file("x", b"x")),
    Case("export to a link that leads to itself", ["--export={}/x.safetensors"], ["--export: cannot write ", "symbolic links"],
         lambda folder: (folder / "x.safetensors").symlink_to("x.safetensors")),
    Case("export of a folder to a link that leads to itself", ["--export={}/x"], ["--export: cannot write ", "symbolic links"],
         lambda folder: (folder / "x").symlink_to("x")),
    Case("export through a link to a device", ["--export={}/x.safetensors"], ["--export: /dev/full is not a regular file"],
         lambda folder: (folder / "x.safetensors").symlink_to("/dev/full")),
    Case("export of a folder through a link to a device", ["--export={}/x"], ["--export: ", "x is not a regular file, but a name"],
         lambda folder: (folder / "x").symlink_to("/dev/full")),
    Case("export below a file", ["--export={}/x/y.safetensors"], ["--export: cannot write", "x is not a directory"],
         file("x", b"x")),
    Case("export where nothing can be made", ["--export=/proc/x.safetensors"], ["--export: cannot create files in /proc"]),
    Case("export in a checkpoint's place", ["--out-dir={}/run", "--export={}/run/checkpoint-00000004"],
         ["--export", "for other results"]),
    Case("export where a checkpoint is written", ["--out-dir={}/run", "--export={}/run/checkpoint-00000004.partial"],
         ["--export", "for other results"]),
    Case("export below a checkpoint", ["--out-dir={}/run", "--export={}/run/checkpoint-00000004/a/x"],
         ["--export", "for other results"]),
    Case("export through a link to a checkpoint", ["--out-dir={}/run", "--export={}/link/weights.safetensors"], ["--export", "for other results"],
         lambda folder: ((folder / "other/checkpoint-00000002").mkdir(parents=True), (folder / "link").symlink_to("other/checkpoint-00000002"))),
    Case("metrics over another run's configuration", ["--out-dir={}/run", "--metrics={}/other/config.toml"], ["--metrics", "for other results"],
         lambda folder: ((folder / "other").mkdir(), (folder / "other/config.toml").touch())),
    Case("metrics in a checkpoint's place", ["--out-dir={}/run", "--metrics={}/run/checkpoint-00000004"],
         ["--metrics", "for other results"]),
    Case("export in the default metrics' place", ["--out-dir={}/run", "--export={}/run/metrics.jsonl"],
         ["--export", "for other results"]),
    Case("export's other name is a directory", ["--export={}/x.safetensors"], ["--export: ", "x.safetensors.partial is a directory", "remove it"],
         lambda folder: (folder / "x.safetensors.partial").mkdir()),
    Case("export's other name is a pipe", ["--export={}/x.safetensors"], ["--export: ", "x.safetensors.partial is a pipe"],
         lambda folder: os.mkfifo(folder / "x.safetensors.partial")),
    Case("export to a pipe", ["--export={}/x.safetensors"], ["--export: ", "x.safetensors is not a regular file"],
         lambda folder: os.mkfifo(folder / "x.safetensors")),
]
