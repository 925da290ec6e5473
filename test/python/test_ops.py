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
import program
import reference_ops
import safetensors_numpy
import simulated

BUILD = pathlib.Path(program.ROOT, program.BUILD)
CPU = pathlib.Path(os.environ.get("TEST_PROGRAMS", BUILD / "test"), "probe/op_check")
SIMULATED = BUILD / "test/op_check-plain"


def write_cases(path, made):
    """`made`: {OP.DTYPE.NUMBER: (case, whether the device computes it)}"""
    arrays = {}
    for name, (case, is_taken) in made.items():
        kinds = {"input": case.inputs, "expected": case.expected, "bound": case.bounds}
        kinds |= {} if is_taken else {"refused": {"1": np.ones(1)}}
        for kind, operands in kinds.items():
            arrays |= {f"{name}/{kind}/{operand}": np.asarray(array, dtype=np.float64) for operand, array in operands.items()}
    safetensors_numpy.save(path, arrays)


def make_all(op, seed, device, chip=0):
    """The cases of an operation in all dtypes, as write_cases() takes them."""
    made = {}
    for dtype in op_cases.dtypes_of(op):
        for number, case in enumerate(op_cases.make_cases(op, dtype, seed, device=device)):
            made[f"{op}.{dtype}.{number}"] = case, device_sizes.takes(device, chip, op, case, dtype)
    return made


def check(folder, made, seed, device="cpu", **environment):
    """The checksum of the results, which become folder/results.safetensors; an assertion if a case fails."""
    path = folder / "cases.safetensors"
    write_cases(path, made)
    done = subprocess.run([CPU if device == "cpu" else SIMULATED, device, path, folder / "results.safetensors"], capture_output=True, text=True,
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
    check(tmp_path, make_all(op, seed, "cpu"), seed)


@pytest.mark.parametrize("op", ["matmul_forward", "matmul_backward", "attention_forward", "attention_backward"])
def test_without_newer_instructions(tmp_path, seed, op):
    """As on a processor with AVX2 only: oneDNN must not use others."""
    check(tmp_path, make_all(op, seed, "cpu"), seed, ONEDNN_MAX_CPU_ISA="AVX2")


def on_a_simulated_gpu(folder, seed, op, chip):
    """The results have the same bits in every order of the threads."""
    made = make_all(op, seed, "gpu", chip)
    environment = {"SIMT_CHIP": str(chip)}
    assert len({check(folder, made, seed, "cuda", SIMT_SEED=order, **environment) for order in "012"}) == 1
    return environment


@simulated.NEEDED
@pytest.mark.parametrize("op", op_cases.OPERATIONS)
def test_on_a_simulated_gpu(tmp_path, seed, op):
    on_a_simulated_gpu(tmp_path, seed, op, 90)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=simulated.NEEDED)])
@pytest.mark.parametrize("op", ["matmul_forward", "fp8_matmul_forward"])
def test_gelu_of_a_product_is_made_of_the_stored_pre_gelu(tmp_path, seed, op, device):
    """ops.h: out = GELU(pre_gelu rounded to X). The tests above also accept GELU of the number before rounding."""
    environment = {"SIMT_CHIP": "90"}
    products = make_all(op, seed, {"cpu": "cpu", "cuda": "gpu"}[device], 90)
    products = {name: made for name, made in products.items() if "pre_gelu" in made[0].expected and ".bf16." in name and made[1]}
    if not products:
        return  # the CPU has no products of bytes
    check(tmp_path, products, seed, device, **environment)
    results = safetensors_numpy.load(tmp_path / "results.safetensors")
    for name in products:
        gelu = reference_ops.gelu_forward(cases.Maker(None, "bf16"), values=results[f"{name}/pre_gelu"])
        assert not list(cases.far_elements(results[f"{name}/out"], gelu.expected["out"], gelu.bounds["out"])), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=simulated.NEEDED)])
def test_bf16_parameters_are_the_rounded_master(tmp_path, seed, device):
    """In every bit; the tests above accept any number near PyTorch's."""
    updates = make_all("adamw", seed, {"cpu": "cpu", "cuda": "gpu"}[device], 90)
    updates = {name: made for name, made in updates.items()
               if ".bf16." in name and made[1] and "parameters" in made[0].expected and "rounding" not in made[0].inputs}
    check(tmp_path, updates, seed, device, SIMT_CHIP="90")
    results = safetensors_numpy.load(tmp_path / "results.safetensors")
    for name in updates:
        assert np.array_equal(results[f"{name}/parameters"], cases.to_bf16(results[f"{name}/master"])), name


@simulated.NEEDED
def test_sums_rounded_at_random_have_the_cpus_bits(tmp_path, seed):
    """One fp32 addition before the rounding: no other operation that rounds at random has a result that is so determined."""
    results = []
    for device, name in (("cpu", "cpu"), ("cuda", "gpu")):
        check(tmp_path, make_all("accumulate", seed, name, 90), seed, device, SIMT_CHIP="90")
        results.append(safetensors_numpy.load(tmp_path / "results.safetensors"))
    on_cpu, on_gpu = results
    assert on_cpu.keys() == on_gpu.keys()
    assert all(np.array_equal(on_cpu[name], on_gpu[name]) for name in on_cpu)


@pytest.mark.parametrize("change, message", [
    (lambda inputs: inputs.update(valve=inputs.pop("value")), "fill has no field for the input valve"),
    (lambda inputs: inputs.update(out=np.array([0.1])), "0.1, which is not fp32"),
], ids=["mistyped", "not fp32"])
def test_wrong_inputs_are_refused(tmp_path, seed, change, message):
    """A mistyped name in a case, or an operand that was not rounded, must be noticed."""
    made = {"fill.fp32.0": (op_cases.make_cases("fill", "fp32", seed)[0], True)}
    change(made["fill.fp32.0"][0].inputs)
    with pytest.raises(AssertionError, match=message):
        check(tmp_path, made, seed)


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "refused"])
def test_a_missing_operand_is_no_refusal(tmp_path, seed, is_taken):
    made = {"add.fp32.0": (op_cases.make_cases("add", "fp32", seed)[0], is_taken)}
    del made["add.fp32.0"][0].inputs["a"]
    with pytest.raises(AssertionError, match="add: a is missing"):
        check(tmp_path, made, seed)
