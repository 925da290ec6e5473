"""What goes wrong with GPUs, on simulated ones (simulated.py): one line on standard error, status 1, and no hang."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import time

import program
import pytest
import simulated
from refused import one_error

simulated.require()

CPU = str((program.ROOT / program.PROGRAM).resolve())
MODEL = ["--layers=1", "--heads=2", "--channels=16", "--seq-len=8", "--global-batch-tokens=16", "--steps=2",
         "--sample-tokens=0"]
NO_GPU = {"SIMT_GPUS": "0", "CUDA_VISIBLE_DEVICES": ""}
ONE_GPU = {"SIMT_GPUS": "1"}
OF_GPUS = "is for GPUs, and this run computes on the CPU; leave it out, or try --device cuda"
FAULT = "CUDA says \"an illegal memory access was encountered\" (cudaErrorIllegalAddress); if a kernel is to blame, " \
        "--cuda-sync names it"


@dataclasses.dataclass
class Case:
    name: str
    options: list
    words: list  # that the line contains
    variables: dict = dataclasses.field(default_factory=dict)
    ranks: int = 1
    executable: str = simulated.PLAIN
    late: bool = False  # found after the header is printed


CASES = [
    Case("two processes on one GPU", [], ["processes 0 and 1 would share one GPU (GPU simulated", "--share-gpu"], ONE_GPU, 2),
    Case("no GPU", ["--device=cuda"], ["--device cuda: CUDA finds no GPU", "driver", "try --device cpu"], NO_GPU),
    Case("no GPU, two processes", ["--device=cuda"], ["--device cuda: CUDA finds no GPU"], NO_GPU, 2),
    Case("no GPU on this machine", ["--device=cuda"], ["--device cuda: ", "try --device cpu"], NO_GPU, executable=CPU),
    # ---- memory: sizes that cannot fit are known before, what other processes take is not
    Case("a model that does not fit", ["--channels=800"],
         ["too large a model: 7,903,200 parameters and a micro-batch need at least", "the GPU has 37.6 MiB free",
          "give a smaller --model or --micro-batch-size"], {"SIMT_GPU_MEMORY": "45000000"}),
    Case("a model that does not fit twice", ["--share-gpu"], ["need 32.", "MiB of memory in each of 2 processes, and the GPU has"],
         {**ONE_GPU, "SIMT_GPU_MEMORY": "60000000"}, 2),
    *(Case(f"no memory for the {arena}", [],
           [f"the arena {arena} needs ", "iB of the GPU's memory, of which 4.0 GiB of 4.0 GiB are free; give a smaller --model"],
           {"SIMT_FAIL": f"memory:{number}"}, ranks, late=True)
      for ranks, number, arena in ((1, 1, "parameters"), (1, 3, "master"), (1, 6, "workspace"), (2, 2, "gradients"))),
    # ---- a kernel fails, while algorithms are timed and in a step
    *(Case(f"launch {number} fails", [], [FAULT], {"SIMT_FAIL": f"launch:{number}"}, ranks, late=True)
      for number, ranks in ((1, 1), (300, 1), (300, 2))),
    *(Case(f"launch {number} fails and is named", ["--cuda-sync"],
           ["kernel void llmc::cuda::", " threads) failed: an illegal memory access was encountered"],
           {"SIMT_FAIL": f"launch:{number}"}, ranks, late=True) for number, ranks in ((1, 1), (300, 1), (300, 2))),
    Case("a copy fails", [], ["cudaMemcpyAsync: " + FAULT], {"SIMT_FAIL": "memcpy:5"}, late=True),
    # ---- options
    Case("attention by cuDNN", ["--attention=cudnn"], ["built without cuDNN's frontend", "nvidia-cudnn-frontend",
                                                       "take --attention flash"]),
    Case("attention by cuDNN in fp32", ["--attention=cudnn", "--dtype=fp32"], ["computes in bf16, and --dtype is fp32"]),
    Case("TF32 of bf16", ["--tf32", "--dtype=bf16"], ["--tf32 is for products of fp32 numbers, and --dtype is bf16"]),
    Case("TF32 of what is bf16 without being said", ["--tf32"], ["--tf32 is for products of fp32 numbers, and --dtype is bf16"]),
    *(Case(f"{option} on the CPU{where}", [option, *more], [option.replace("=", " "), OF_GPUS], variables)
      for option in ("--tf32", "--attention=cudnn", "--cuda-sync", "--share-gpu")
      for where, more, variables in (("", ["--device=cpu"], {}), (" for want of a GPU", [], NO_GPU))),
    # ---- sizes that kernels refuse
    Case("heads of 12 channels", ["--channels=36", "--heads=3"],
         ["--channels 36 with --heads 3 makes heads of 12 channels", "multiples of 8 up to 128; try --channels 48"]),
    Case("heads of 132 channels", ["--channels=264"], ["makes heads of 132 channels", "try --channels 256"], ranks=2),
    Case("channels beyond a block's registers", ["--channels=6272", "--heads=49", "--dtype=fp32"],
         ["--channels 6272 is out of range for the GPU's kernels in fp32; give at most 6144"],
         {"SIMT_GPU_MEMORY": "100000000000"}),
    Case("a vocabulary beyond shared memory", ["--vocab-size=6000000"], ["--vocab-size 6000000 is out of range for this GPU"]),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """The result of every case that is asked for, by its name."""
    asked = {item.callspec.params["case"].name for item in request.session.items
             if getattr(item, "originalname", "") == "test_is_told_in_one_line"}
    base = tmp_path_factory.mktemp("errors")

    def result_of(case, folder):
        return simulated.run([*MODEL, *case.options, "--out-dir", folder / "run"], folder, case.ranks, case.executable,
                             variables=case.variables)

    cases = [case for case in CASES if case.name in asked]
    results = simulated.at_once(*(functools.partial(result_of, case, base / str(number)) for number, case in enumerate(cases)))
    return {case.name: (result, base / str(number)) for number, (case, result) in enumerate(zip(cases, results))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.ranks}")
def test_is_told_in_one_line(case, outcomes):
    result, folder = outcomes[case.name]
    line = one_error(result.stderr)
    assert result.returncode == 1
    for word in case.words:
        assert word in f"error: {line}"
    assert "\nstep " in result.stdout if False else case.late or result.stdout == ""
    assert not (folder / "run/metrics.jsonl").exists() or case.late
