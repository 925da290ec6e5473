"""The commands of the pages that build and run a kernel lab (docs/kernels.md), and the tables that labs print. The compiler's
report of all labs must be built."""

import os
import re

import pytest

import test_pages
from pages import printed, shape
from test_pages import OF_LAB, run_in

clone = test_pages.clone  # the fixture
pytestmark = pytest.mark.skipif("SANITIZE" in os.environ, reason="this build has no lab (one with SANITIZE=1)")


@pytest.mark.parametrize("commands", [commands for _, _, commands in OF_LAB], ids=[place for place, _, _ in OF_LAB])
def test_the_commands_run(clone, commands):
    run_in(clone, "\n".join(commands))


def test_the_lab_prints_what_is_shown(clone):
    out = run_in(clone, "make dev/layernorm_forward; ./dev/layernorm_forward")
    block = [shape(line) for line in printed("layernorm_forward in ")]
    now = [shape(line) for line in out.splitlines() if line.strip()]
    first = now.index(block[0])
    if "sm_80 / sm_90" not in out:  # without the compiler's figures for these chips, only the rows of the CPU's run are compared
        block, now = ([line for line in lines if re.match("N [a-z]", line)] for lines in (block, now[first:]))
        first = 0
    assert now[first:first + len(block)] == block


def test_the_lab_shows_the_figures_of_the_chips_that_were_compiled_for(clone):
    kernel = "_ZN4llmc4cuda20norm_forward_kernel5I13__nv_bfloat16Lb1ELb0EEEvPT_S4_PfS5_PKS3_S7_S7_S7_fli"
    sees = {"86": "46 +0 +12288 +83%\n.* for sm_86;", "90": "46 +0 +12288 +62%\n.* for sm_90;", "120": "are unknown: nvcc made no report here"}
    for chip, line in sees.items():
        (clone / "of_one_chip.txt").write_text(f"{chip} {kernel} 46 0 0 0 256\n")
        out = run_in(clone, "make dev/layernorm_forward >&2; KERNEL_REPORT=of_one_chip.txt ./dev/layernorm_forward 5")
        assert re.search(line, out), out


@pytest.mark.parametrize("seed", ["-1", "1e3", "0x1", "99999999999999999999"])
def test_the_lab_takes_whole_numbers_as_seeds(seed, clone):
    out = run_in(clone, f"make dev/layernorm_forward >&2; ./dev/layernorm_forward --seed='{seed}' 2>&1 || echo rc $?")
    assert out == f"error: --seed '{seed}' is no seed; give a whole number, 0 or more\nrc 1\n"
