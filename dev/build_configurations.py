"""The configurations that compare_builds.py runs with two builds, as tables, and the files that they read.

A row of a table is `processes | name | more options`. WORDS maps the words of the name to options; text before a colon in
the name is only a label. Words with `=` among the options are environment variables, such as MPI=0, which starts the processes without mpirun. A row that begins with
`then` continues from the output of the row before it, in the folder {first}. A training writes into the folder run; {files}
is the folder of `write_files`.

Any two words of different kinds (schedule, ZeRO stage, tensor parallelism, recompute, accumulation, dtype) that can be
combined occur together in some row of the block `every two meet` (pairwise testing).
"""

import dataclasses
import fnmatch
import json
import pathlib
import re
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "test/python"))
import program  # noqa: E402  (of the tests)

SIMULATED = "build/test/train_gpt-plain"

# The model has four blocks, so that each of four chunks of a pipeline has one. Micro-batches have 2
# sequences, so that a step has 2 to 8 of them. The learning rate is large, so that four steps change every
# weight much.
TRAINING = """--layers 4 --heads 4 --channels 32 --seq-len 32 --vocab-size 256 --steps 4 --global-batch-tokens 512 --micro-batch-size 2
              --lr 1e-2 --warmup-steps 2 --val-batches 1 --sample-tokens 0 --out-dir run"""
# Simulated GPUs need a second for a small step.
SIMULATED_TRAINING = """--layers 2 --heads 2 --channels 16 --seq-len 16 --vocab-size 256 --steps 3 --global-batch-tokens 64 --micro-batch-size 1
                        --lr 1e-2 --warmup-steps 2 --val-batches 1 --sample-tokens 0 --out-dir run"""

WORDS = {
    "fp32": "--dtype fp32",
    "bf16": "--dtype bf16",
    "bf16-grads": "--dtype bf16 --gradient-dtype bf16",
    "bf16-sr": "--dtype bf16 --stochastic-rounding",
    "bf16-grads-sr": "--dtype bf16 --gradient-dtype bf16 --stochastic-rounding",
    "zero-0": "--zero-stage 0",
    "zero-1": "--zero-stage 1",
    "zero-2": "--zero-stage 2",
    "zero-3": "--zero-stage 3",
    "hybrid-1": "--zero-stage 1 --zero-shard-size 2",
    "hybrid-2": "--zero-stage 2 --zero-shard-size 2",
    "hybrid-3": "--zero-stage 3 --zero-shard-size 2",
    "naive": "--pipeline-parallel 2 --pipeline-schedule naive",
    "gpipe": "--pipeline-parallel 2 --pipeline-schedule gpipe",
    "1f1b": "--pipeline-parallel 2 --pipeline-schedule 1f1b",
    "interleaved": "--pipeline-parallel 2 --pipeline-schedule interleaved",
    "zb-h1": "--pipeline-parallel 2 --pipeline-schedule zb-h1",
    "tp2": "--tensor-parallel 2",
    "tp2-sp": "--tensor-parallel 2 --sequence-parallel",
    "selective": "--recompute selective",
    "block": "--recompute block",
    "every-2": "--recompute block --recompute-every 2",
    "step": "--reduce-every step",
    "micro-batch": "--reduce-every micro-batch",
}

ON_CPU = """
# one process
1 | fp32
1 | bf16
1 | bf16-sr
1 | bf16-grads
1 | bf16-grads-sr selective
1 | fp32 selective
1 | fp32 block
1 | bf16 block
1 | fp32 every-2
1 | one micro-batch: fp32       | --micro-batch-size 16
1 | two threads: fp32           | OMP_NUM_THREADS=2
1 | two threads: bf16           | OMP_NUM_THREADS=2 --micro-batch-size 16
1 | odd sizes: fp32             | --heads 3 --channels 27 --seq-len 13 --vocab-size 301 --global-batch-tokens 104
1 | odd sizes: bf16 block       | --heads 5 --channels 60 --seq-len 65 --vocab-size 257 --global-batch-tokens 260
1 | wsd: fp32                   | --lr-schedule wsd --warmup-steps 0 --grad-clip 0 --weight-decay 0
1 | linear: fp32                | --lr-schedule linear --seed 7 --beta1 0.8 --beta2 0.99 --eps 1e-6 --grad-clip 0.1
1 | a text: fp32                | --train-data {files}/text.txt --val-every 2
1 | shards: bf16                | --train-data {files}/train_*.bin --val-data {files}/val_000000.bin --lr-schedule constant --warmup-steps 0

# data-parallel processes
2 | zero-0 fp32
4 | zero-0 step fp32
4 | zero-0 micro-batch bf16-grads
4 | zero-1 step fp32
4 | zero-1 micro-batch bf16-sr
4 | zero-2 micro-batch fp32
4 | zero-2 step bf16-grads
4 | zero-2 micro-batch block bf16-grads-sr
4 | zero-3 micro-batch fp32
4 | zero-3 step bf16-sr
4 | zero-3 step selective fp32
4 | hybrid-1 step fp32
4 | hybrid-2 micro-batch bf16-grads
4 | hybrid-3 micro-batch fp32
4 | hybrid-3 step block bf16-grads-sr
8 | zero-2 step fp32            | --micro-batch-size 1
8 | zero-3 micro-batch bf16     | --micro-batch-size 1
3 | a third each: zero-1 fp32   | --global-batch-tokens 576
3 | a third each: zero-3 bf16   | --global-batch-tokens 576
4 | no overlap: zero-1 fp32     | --overlap-grad-reduce=false
4 | no overlap: zero-3 bf16     | --overlap-grad-reduce=false
4 | none ahead: zero-3 fp32     | --prefetch-units 0
4 | three ahead: zero-3 bf16    | --prefetch-units 3
4 | kept: zero-3 fp32           | --reshard-after-forward=false
4 | checked: hybrid-3 fp32      | --check-replicas-every 1
4 | TCP: zero-0 bf16-grads      | MPI=0
4 | TCP: zero-3 fp32            | MPI=0
4 | TCP: 1f1b tp2-sp fp32       | MPI=0

# stages of a pipeline
2 | naive fp32
2 | gpipe fp32
2 | 1f1b fp32
2 | interleaved fp32
2 | zb-h1 fp32
4 | four stages: naive bf16         | --pipeline-parallel 4 --layers 8
4 | four stages: gpipe bf16         | --pipeline-parallel 4 --layers 8
4 | four stages: 1f1b bf16          | --pipeline-parallel 4 --layers 8
4 | four stages: interleaved bf16   | --pipeline-parallel 4 --layers 8
4 | four stages: zb-h1 bf16         | --pipeline-parallel 4 --layers 8
2 | four chunks: interleaved fp32   | --virtual-stages 4 --layers 8
2 | uneven layers: 1f1b fp32        | --pipeline-layers 3,1
2 | uneven layers: zb-h1 every-2 fp32 | --pipeline-layers 1,3
4 | no overlap: zb-h1 zero-2 fp32   | --overlap-grad-reduce=false
4 | no overlap: interleaved zero-3 bf16 | --overlap-grad-reduce=false

# processes that share layers
2 | tp2 fp32
2 | tp2 selective bf16
2 | tp2 block fp32
2 | tp2 every-2 bf16-grads
2 | tp2-sp fp32
2 | tp2-sp selective bf16
2 | tp2-sp block fp32
2 | tp2-sp every-2 bf16-grads-sr
4 | four shares: tp2 fp32           | --tensor-parallel 4
4 | four shares: tp2-sp block bf16  | --tensor-parallel 4
4 | tp2 zero-1 step fp32
4 | tp2-sp zero-2 micro-batch fp32
4 | tp2 zero-3 bf16-grads
4 | tp2-sp zero-3 block bf16-sr

# every two meet
4 | zero-0 tp2 bf16-grads                               | --micro-batch-size 8
4 | zero-1 bf16                                         | --micro-batch-size 4
4 | zero-2 tp2-sp every-2 step fp32
4 | zero-3 block micro-batch bf16-grads-sr
8 | hybrid-3 tp2 selective step bf16-sr
8 | hybrid-3 tp2-sp bf16                                | --micro-batch-size 4
4 | naive zero-0 selective micro-batch fp32
8 | naive zero-1 tp2 block bf16-sr                      | --micro-batch-size 8
4 | naive zero-2 every-2 bf16-grads-sr                  | --micro-batch-size 8
8 | naive zero-3 tp2-sp every-2 step bf16
8 | naive hybrid-1 step bf16-grads
8 | gpipe zero-0 tp2-sp block step bf16
8 | gpipe zero-1 tp2-sp selective bf16-grads            | --micro-batch-size 8
8 | gpipe zero-2 tp2 micro-batch bf16-sr
8 | gpipe zero-3 tp2-sp every-2 micro-batch bf16-grads-sr
8 | gpipe hybrid-2 block micro-batch fp32
4 | 1f1b zero-0 step bf16-sr
8 | 1f1b zero-0 tp2 every-2 step bf16-grads
8 | 1f1b zero-1 tp2 every-2 step fp32
4 | 1f1b zero-2 selective bf16                          | --micro-batch-size 8
8 | 1f1b zero-3 tp2-sp block micro-batch bf16-grads
8 | 1f1b hybrid-3 every-2 bf16-grads-sr                 | --micro-batch-size 4
8 | interleaved zero-0 tp2-sp step bf16-grads-sr
8 | interleaved zero-1 tp2 every-2 micro-batch bf16
4 | interleaved zero-2 block step bf16-grads
4 | interleaved zero-3 selective step bf16-sr
8 | interleaved hybrid-3 every-2 step fp32
8 | zb-h1 zero-0 tp2-sp every-2 bf16-sr                 | --micro-batch-size 8
8 | zb-h1 zero-1 tp2 selective micro-batch bf16-grads-sr
4 | zb-h1 zero-2 block step bf16
8 | zb-h1 zero-3 tp2 fp32                               | --micro-batch-size 8
8 | zb-h1 hybrid-3 block bf16-grads                     | --micro-batch-size 4

# validation, samples, HellaSwag
1 | validation: fp32                    | --val-every 1 --val-batches 3
1 | all of it: bf16                     | --val-data {files}/text.txt --val-batches 0
4 | validation: zero-3 bf16             | --val-every 2 --val-batches 5
8 | validation: zb-h1 zero-1 tp2-sp block fp32 | --val-every 1 --val-batches 3
1 | samples: fp32                       | --sample-every 1 --sample-tokens 70 --prompt 'Anna saw' --seed 3
1 | samples: bf16 block                 | --sample-every 2 --sample-tokens 70 --temperature 1.2 --top-k 20
2 | samples: tp2-sp block fp32          | --sample-every 1 --sample-tokens 50 --prompt 'Anna saw'
4 | samples: zero-3 block bf16          | --sample-every 2 --sample-tokens 50 --temperature 0
4 | samples: interleaved every-2 zero-3 fp32 | --sample-every 2 --sample-tokens 50 --top-p 0.9
8 | samples: zb-h1 zero-3 tp2-sp block bf16 | --sample-every 2 --sample-tokens 50 --temperature 0
1 | HellaSwag: fp32                     | --eval-hellaswag {files}/examples.jsonl --eval-every 2
4 | HellaSwag: zero-3 bf16              | --eval-hellaswag {files}/examples.jsonl --eval-every 1
4 | HellaSwag: 1f1b tp2-sp block fp32   | --eval-hellaswag {files}/examples.jsonl --eval-examples 9

# a run that is stopped and goes on
1 | resume: fp32
    then 1 | fp32                       | --resume {first}/run --steps 8
1 | resume: bf16-grads-sr               | --checkpoint-every 2
    then 1 | bf16-grads-sr              | --resume {first}/run/checkpoint-00000002 --steps 8
2 | resume: tp2-sp block bf16
    then 2 | tp2-sp block bf16          | --resume {first}/run --steps 8
4 | resume: zero-1 fp32
    then 4 | zero-1 fp32                | --resume {first}/run --steps 8
4 | resume: zero-3 bf16-sr
    then 4 | zero-3 bf16-sr             | --resume {first}/run --steps 8
4 | resume: interleaved zero-2 fp32
    then 4 | interleaved zero-2 fp32    | --resume {first}/run --steps 8
8 | resume: zb-h1 zero-1 tp2 bf16-grads
    then 8 | zb-h1 zero-1 tp2 bf16-grads | --resume {first}/run --steps 8
4 | other mesh: zero-3 fp32
    then 2 | tp2 fp32                   | --resume {first}/run --steps 8
    then 1 | fp32 block                 | --resume {first}/run --steps 8
1 | other mesh: bf16
    then 8 | zb-h1 zero-1 tp2-sp bf16   | --resume {first}/run --steps 8
8 | other mesh: 1f1b hybrid-3 bf16-sr
    then 4 | gpipe zero-2 selective bf16-sr | --resume {first}/run --steps 8
2 | weights alone: interleaved fp32
    then 1 | fp32                       | --resume {first}/run --steps 0 --val-batches 4 --sample-tokens 40

# a run that begins with another one's weights
1 | export: fp32                        | --export weights.safetensors
    then 1 | fp32                       | --init {first}/weights.safetensors
4 | export: zero-3 bf16-sr              | --export weights.safetensors
    then 4 | zero-3 bf16-sr             | --init {first}/weights.safetensors
8 | export: zb-h1 zero-2 tp2-sp fp32    | --export weights.safetensors
    then 4 | 1f1b zero-1 bf16           | --init {first}/weights.safetensors --export weights.safetensors

# a text that goes on
1 | generate: fp32                      | --export weights.safetensors
    then 1 |                            | --generate --resume {first}/run --prompt 'Anna saw' --sample-tokens 100
    then 1 | bf16                       | --generate --init {first}/weights.safetensors --layers 4 --heads 4 --channels 32 --seq-len 32
                                          --vocab-size 256 --prompt Anna --sample-tokens 60 --temperature 0
2 | generate: tp2-sp block bf16
    then 4 | zero-3                     | --generate --resume {first}/run --prompt 'Anna saw' --sample-tokens 60 --top-k 30
    then 2 | tp2-sp                     | --generate --resume {first}/run --prompt Peter --sample-tokens 60 --top-p 0.9 --seed 5
4 | generate: interleaved zero-1 fp32
    then 4 | tp2 | --generate --resume {first}/run --prompt 'Anna saw' --sample-tokens 60 --temperature 2 --pipeline-parallel 2
"""

# Each process has a GPU. SIMT_SEED determines the order of queued operations.
ON_SIMULATED_GPUS = """
1 | fp32
1 | bf16-sr block               | --sample-every 2 --sample-tokens 20
2 | zero-0 bf16
2 | zero-1 fp32
2 | zero-2 micro-batch bf16-grads
2 | zero-3 bf16-sr selective
4 | hybrid-3 block fp32
2 | 1f1b bf16                   | --layers 4
2 | interleaved selective bf16  | --layers 4
2 | zb-h1 block fp32            | --layers 4
2 | tp2 fp32
2 | tp2-sp block bf16           | --sample-every 2 --sample-tokens 20
4 | 1f1b tp2-sp bf16
2 | naive bf16-grads            | --layers 4
2 | gpipe every-2 fp32          | --layers 4
4 | zb-h1 zero-3 selective bf16 | --layers 4
4 | interleaved zero-2 bf16-grads | --layers 4
4 | tp2 zero-3 bf16
1 | TF32: fp32                  | --tf32
2 | no overlap: zero-3 fp32     | --overlap-grad-reduce=false
2 | three ahead: zero-3 bf16    | --prefetch-units 3 --reshard-after-forward=false
2 | HellaSwag: zero-3 bf16      | --eval-hellaswag {files}/examples.jsonl --eval-examples 3
2 | resume: zero-1 bf16-grads-sr
    then 2 | zero-1 bf16-grads-sr | --resume {first}/run --steps 5
    then 2 | tp2 fp32           | --resume {first}/run --steps 5
1 | generate: bf16
    then 2 | tp2                | --generate --resume {first}/run --prompt 'Anna saw' --sample-tokens 20
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One command, without the program's folder; {first} and {files} are not yet filled in."""
    program: str
    ranks: int
    options: list
    environment: dict


@dataclasses.dataclass(frozen=True)
class Configuration:
    name: str
    first: Run
    then: list

    def matches(self, pattern):
        """Whether the pattern matches the whole name or a word of it."""
        return any(fnmatch.fnmatchcase(text, pattern) for text in (self.name, *self.name.replace(":", "").split()))


def make_run(row, executable, training, always, environment):
    """(name, Run) of a row."""
    ranks, name, *more = (part.strip() for part in row.split("|"))
    words = shlex.split(" ".join(more))
    variables = [word for word in words if re.match("[A-Z_]+=", word)]
    options = [option for word in name.split(":")[-1].split() for option in WORDS[word].split()]
    options += [word for word in words if word not in variables]
    # If an option is given twice, the program uses the last one. Generating refuses the options of a
    # training.
    usual = [*always, *([] if "--generate" in options else training.split())]
    return name, Run(executable, int(ranks), usual + options, environment | dict(variable.split("=", 1) for variable in variables))


def read_table(table, prefix, *usual):
    """The Configurations of a table."""
    rows = []
    for line in table.splitlines():
        if "|" in line:
            rows.append(line.strip())
        elif line.startswith(" "):  # continues the line above
            rows[-1] += " " + line.strip()
    found = []
    for row in rows:
        name, run = make_run(row.removeprefix("then "), *usual)
        if row.startswith("then "):
            found[-1].then.append(run)
        else:
            found.append(Configuration(prefix + name, run, []))
    return found


def configurations():
    """All configurations; their names differ."""
    found = [*read_table(ON_CPU, "", "train_gpt", TRAINING, ["--device", "cpu"], {}),
             *read_table(ON_SIMULATED_GPUS, "GPUs ", SIMULATED, SIMULATED_TRAINING, [], {"SIMT_SEED": "7"})]
    assert len({configuration.name for configuration in found}) == len(found)
    return found


PEOPLE, ANIMALS, PLACES = (["Anna", "Peter", "Mary", "Tom", "Old John"], ["a dog", "the hedgehog", "two cats"], ["the wood", "a small house", "the sea"])


def write_files(folder):
    """text.txt, shards of its bytes, and examples.jsonl in HellaSwag's own format."""
    stories = [f"{person} saw {animal} near {place}. {animal.capitalize()} ran to {person}, who laughed.\n"
               for place in PLACES for person in PEOPLE for animal in ANIMALS]
    text = "".join(stories[number * 7 % len(stories)] for number in range(90))
    (folder / "text.txt").write_text(text)
    third = len(text) // 3
    for name, part in (("train_000001", text[:third]), ("train_000002", text[third:-third]), ("val_000000", text[-third:])):
        program.write_token_file(folder / f"{name}.bin", part.encode())
    examples = [{"ind": number, "ctx_a": "", "ctx": f"{person} saw {animal} near", "label": number % 4,
                 "endings": [f"{place}." for place in PLACES] + [f"{animal}, and laughed."]}
                for number, (person, animal) in enumerate((person, animal) for person in PEOPLE for animal in ANIMALS)]
    (folder / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
