"""Every operation of llmc/device/ops.h equals PyTorch's on every device, on operands that are new in every run.

op_cases.py has the sizes, reference_*.py the required results, bounded.py the tolerances, and device_sizes.py what a device lacks.
test/probe/op_check.cpp runs and compares.
"""

import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

import cases
import device_sizes
import op_cases
import op_files
import program
import reference_ops
import safetensors_numpy
import simulated

BUILD = pathlib.Path(program.ROOT, program.BUILD)
CPU = pathlib.Path(os.environ.get("TEST_PROGRAMS", BUILD / "test"), "probe/op_check")


def check(folder, made, seed, device="cpu", kind="plain", **environment):
    """The checksum of the results, which become folder/results.safetensors; an assertion if a case fails. `kind`: of the simulated
    GPU, whose kernels may have the checks of a sanitizer."""
    path = folder / "cases.safetensors"
    op_files.write(path, made)
    executable = CPU if device == "cpu" else BUILD / f"test/op_check-{kind}"
    done = subprocess.run([executable, device, path, folder / "results.safetensors"], capture_output=True, text=True,
                          timeout=300 * program.PATIENCE, env=os.environ | environment)
    def explained(line):
        return f"{line}  ({made[re.match(r'[^/ ]*', line)[0]][0].name})"
    *lines, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, f"SEED={seed} {environment}\n" + "\n".join(map(explained, lines)) + done.stderr
    return last


def test_every_operation_has_cases():
    contract = "".join(path.read_text() for path in (program.ROOT / "llmc/device").glob("ops_*.h"))
    declared = set(re.findall(r'string_view name = "(\w+)"', contract))
    assert declared == set(op_cases.OPERATIONS)


@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_the_cpu(tmp_path, seed, op):
    check(tmp_path, op_files.make_all(op, seed, "cpu"), seed)


@pytest.mark.parametrize("op", ["matmul_forward", "matmul_backward", "attention_forward", "attention_backward"])
def test_without_newer_instructions(tmp_path, seed, op):
    """As on a processor with AVX2 only: oneDNN must not use others."""
    check(tmp_path, op_files.make_all(op, seed, "cpu"), seed, ONEDNN_MAX_CPU_ISA="AVX2")


def on_a_simulated_gpu(folder, seed, op, chip, orders=range(3)):
    """Small cases have the same bits in every order of the threads. All run on one multiprocessor, whose few blocks have much work
    each. (test_more_ops.py runs them on all multiprocessors.)"""
    made = op_files.make_all(op, seed, "cuda")
    small = {name: one for name, one in made.items() if op_files.numbers_of(one[0]) <= 20_000}
    assert len({check(folder, small, seed, "cuda", SIMT_SEED=str(order), SIMT_CHIP=str(chip)) for order in orders}) == 1
    check(folder, made, seed, "cuda", SIMT_SEED="3", SIMT_CHIP=str(chip), SIMT_MULTIPROCESSORS="1")


@simulated.NEEDED
@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_a_simulated_gpu(tmp_path, seed, op):
    on_a_simulated_gpu(tmp_path, seed, op, 90)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=simulated.NEEDED)])
@pytest.mark.parametrize("op", ["matmul_forward", "fp8_matmul_forward"])
def test_gelu_of_a_product_is_made_of_the_stored_pre_gelu(tmp_path, seed, op, device):
    """ops.h: out = GELU(pre_gelu rounded to X). The tests above also accept GELU of the number before rounding."""
    products = op_files.make_all(op, seed, device)
    products = {name: made for name, made in products.items() if "pre_gelu" in made[0].expected and ".bf16." in name and made[1] <= 90}
    if (device, op) == ("cpu", "fp8_matmul_forward"):
        return  # the CPU has no products of bytes
    assert products
    check(tmp_path, products, seed, device, SIMT_CHIP="90")
    results = safetensors_numpy.load(tmp_path / "results.safetensors")
    for name in products:
        gelu = reference_ops.gelu_forward(cases.Maker(None, "bf16"), values=results[f"{name}/pre_gelu"])
        assert not list(cases.far_elements(results[f"{name}/out"], gelu.expected["out"], gelu.bounds["out"])), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=simulated.NEEDED)])
def test_bf16_parameters_are_the_rounded_master(tmp_path, seed, device):
    """In every bit; the tests above accept any number near PyTorch's."""
    updates = op_files.make_all("optimizer_update", seed, device)
    updates = {name: made for name, made in updates.items()
               if ".bf16." in name and made[1] <= 90 and "parameters" in made[0].expected and "rounding" not in made[0].inputs}
    check(tmp_path, updates, seed, device, SIMT_CHIP="90")
    results = safetensors_numpy.load(tmp_path / "results.safetensors")
    for name in updates:
        assert np.array_equal(results[f"{name}/parameters"], cases.to_bf16(results[f"{name}/master"])), name


@simulated.NEEDED
@pytest.mark.parametrize("op", ["accumulate", "optimizer_update"])
def test_numbers_rounded_at_random_have_the_cpus_bits(tmp_path, seed, op):
    """The unit tests compare the CPU's random numbers with their definition."""
    results = []
    for device in ("cpu", "cuda"):
        check(tmp_path, op_files.make_all(op, seed, device), seed, device, SIMT_CHIP="90")
        results.append(safetensors_numpy.load(tmp_path / "results.safetensors"))
    on_cpu, on_gpu = results
    assert on_gpu and on_gpu.keys() <= on_cpu.keys()  # a GPU has no segments of odd sizes
    assert [name for name in on_gpu if not np.array_equal(on_cpu[name], on_gpu[name], equal_nan=True)] == []


@simulated.NEEDED
def test_numbers_in_4_bits_have_the_cpus_bits(tmp_path, seed):
    made, results = op_files.make_all("dequantise_nf4", seed, "cpu"), []
    for device in ("cpu", "cuda"):
        check(tmp_path, made, seed, device, SIMT_CHIP="90")
        results.append(safetensors_numpy.load(tmp_path / "results.safetensors"))
    assert results[0].keys() == results[1].keys()
    assert all(np.array_equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("change, message", [
    (lambda inputs: inputs.update(valve=inputs.pop("value")), "fill has no field for the input valve"),
    (lambda inputs: inputs.update(out=np.array([0.1])), "0.1, which is not fp32"),
], ids=["mistyped", "not fp32"])
def test_wrong_inputs_are_refused(tmp_path, seed, change, message):
    """A mistyped name in a case, or an operand that was not rounded, must be noticed."""
    made = {"fill.fp32.0": (op_cases.make_cases("fill", "fp32", seed)[0], 0)}
    change(made["fill.fp32.0"][0].inputs)
    with pytest.raises(AssertionError, match=message):
        check(tmp_path, made, seed)


@pytest.mark.parametrize("least_chip", [0, device_sizes.NONE], ids=["taken", "refused"])
def test_a_missing_operand_is_no_refusal(tmp_path, seed, least_chip):
    made = {"add.fp32.0": (op_cases.make_cases("add", "fp32", seed)[0], least_chip)}
    del made["add.fp32.0"][0].inputs["a"]
    with pytest.raises(AssertionError, match="add: a is missing"):
        check(tmp_path, made, seed)
