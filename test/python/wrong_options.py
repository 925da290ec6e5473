"""Cases of test_wrong_input.py: options, configuration files, sizes, and the data that options name."""

import os

import numpy as np

from refused import Case

# ---- options and configuration files


def config(text):
    return lambda folder: (folder / "c.toml").write_text(text)


OPTIONS = [
    Case("unknown option", ["--layerz=3"], ["no option --layerz", "--layers"], ranks=(1, 2)),
    Case("unknown option spelled out", ["--learning-rate=1e-3"], ["no option --learning-rate", "the nearest is --lr"]),
    Case("unknown option with a value apart", ["--globl-batch-tokens", "3"],
         ["--globl-batch-tokens", "--global-batch-tokens"]),
    Case("unknown short option", ["-z"], ["-z", "--help"]),
    Case("the beginning of an option", ["--lay=3"], ["no option --lay; the nearest is --layers"]),
    Case("an option like no other", ["--np", "4"], ["no option --np; ./train_gpt --help"]),
    Case("two dashes", ["--", "x"], ["no option --; ./train_gpt --help"]),
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
    Case("no such dtype of gradients", ["--gradient-dtype=fp16"], ["--gradient-dtype: 'fp16'", "{fp32,bf16}"]),
    Case("gradients in bf16 where all is fp32", ["--gradient-dtype=bf16"],
         ["--gradient-dtype bf16 goes with --dtype bf16", "--dtype is fp32"], ranks=(1, 2)),
    Case("stochastic rounding where nothing is rounded", ["--stochastic-rounding", "--dtype=fp32"],
         ["--stochastic-rounding rounds weights to bf16", "try --dtype bf16"], ranks=(1, 2)),
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
    Case("configuration with a key of many parts", ["--config={}/c.toml"], ["c.toml has 100003 bytes", "32768 at most"],
         config("a" + ".a" * 50000 + "=1")),
    Case("configuration key like no other", ["--config={}/c.toml"], ["c.toml, line 1: there is no setting np; ./train_gpt --help"],
         config("np = 2\n")),
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
    Case("configuration in a named pipe", ["--config={}/pipe"], ["pipe is a pipe"], lambda folder: os.mkfifo(folder / "pipe"),
         ranks=(1, 2)),
    Case("configuration leads to itself", ["--config={}/c.toml"], ["cannot read ", "c.toml: ", "symbolic links"],
         lambda folder: (folder / "c.toml").symlink_to("c.toml")),
    Case("the configuration to be saved is a pipe", ["--out-dir={}/run"], ["--out-dir: ", "config.toml is a pipe"],
         lambda folder: ((folder / "run").mkdir(), os.mkfifo(folder / "run/config.toml"))),
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
    Case("configuration value out of range", ["--config={}/c.toml"], ["c.toml, line 2: --weight-decay -3 is out of range"],
         config("seed = 1\nweight-decay = -3\n"), ranks=(1, 2)),
    Case("configuration size out of range", ["--config={}/c.toml"], ["c.toml, line 1: --vocab-size 0 is out of range"],
         config("vocab-size = 0\n")),
    Case("configuration of data that are missing", ["--config={}/c.toml"],
         ["c.toml, line 3: --train-data: there is no file 'none.txt'"],
         config("seed = 1\n\ntrain-data = 'none.txt'\n"), ranks=(1, 2)),
    Case("configuration that the command line overrides", ["--config={}/c.toml", "--lr=-1"], ["error: --lr -1 is out of range"],
         config("lr = 1\n")),
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
         ["--micro-batch-size 1000000000 is out of range; give 1 to 16384"]),
    Case("products beyond 64 bits", ["--channels=9223372036854775807", "--heads=1", "--layers=9223372036854775807"],
         ["e+", "EiB", "this machine has"]),
    Case("context whose batch leaves 64 bits", ["--seq-len=9223372036854775807"], ["--seq-len 9223372036854775807", "EiB"]),
    Case("too large, usual sizes", ["--model=gpt2-xl", "--layers=48", "--heads=25", "--channels=1600", "--seq-len=1024",
                                    "--global-batch-tokens=16384000", "--micro-batch-size=16000"],
         ["1,557,611,200 parameters", "activations", "this machine has"]),
    Case("absurd batch", ["--global-batch-tokens=1000000000000"], ["--global-batch-tokens 1000000000000", "micro-batches"]),
    Case("batch beyond its range", ["--global-batch-tokens=9223372036854775807"], ["is out of range; give 16 to"]),
    Case("heads that do not divide", ["--heads=3"], ["--heads 3 does not divide --channels 32; try --channels 30 or 33"],
         ranks=(1, 2)),
    Case("more heads than channels", ["--heads=64"], ["--heads 64 are more than --channels 32", "such as 2"]),
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
    Case("text too short for a sample", ANY_TEXT,
         ["--train-data is too short: first 90% of ", "x.txt, 10 tokens; a sample takes 17 tokens"],
         file("x.txt", b"To be or not")),
    Case("text too short for a batch", ANY_TEXT,
         ["--train-data is too short: ", "9 sequences", "one step takes 24", "a smaller --global-batch-tokens, 144 at most"],
         file("x.txt", b"x" * 170), ranks=(1, 2)),
    Case("shard too short for a sample", SHARD, ["16 tokens", "a sample takes 17 tokens"], shard(tokens=(1,) * 16)),
    Case("shard too short for a batch", SHARD, ["23 sequences", "one step takes 24"], shard(tokens=(1,) * 384)),
    Case("shards each too short for a sample", ["--train-data={}/*.bin"], ["30 tokens", "a sample takes 17 tokens"],
         all_of(shard("a.bin", (1,) * 15), shard("b.bin", (1,) * 15))),
    Case("validation text too short", ["--val-data={}/x.txt"], ["--val-data is too short: ", "1 token;", "at least 2 tokens"],
         file("x.txt", b"x")),
    Case("a text's last tenth too short", [*ANY_TEXT, "--seq-len=1", "--global-batch-tokens=1"],
         ["--train-data is too short to validate on: last 10% of ", "1 token;"], file("x.txt", b"0123456789")),
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
    Case("byte past the vocabulary", [*ANY_TEXT, "--vocab-size=100"], ["x.txt' has byte 108 at position 1",
                                                                  "--vocab-size 122 or more, which all of it needs"],
         file("x.txt", TEXT)),
    Case("bytes past the vocabulary, the largest for validation", [*ANY_TEXT, "--vocab-size=1"], ["--vocab-size 241 or more"],
         file("x.txt", TEXT + b"\xf0")),
    Case("tokens past the vocabulary", SHARD, ["token 300 at position 1", "--vocab-size 60001 or more"],
         shard(tokens=(0, 300, *(5,) * 100000, 60000))),
    Case("validation token past the vocabulary", ["--val-data={}/x.bin"], ["x.bin' has token 999 at position 0"],
         shard(tokens=(999,) * 600)),
    Case("prompt of another vocabulary", ["--vocab-size=300", "--prompt=Once"], ["--prompt: Once is no token",
                                                                                 "ids from 0 to 299"], ranks=(1, 2)),
]
