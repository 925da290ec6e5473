"""Everything a person can give wrongly: one line on standard error, once for all ranks, status 1, quickly, and
nothing written.

One table of cases. A case says how to make its input, the arguments, and the words the line must contain. Every case
runs in a folder of its own, which must be as it was before; several run at a time, since they mostly wait.
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import tempfile
import time
import typing

import numpy as np
import pytest

import program
import safetensors_numpy

PROGRAM = str(pathlib.Path(program.ROOT, program.PROGRAM).resolve())
AT_ONCE = 4
SECONDS = 20 * program.PATIENCE  # an error takes well below one, on a machine that is busy with three others more
SMALL = [*program.SMALL, "--steps=4", "--sample-tokens=0"]
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # some containers forbid it, and Open MPI says so
    "EVENT_NOEPOLL": "1",  # as in scripts/launch.sh, which says why
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass
class Case:
    name: str
    arguments: list  # "{}" stands for the case's folder
    words: list  # that the line contains
    make: typing.Callable = lambda folder: None  # writes the input into the folder
    ranks: tuple = (1,)


def contents(folder):
    """Every path under a folder, with what it holds."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))}


@dataclasses.dataclass
class Outcome:
    status: int
    stderr: str
    seconds: float
    before: dict
    after: dict


def command_of(arguments, folder, ranks):
    """The command line and its environment."""
    command = [PROGRAM, *SMALL, *(str(argument).replace("{}", str(folder)) for argument in arguments)]
    if ranks == 1:
        return command, ENVIRONMENT
    # Each a place of its own: mpiruns that share one may remove it from under one another.
    environment = {**ENVIRONMENT, "OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=folder.parent)}
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command], environment


def run(arguments, folder, ranks, preexec=None):
    command, environment = command_of(arguments, folder, ranks)
    # In the folder, so that what goes to the default places is seen too.
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS * 3,
                          stdin=subprocess.DEVNULL, preexec_fn=preexec)


def outcome_of(case, folder, ranks):
    folder.mkdir()
    case.make(folder)
    before = contents(folder)
    start = time.monotonic()
    result = run(case.arguments, folder, ranks)
    return Outcome(result.returncode, result.stderr, time.monotonic() - start, before, contents(folder))


def one_error(stderr):
    """The only line of standard error, without what it begins with."""
    assert stderr.startswith("error: ") and stderr.endswith("\n") and stderr.count("\n") == 1, stderr
    return stderr[len("error: "):-1]


# ---- options and configuration files


def config(text):
    return lambda folder: (folder / "c.toml").write_text(text)


OPTIONS = [
    Case("unknown option", ["--layerz=3"], ["no option --layerz", "--layers"], ranks=(1, 2)),
    Case("unknown option with a value apart", ["--globl-batch-tokens", "3"],
         ["--globl-batch-tokens", "--global-batch-tokens"]),
    Case("unknown short option", ["-z"], ["-z", "--help"]),
    Case("a word too many", ["stories.txt"], ["'stories.txt' is no option"]),
    Case("value missing", ["--lr"], ["--lr needs a value"]),
    Case("value empty", ["--train-data="], ["--train-data needs a value"]),
    Case("not a number", ["--lr=fast"], ["--lr: 'fast' is not a number"]),
    Case("not a whole number", ["--steps=1.5"], ["--steps: '1.5' is not a whole number"]),
    Case("trailing letters", ["--steps=10k"], ["--steps: '10k' is not a whole number"]),
    Case("beyond 64 bits", ["--steps=99999999999999999999"], ["--steps 99999999999999999999 is beyond all range"]),
    Case("beyond double", ["--lr=1e999"], ["--lr 1e999 is beyond all range"]),
    Case("negative seed", ["--seed=-1"], ["--seed: '-1' is not a whole number, 0 or more"]),
    Case("no such model", ["--model=gpt3"], ["--model: 'gpt3'", "gpt2-xl"]),
    Case("no such schedule", ["--lr-schedule=step"], ["{cosine,linear,constant,wsd}"]),
    Case("neither true nor false", ["--overlap-grad-reduce=maybe"], ["--overlap-grad-reduce: 'maybe' is neither true"]),
    Case("no such dtype", ["--dtype=fp16"], ["--dtype: 'fp16'", "{fp32,bf16}"]),
    Case("device that was not built in", ["--device=cuda"], ["--device cpu"]),
    Case("negative learning rate", ["--lr=-1"], ["--lr -1 is out of range; give 0 to"], ranks=(1, 2, 4)),
    Case("negative learning rate, apart", ["--lr", "-1"], ["--lr -1 is out of range"]),
    Case("learning rate nan", ["--lr=nan"], ["--lr nan is out of range"]),
    Case("learning rate inf", ["--lr=inf"], ["--lr inf is out of range"]),
    Case("beta1 is 1", ["--beta1=1"], ["--beta1 1 is out of range"]),
    Case("beta2 is 1 in fp32", ["--beta2=0.99999999"], ["--beta2 0.99999999 is out of range"]),
    Case("eps is 0", ["--eps=0"], ["--eps 0 is out of range"]),
    Case("negative weight decay", ["--weight-decay=-0.1"], ["--weight-decay -0.1 is out of range"]),
    Case("negative clipping", ["--grad-clip=-1"], ["--grad-clip -1 is out of range"]),
    Case("negative temperature", ["--temperature=-1"], ["--temperature -1 is out of range"]),
    Case("negative top-k", ["--top-k=-1"], ["--top-k -1 is out of range"]),
    Case("fraction above 1", ["--min-lr-fraction=1.1"], ["--min-lr-fraction 1.1 is out of range; give 0 to 1"]),
    Case("negative steps", ["--steps=-1"], ["--steps -1 is out of range"]),
    Case("no time to wait", ["--comm-timeout=0"], ["--comm-timeout 0 is out of range"]),
    Case("text that is not UTF-8", ["--prompt=\udcff"], ["--prompt: the text is not UTF-8"]),
    Case("configuration missing", ["--config=none.toml"], ["none.toml: No such file"], ranks=(1, 2)),
    Case("configuration is a directory", ["--config={}"], ["Is a directory"]),
    Case("configuration key unknown", ["--config={}/c.toml"], ["c.toml, line 2", "no setting layrs", "layers"],
         config("steps = 3\nlayrs = 2\n"), ranks=(1, 2)),
    Case("configuration of a command", ["--config={}/c.toml"], ["c.toml, line 1", "no setting print-step"],
         config("print-step = 1\n")),
    Case("configuration line malformed", ["--config={}/c.toml"], ["c.toml, line 3", "expected '='"],
         config("# mine\nsteps = 3\nlet there be layers\n")),
    Case("configuration section", ["--config={}/c.toml"], ["c.toml, line 2", "model is a section"], config("\n[model]\nlayers = 2\n")),
    Case("configuration value missing", ["--config={}/c.toml"], ["c.toml, line 1", "expected value"],
         config("steps =  # how many?\n")),
    Case("configuration value twice", ["--config={}/c.toml"], ["c.toml, line 4", "cannot redefine existing integer 'steps'"],
         config("\nsteps = 1\n\nsteps = 2\n")),
    Case("configuration with more after a value", ["--config={}/c.toml"], ["c.toml, line 1", "saw '4'"],
         config("steps = 3 4\n")),
    Case("configuration quotation open", ["--config={}/c.toml"], ["c.toml, line 2", "while parsing string"],
         config('seed = 3\nprompt = "Once\n')),
    Case("configuration escape", ["--config={}/c.toml"], ["c.toml, line 1", "unknown escape sequence"],
         config('prompt = "\\q"\n')),
    Case("configuration text for a number", ["--config={}/c.toml"], ["c.toml, line 2", "lr is a number, without quotation marks"],
         config('steps = 3\nlr = "high"\n')),
    Case("configuration number for a text", ["--config={}/c.toml"], ["c.toml, line 1", "train-data is a text"],
         config("train-data = 7\n")),
    Case("configuration truth for a number", ["--config={}/c.toml"], ["c.toml, line 1", "steps is a number"],
         config("steps = true\n")),
    Case("configuration number for a truth", ["--config={}/c.toml"], ["c.toml, line 1", "is true or false"],
         config("overlap-grad-reduce = 1\n")),
    Case("metrics over the configuration", ["--config={}/c.toml", "--metrics={}/c.toml"],
         ["--metrics", "c.toml would overwrite", "which this run reads"], config("seed = 3\n")),
    Case("export over the configuration", ["--config={}/c.toml", "--export={}/c.toml"],
         ["--export", "c.toml would overwrite", "which this run reads"], config("seed = 3\n")),
    Case("weights in a named pipe", ["--init={}/pipe"], ["pipe is not a file"], lambda folder: os.mkfifo(folder / "pipe")),
    Case("the saved configuration is a directory", ["--out-dir={}/run"], ["--out-dir", "config.toml is a directory"],
         lambda folder: (folder / "run/config.toml").mkdir(parents=True)),
    Case("configuration without a name", ["--config", ""], ["--config: the file's name is empty"]),
    Case("export over the run's directory", ["--out-dir={}/a/b", "--export={}/a"], ["--export", "keeps other results"]),
    Case("export over the run's configuration", ["--out-dir={}/a", "--export={}/a/config.toml"],
         ["--export", "keeps other results"]),
    Case("metrics over the run's record", ["--out-dir={}/a", "--metrics={}/a/run.json"], ["--metrics", "keeps other results"]),
    Case("export into a checkpoint", ["--out-dir={}/a", "--export={}/a/checkpoint-00000004/model.safetensors"],
         ["--export", "keeps other results"]),
    Case("configuration is a device", ["--config=/dev/zero"], ["/dev/zero is a device"]),
    Case("configuration type", ["--config={}/c.toml"], ["c.toml, line 2", "'3.5' is not a whole number"],
         config("seed = 3\nwarmup-steps = 3.5\n")),
    Case("configuration choice", ["--config={}/c.toml"], ["c.toml, line 1", "'huge' is none of {tiny,"],
         config('model = "huge"\n')),
    Case("configuration value out of range", ["--config={}/c.toml"], ["--weight-decay -3 is out of range"],
         config("weight-decay = -3\n")),
    Case("configuration binary", ["--config={}/c.toml"], ["c.toml, line 1"],
         lambda folder: (folder / "c.toml").write_bytes(bytes(range(256)))),
]

# ---- sizes

SIZES = [
    Case("no layers", ["--layers=0"], ["--layers 0 is out of range; give 1 or more"]),
    Case("negative channels", ["--channels=-32"], ["--channels -32 is out of range"], ranks=(1, 2)),
    Case("no context", ["--seq-len=0"], ["--seq-len 0 is out of range"]),
    Case("no vocabulary", ["--vocab-size=0"], ["--vocab-size 0 is out of range"]),
    Case("no heads", ["--heads=0"], ["--heads 0 is out of range"]),
    Case("no micro-batch", ["--micro-batch-size=0"], ["--micro-batch-size 0 is out of range"]),
    Case("no batch", ["--global-batch-tokens=0"], ["--global-batch-tokens 0 is out of range; give 16 to"]),
    # A layer has 12 C^2 weights: 2 layers of 1e9 channels have 2.4e19 weights, of 16 bytes with their gradient and
    # moments, 333 EiB.
    Case("absurd channels", ["--channels=1000000000"], ["--channels 1000000000", "333.", "EiB", "this machine has",
                                                        "a smaller --channels"], ranks=(1, 2)),
    Case("absurd layers", ["--layers=100000000"], ["--layers 100000000", "TiB", "this machine has"]),
    Case("absurd context", ["--seq-len=1000000000000"], ["--seq-len 1000000000000", "PiB", "this machine has"]),
    Case("absurd vocabulary", ["--vocab-size=1000000000000"], ["--vocab-size 1000000000000", "TiB", "this machine has"]),
    Case("absurd micro-batch", ["--micro-batch-size=1000000000", "--global-batch-tokens=16000000000"],
         ["--micro-batch-size 1000000000", "TiB", "this machine has"]),
    Case("products beyond 64 bits", ["--channels=9223372036854775807", "--heads=1", "--layers=9223372036854775807"],
         ["e+", "EiB", "this machine has"]),
    Case("context whose batch leaves 64 bits", ["--seq-len=9223372036854775807"], ["--seq-len 9223372036854775807", "EiB"]),
    Case("too large, usual sizes", ["--model=gpt2-xl", "--layers=48", "--heads=25", "--channels=1600", "--seq-len=1024",
                                    "--global-batch-tokens=16384000", "--micro-batch-size=16000"],
         ["--micro-batch-size 16000", "1,557,611,200 parameters", "TiB", "this machine has"]),
    Case("absurd batch", ["--global-batch-tokens=1000000000000"], ["--global-batch-tokens 1000000000000", "micro-batches"]),
    Case("batch beyond its range", ["--global-batch-tokens=9223372036854775807"], ["is out of range; give 16 to"]),
    Case("heads that do not divide", ["--heads=3"], ["--heads 3 does not divide --channels 32; try --channels 30 or 33"],
         ranks=(1, 2)),
    Case("more heads than channels", ["--heads=64"], ["--heads 64 are more than --channels 32", "such as 1"]),
    Case("batch that does not divide", ["--global-batch-tokens=100"], ["100 is not a multiple of 16", "try 96 or 112"]),
    Case("batch that ranks do not share", ["--global-batch-tokens=400"], ["not a multiple of 32", "try 384 or 416"],
         ranks=(2,)),
    Case("batch below one sequence", ["--global-batch-tokens=8"], ["8 is not a multiple of 16", "try 16"]),
    Case("micro-batch that does not divide", ["--micro-batch-size=5"], ["does not divide the 24 sequences",
                                                                        "try --micro-batch-size 4"]),
]

# ---- data


def shard(name="x.bin", tokens=(65,) * 600, magic=20240520, version=1, length=None, dtype=np.uint16, cut=None):
    """Writes a token shard: by default a good one, of 37 samples."""
    def write(folder):
        header = np.zeros(256, dtype=np.int32)
        header[:3] = magic, version, len(tokens) if length is None else length
        (folder / name).write_bytes((header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes())[:cut])
    return write


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def all_of(*makers):
    return lambda folder: [make(folder) for make in makers]


TEXT = b"All work and no play makes a dull model. " * 30
SHARD = ["--train-data={}/x.bin"]
ANY_TEXT = ["--train-data={}/x.txt"]

DATA = [
    Case("data missing", ["--train-data=none.txt"], ["--train-data: there is no file 'none.txt'"], ranks=(1, 2, 4)),
    Case("shard missing", ["--train-data=none.bin"], ["--train-data: there is no file 'none.bin'"]),
    Case("validation data missing", ["--val-data=none.txt"], ["--val-data: there is no file 'none.txt'"], ranks=(1, 2)),
    Case("text empty", ANY_TEXT, ["x.txt' is empty"], file("x.txt", b""), ranks=(1, 2)),
    Case("shard empty", SHARD, ["x.bin' is empty"], file("x.bin", b"")),
    Case("data is a directory", ["--train-data={}"], ["is a directory", "*.bin"]),
    Case("shard is a directory", SHARD, ["x.bin' is a directory"], lambda folder: (folder / "x.bin").mkdir()),
    Case("data is a device", ["--train-data=/dev/zero"], ["/dev/zero' is not a regular file"]),
    Case("data is a pipe", ANY_TEXT, ["x.txt' is not a regular file"], lambda folder: os.mkfifo(folder / "x.txt")),
    Case("data leads to itself", ANY_TEXT, ["cannot read '", "symbolic links"],
         lambda folder: (folder / "x.txt").symlink_to("x.txt")),
    Case("data below a file", ["--train-data={}/x.txt/y"], ["cannot read '", "Not a directory"], file("x.txt", TEXT)),
    Case("pattern matches nothing", ["--train-data={}/*.bin"], ["no file matches '", "/*.bin'"], ranks=(1, 2)),
    Case("validation pattern matches nothing", ["--val-data={}/val_*.bin"], ["--val-data: no file matches '"]),
    Case("pattern matches text and shards", ["--train-data={}/x.*"], ["matches 2 files, 1 of them token shards"],
         all_of(shard(), file("x.txt", TEXT))),
    Case("pattern matches two texts", ["--train-data={}/*.txt"], ["matches 2 files", "one text file"],
         all_of(file("x.txt", TEXT), file("y.txt", TEXT))),
    Case("one of the shards is damaged", ["--train-data={}/*.bin"], ["b.bin' is damaged"],
         all_of(shard("a.bin"), shard("b.bin", cut=-1), shard("c.bin"))),
    Case("text too short for a sample", ANY_TEXT, ["a sample takes 17 tokens"], file("x.txt", b"To be or not")),
    Case("text too short for a batch", ANY_TEXT,
         ["9 sequences", "one step takes 24", "a smaller --global-batch-tokens, 144 at most"],
         file("x.txt", b"x" * 170), ranks=(1, 2)),
    Case("shard too short for a sample", SHARD, ["16 tokens", "a sample takes 17 tokens"], shard(tokens=(1,) * 16)),
    Case("shard too short for a batch", SHARD, ["23 sequences", "one step takes 24"], shard(tokens=(1,) * 384)),
    Case("shards each too short for a sample", ["--train-data={}/*.bin"], ["30 tokens", "a sample takes 17 tokens"],
         all_of(shard("a.bin", (1,) * 15), shard("b.bin", (1,) * 15))),
    Case("validation text too short", ["--val-data={}/x.txt"], ["--val-data:", "1 token", "at least 2 tokens"],
         file("x.txt", b"x")),
    Case("header cut", SHARD, ["x.bin' has 100 bytes, fewer than a token shard's header"], shard(cut=100)),
    Case("header and nothing", SHARD, ["x.bin' is damaged", "600 tokens", "0 bytes follow"], shard(cut=1024)),
    Case("shard truncated", SHARD, ["x.bin' is damaged", "600 tokens", "1000 bytes follow"], shard(cut=2024), ranks=(1, 2)),
    Case("shard truncated within a token", SHARD, ["x.bin' is damaged", "1199 bytes follow"], shard(cut=-1)),
    Case("shard with more than it says", SHARD, ["x.bin' is damaged", "599 tokens", "1200 bytes"], shard(length=599)),
    Case("wide shard truncated", SHARD, ["x.bin' is damaged", "600 tokens", "2396 bytes"],
         shard(magic=20240801, version=7, dtype=np.uint32, cut=-4)),
    Case("bad magic", SHARD, ["begins with 20240519", "20240520", "20240801"], shard(magic=20240519), ranks=(1, 2)),
    Case("text called a shard", SHARD, ["x.bin' is no token shard", ".bin"], file("x.bin", TEXT)),
    Case("bad version", SHARD, ["version 2", "only 1 is known"], shard(version=2)),
    Case("bad version of a wide shard", SHARD, ["version 1", "only 7 is known"], shard(magic=20240801)),
    Case("negative length", SHARD, ["x.bin' is damaged", "header says -1 tokens"], shard(length=-1), ranks=(1, 2)),
    Case("absurd length", SHARD, ["header says 2147483647 tokens"], shard(length=2**31 - 1)),
    Case("no tokens", SHARD, ["x.bin' holds no tokens"], shard(tokens=())),
    Case("token past the vocabulary", SHARD, ["x.bin' has token 256 at position 599", "vocabulary of 256",
                                              "--vocab-size 257"], shard(tokens=(0,) * 599 + (256,)), ranks=(1, 2, 4)),
    Case("wide token past the vocabulary", SHARD, ["token 4294967295 at position 3"],
         shard(tokens=(1, 2, 3, 2**32 - 1) * 150, magic=20240801, version=7, dtype=np.uint32)),
    Case("byte past the vocabulary", [*ANY_TEXT, "--vocab-size=100"], ["x.txt' has byte 108 at position 1"],
         file("x.txt", TEXT)),
    Case("validation token past the vocabulary", ["--val-data={}/x.bin"], ["x.bin' has token 999 at position 0"],
         shard(tokens=(999,) * 600)),
    Case("prompt of another vocabulary", ["--vocab-size=300", "--prompt=Once"], ["--prompt: Once is no token",
                                                                                 "ids from 0 to 299"], ranks=(1, 2)),
]

# ---- safetensors files


def raw(header, data=b"", length=None):
    """Writes x.safetensors of any header, a text or an object, whose length may be a lie."""
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


INIT = ["--init={}/x.safetensors"]
ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def tensor_of(**changes):
    return {"a": {**ONE["a"], **changes}}


SAFETENSORS = [
    Case("weights missing", ["--init=none.safetensors"], ["none.safetensors: No such file"], ranks=(1, 2, 4)),
    Case("weights are a directory", ["--init={}"], ["is not a file"]),
    Case("weights empty", INIT, ["x.safetensors is not a safetensors file: it has only 0 bytes"],
         file("x.safetensors", b"")),
    Case("weights are a text", INIT, ["x.safetensors is cut off or not a safetensors file"], file("x.safetensors", TEXT)),
    Case("header cut off", INIT, ["x.safetensors is cut off"], cut(weights(), 100), ranks=(1, 2)),
    Case("header length zero", INIT, ["x.safetensors", "not JSON"], raw(b"")),
    Case("header length absurd", INIT, ["its header would have 18446744073709551615 bytes"], raw(ONE, bytes(8), 2**64 - 1)),
    Case("header length one too many", INIT, ["x.safetensors"], raw(ONE, bytes(8), len(json.dumps(ONE)) + 1)),
    Case("header not JSON", INIT, ["x.safetensors", "its header is not JSON at byte 8"], raw(b'{"a": nonsense}')),
    Case("header nested without end", INIT, ["x.safetensors", "nested too deeply"], raw(b'{"a":' + b"[" * 100000)),
    Case("header a list", INIT, ["x.safetensors", "not a table"], raw([1, 2])),
    Case("header names a tensor twice", INIT, ["\"a\" is there twice"], raw(b'{"a":{},"a":{}}')),
    Case("tensor without offsets", INIT, ['tensor "a": needs dtype, shape and data_offsets'],
         raw({"a": {"dtype": "F32", "shape": [2]}}, bytes(8))),
    Case("tensor of an unknown dtype", INIT, ['tensor "a": its dtype is unknown'], raw(tensor_of(dtype="F31"), bytes(8))),
    Case("tensor of a negative size", INIT, ['tensor "a": its shape is not'], raw(tensor_of(shape=[-2]), bytes(8))),
    Case("tensor beyond 64 bits", INIT, ['tensor "a": its shape is too large'],
         raw(tensor_of(shape=[2**62, 2**62]), bytes(8))),
    Case("tensor larger than its data", INIT, ['tensor "a": its data_offsets are not as far apart'],
         raw(tensor_of(shape=[3]), bytes(8))),
    Case("tensor beyond the file", INIT, ['tensor "a": its data end at 8, but the file holds only 7'],
         raw(ONE, bytes(7)), ranks=(1, 2)),
    Case("tensors overlap", INIT, ['tensor "b": its data begin at 4, where the tensor before it ends at 8'],
         raw({**ONE, "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8))),
    Case("gap between tensors", INIT, ['tensor "a": its data begin at 4'], raw(tensor_of(data_offsets=[4, 12]), bytes(12))),
    Case("data that no tensor has", INIT, ["the tensors have 8 bytes, but the file holds 9"], raw(ONE, bytes(9))),
    Case("weights cut off", INIT, ["cut off", "x.safetensors"], cut(weights(), -1), ranks=(1, 2)),
    Case("tensor missing", INIT, ["x.safetensors: there is no tensor \"h.1.ln_2.bias\""],
         weights(lambda tensors: tensors.pop("h.1.ln_2.bias"))),
    Case("tensor of no such model", INIT, ["x.safetensors: h.2.ln_1.bias is no tensor of this model of 2 blocks"],
         weights(replaced("h.2.ln_1.bias", np.zeros(32, np.float32)))),
    Case("weights of a larger vocabulary", INIT,
         ["x.safetensors: wte.weight has the shape (300, 32), this model needs (256, 32)"], weights(vocabulary=300),
         ranks=(1, 2)),
    Case("weights of a wider model", [*INIT, "--channels=64"],
         ["wte.weight has the shape (256, 32), this model needs (256, 64)"], weights()),
    Case("weights of a deeper model", [*INIT, "--layers=1"], ["h.1.", "no tensor of this model of 1 block"], weights()),
    Case("weights of a shallower model", [*INIT, "--layers=3"], ['there is no tensor "h.2.ln_1.weight"'], weights()),
    Case("weights of another context", [*INIT, "--seq-len=8"],
         ["wpe.weight has the shape (16, 32), this model needs (8, 32)"], weights()),
    Case("tensor transposed", INIT, ["h.0.mlp.c_fc.weight has the shape (128, 32), this model needs (32, 128)"],
         weights(replaced("h.0.mlp.c_fc.weight", np.zeros((128, 32), np.float32)))),
    Case("tensor of whole numbers", INIT, ['tensor "ln_f.bias" has the dtype I32', "F32"],
         weights(replaced("ln_f.bias", np.zeros(32, np.int32)))),
    Case("a head of its own", INIT, ["lm_head.weight differs from wte.weight"],
         weights(replaced("lm_head.weight", np.ones((256, 32), np.float32)))),
    Case("weight infinite", INIT, ["x.safetensors: h.1.mlp.c_proj.weight", "inf at (127, 3)", "step 1"],
         weights(holding("h.1.mlp.c_proj.weight", (127, 3), np.inf)), ranks=(1, 2)),
    Case("weight nan", INIT, ["x.safetensors: ln_f.bias", "nan at (31)"], weights(holding("ln_f.bias", 31, np.nan))),
    Case("weight beyond fp32", INIT, ["x.safetensors: wte.weight", "inf at (0, 0)"],
         weights(holding("wte.weight", (0, 0), 1e300), dtype=np.float64)),
    Case("weight infinite in half precision", INIT, ["x.safetensors: wpe.weight", "-inf at (15, 31)"],
         weights(holding("wpe.weight", (15, 31), -np.inf), dtype=np.float16)),
]

# ---- checkpoints

# A whole checkpoint of the small model after 4 steps, made once, of which a case has a copy in its folder.
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
NEWEST = ["--out-dir={}/run", "--resume"]

CHECKPOINTS = [
    Case("no such checkpoint", ["--resume=none"], ["no checkpoint: none is not a directory"], ranks=(1, 2, 4)),
    Case("checkpoint is a file", ["--resume={}/x"], ["x is not a directory"], file("x", b"x")),
    Case("directory without a manifest", ["--resume={}"], ["has no manifest.json"]),
    Case("manifest missing", NEWEST, [CHECKPOINT, "has no manifest.json"], without("manifest.json"), ranks=(1, 2)),
    Case("manifest empty", RESUME, ["the checkpoint is damaged", "manifest.json"], manifest(lambda text: "")),
    Case("manifest cut off", RESUME, ["the checkpoint is damaged", "manifest.json"], manifest(lambda text: text[:-20]),
         ranks=(1, 2)),
    Case("manifest of something else", RESUME, ["the checkpoint is damaged", "manifest.json"], manifest(lambda text: "{}")),
    Case("manifest a list", RESUME, ["the checkpoint is damaged", "manifest.json"], manifest(lambda text: "[1]")),
    Case("manifest of another version", RESUME, ["manifest.json is not a manifest that this program reads", "version 2"],
         manifest(lambda text: text.replace('"version": 2', '"version": 3'))),
    Case("manifest's step changed", RESUME, ["manifest.json does not have the checksum it gives"],
         manifest(lambda text: text.replace('"step": 4', '"step": 3'))),
    Case("manifest is a directory", RESUME, ["manifest.json: Is a directory"],
         checkpoint(lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()))),
    Case("checkpoint without weights", RESUME, ["the checkpoint is damaged", "model.safetensors: No such file"],
         without("model.safetensors"), ranks=(1, 2)),
    Case("checkpoint without moments", RESUME, ["the checkpoint is damaged", "optimizer.safetensors: No such file"],
         without("optimizer.safetensors")),
    Case("checkpoint's weights cut off", NEWEST, ["model.safetensors has 1000 bytes, its manifest says", "an older one"],
         checkpoint(lambda folder: os.truncate(folder / "model.safetensors", 1000))),
    Case("checkpoint's weights damaged", RESUME, ["model.safetensors does not have the checksum"],
         flipped("model.safetensors", -1), ranks=(1, 2)),
    Case("checkpoint's moments damaged", RESUME, ["optimizer.safetensors does not have the checksum"],
         flipped("optimizer.safetensors", 5)),
    Case("checkpoint of a narrower model", [*RESUME, "--channels=64"],
         [CHECKPOINT + " is of another model: its --channels is 32, this run's 64"], checkpoint(), ranks=(1, 2)),
    Case("checkpoint of a deeper model", [*RESUME, "--layers=1"], ["its --layers is 2, this run's 1"], checkpoint()),
    Case("checkpoint of other heads", [*RESUME, "--heads=4"], ["its --heads is 2, this run's 4"], checkpoint()),
    Case("checkpoint beyond the last step", [*NEWEST, "--steps=3"], ["stands after step 4, beyond --steps 3"], checkpoint()),
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
    Case("metrics in a directory's place", ["--out-dir={}/run"], ["--metrics: ", "metrics.jsonl is a directory"],
         lambda folder: (folder / "run/metrics.jsonl").mkdir(parents=True)),
    # By a link, so that a program that goes wrong does not replace the device.
    Case("metrics on a full disk", ["--metrics={}/full"], ["full: No space left"],
         lambda folder: (folder / "full").symlink_to("/dev/full"), ranks=(1, 2)),
    Case("metrics over the data", [*ANY_TEXT, "--metrics={}/x.txt"], ["--metrics", "x.txt would overwrite"],
         file("x.txt", TEXT), ranks=(1, 2)),
    Case("metrics over the data by another name", [*ANY_TEXT, "--metrics={}/./link"], ["would overwrite"],
         all_of(file("x.txt", TEXT), lambda folder: (folder / "link").symlink_to("x.txt"))),
    Case("metrics over a shard of many", ["--train-data={}/*.bin", "--metrics={}/b.bin"], ["b.bin would overwrite"],
         all_of(shard("a.bin"), shard("b.bin"))),
    Case("metrics over the weights", [*INIT, "--metrics={}/x.safetensors"], ["x.safetensors would overwrite"], weights()),
    Case("export over the data", [*ANY_TEXT, "--export={}/x.txt"], ["--export", "x.txt would overwrite"],
         file("x.txt", TEXT)),
    Case("export over the metrics", ["--metrics={}/x", "--export={}/x"], ["--export and --metrics are the same file"]),
    Case("export is a directory", ["--export={}"], ["--export: ", "is a directory"], ranks=(1, 2)),
    Case("export is a directory to be", ["--export={}/x/"], ["--export: ", "x/ is a directory"]),
    Case("export below a file", ["--export={}/x/y.safetensors"], ["--export: cannot write", "x is not a directory"],
         file("x", b"x")),
    Case("export where nothing can be made", ["--export=/proc/x.safetensors"], ["--export: cannot create files in /proc"]),
    Case("export to a pipe", ["--export={}/x"], ["--export: ", "x is not a regular file"],
         lambda folder: os.mkfifo(folder / "x")),
]

CASES = OPTIONS + SIZES + DATA + SAFETENSORS + CHECKPOINTS + OUTPUTS
RUNS = [(case, ranks) for case in CASES for ranks in case.ranks]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """The outcome of every run that is asked for, as futures by (case, ranks)."""
    asked = {item.callspec.params["number"] for item in request.session.items
             if getattr(item, "originalname", "") == "test_is_refused_with_one_line"}
    base = tmp_path_factory.mktemp("wrong")
    make_checkpoint(base)
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield {number: pool.submit(outcome_of, *RUNS[number][:1], base / str(number), RUNS[number][1])
               for number in sorted(asked)}


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{case.name}, {ranks}" for case, ranks in RUNS])
def test_is_refused_with_one_line(number, outcomes):
    case, _ = RUNS[number]
    outcome = outcomes[number].result()
    line = one_error(outcome.stderr)
    assert outcome.status == 1
    for word in case.words:
        assert word in line
    assert outcome.after == outcome.before
    assert outcome.seconds < SECONDS


def test_names_of_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


# ---- what goes wrong in the middle of a run


class Running:
    """The program at work in a folder, on so many processes."""

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
            self.process.terminate()  # on which mpirun ends its ranks
        return self.process.returncode, stderr


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def overwrite_tokens(path):
    with open(path, "r+b") as file:  # in place: the file keeps its length all the while
        file.seek(1024)
        file.write(b"\xff" * 1200)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage, words", [
    (overwrite_tokens, ["x.bin' has token 65535", "--vocab-size"]),
    (lambda path: os.truncate(path, 1100), ["x.bin' has 1100 bytes, it had 2224"]),
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
    # What was saved is whole.
    (folder / "x.bin").write_bytes(good)
    result = run([*arguments, "--resume", "--steps=0"], folder, 1)
    assert result.returncode == 0, result.stderr


def limited(size):
    """Files of this process cannot grow beyond the size: a full disk for who may not mount one."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# The weights of the small model are 136 KB, its moments 272 KB.
@pytest.mark.parametrize("size, name", [(100_000, "model.safetensors"), (200_000, "optimizer.safetensors")])
def test_a_full_disk_keeps_the_last_checkpoint(size, name, tmp_path):
    arguments = ["--out-dir={}/run"]
    assert run([*arguments, "--steps=2"], tmp_path, 1).returncode == 0
    before = contents(tmp_path / "run/checkpoint-00000002")
    result = run([*arguments, "--resume"], tmp_path, 1, limited(size))
    line = one_error(result.stderr)
    assert result.returncode == 1
    assert f"cannot write {tmp_path}/run/checkpoint-00000004.partial/{name}: File too large" in line
    assert "before this one are whole" in line
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000002"]
    assert contents(tmp_path / "run/checkpoint-00000002") == before
    result = run([*arguments, "--resume"], tmp_path, 1)
    assert result.returncode == 0, result.stderr
    assert checkpoints(tmp_path / "run") == ["checkpoint-00000002", "checkpoint-00000004"]


def test_a_disk_that_fills_up_under_the_metrics(tmp_path):
    result = run(["--out-dir={}/run", "--steps=1000"], tmp_path, 1, limited(8000))
    assert result.returncode == 1
    assert "run/metrics.jsonl: File too large" in one_error(result.stderr)
    assert (tmp_path / "run/metrics.jsonl").stat().st_size == 8000


def test_a_full_disk_leaves_the_metrics_of_the_run_before(tmp_path):
    assert run(["--out-dir={}/run"], tmp_path, 1).returncode == 0
    before = contents(tmp_path)
    result = run(["--out-dir={}/run"], tmp_path, 1, limited(100))
    assert result.returncode == 1
    assert "File too large" in one_error(result.stderr)
    assert contents(tmp_path) == before


def test_export_makes_its_directory(tmp_path):
    assert run(["--out-dir={}/run", "--export={}/a/b/x.safetensors"], tmp_path, 1).returncode == 0
    assert "wte.weight" in safetensors_numpy.load(tmp_path / "a/b/x.safetensors")


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
    step, tensor = re.match(r"step (\d+): the loss is (?:nan|inf).* first tensor that is not finite is (.*?);",
                            line).groups()
    assert int(step) > 5
    assert re.search(r"(wte|wpe|h\.[01]|ln_f|lm_head)", tensor)
    # Step 5 was made, so its checkpoint and the earlier ones are there, and none of the step that was not.
    assert contents(folder / CHECKPOINT) == before
    assert f"checkpoint-{int(step):08}" not in checkpoints(folder / "run")
    assert len(program.Run(folder / "run").lines) == int(step) - 1
    result = run(["--out-dir={}/other", "--resume={}/" + CHECKPOINT, "--steps=5"], folder, 1)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps, words", [
    (4, ["step 1: its update made the weight wte.weight not finite, so it is not saved"]),
    (1, ["the validation after step 1 is nan", "the weight wte.weight"]),
], ids=["saving", "validating"])
def test_weights_that_are_not_finite_are_not_saved(steps, words, ranks, tmp_path):
    """A decay that multiplies the weights by -1e66, after a loss and a gradient that are finite."""
    folder = tmp_path / "case"
    folder.mkdir()
    result = run(["--out-dir={}/run", "--checkpoint-every=1", f"--steps={steps}", "--val-every=0", "--weight-decay=1e38",
                  "--lr=1e30"], folder, ranks)
    assert result.returncode == 1
    line = one_error(result.stderr)
    for word in words:
        assert word in line
    assert checkpoints(folder / "run") == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_that_is_not_finite_names_the_first_output(ranks, tmp_path):
    """A step so large that the weights, all finite, overflow the forward pass."""
    result = run(["--out-dir={}/run", "--steps=1", "--lr=1e10", "--warmup-steps=0", "--grad-clip=0"], tmp_path, ranks)
    assert result.returncode == 1
    assert re.search(r"validation after step 1 is nan; the first tensor that is not finite is the output of h\.0\.attn;",
                     one_error(result.stderr))


def overflowing_output(tensors):
    tensors["h.1.ln_2.weight"][:] = 1
    tensors["h.1.mlp.c_fc.weight"] = np.sign(tensors["h.1.mlp.c_fc.weight"]) * np.float32(3e38)


def overflowing_row(tensors):
    tensors["wte.weight"][200] = 3e38


def overflowing_gradient(tensors):
    """The output of h.1.ln_2 is tiny and the weights behind it are huge, and so is its gradient, of 1e38 times what
    flows back, which the large logits make more than 3."""
    tensors["h.1.ln_2.weight"][:] = 2e-38
    tensors["h.1.ln_2.bias"][:] = 0
    tensors["h.1.mlp.c_fc.weight"] = np.sign(tensors["h.1.mlp.c_fc.weight"]) * np.float32(1e38)
    tensors["h.1.mlp.c_proj.weight"][:] *= 50
    tensors["wte.weight"] *= 5000
    tensors["ln_f.weight"][:] = 1e4


def overflowing_norm(tensors):
    """Each gradient is finite, the sum of their squares is not."""
    tensors["ln_f.weight"][:] = 1e30
    tensors["wte.weight"] *= np.float32(1e-30)


# One batch, in which a single token, in the share of the last of the ranks, is 200.
TOKENS = [*(65,) * 383, 200, 65]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("change, tensor", [
    (overflowing_output, "the output of h.1.mlp.c_fc"),
    (overflowing_row, "the output of h.0.ln_1"),
    (overflowing_gradient, "the gradient of h.1.ln_2.bias"),
    (overflowing_norm, "the norm of all gradients, each of which is finite"),
], ids=lambda value: value.__name__ if callable(value) else "")
def test_the_first_tensor_that_is_not_finite_is_named(change, tensor, ranks, tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    weights(change)(folder)
    shard(tokens=TOKENS)(folder)
    result = run([*INIT, *SHARD, "--out-dir={}/run", "--checkpoint-every=1"], folder, ranks)
    assert result.returncode == 1
    line = one_error(result.stderr)
    assert line.startswith("step 1: ") and f"the first tensor that is not finite is {tensor};" in line
    assert checkpoints(folder / "run") == []
