"""Every operation of llmc/device/ops.h on the CPU device equals PyTorch's, on operands that are new in every run.

op_cases.py has the sizes, reference_ops.py and reference_updates.py the required results, bounded.py the tolerances.
"""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import cases
import op_cases
import program
import reference_ops
import safetensors_numpy

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "test"))
import make_references

OPERATIONS = [(op, dtype) for op, operation in op_cases.OPERATIONS.items()
              for dtype in (*operation.dtypes, *(("fp16",) if "fp32" in operation.dtypes else ()))]


def run(op_probe, folder, op, dtype, all_inputs, **environment):
    """The results {name: array} of all calls: one list element for each call."""
    given, result = folder / "in.safetensors", folder / "out.safetensors"
    safetensors_numpy.save(given, {f"{i}/{name}": np.asarray(array, dtype=np.float64)
                                   for i, inputs in enumerate(all_inputs) for name, array in inputs.items()})
    done = subprocess.run([op_probe, op, dtype, given, result], capture_output=True, text=True, timeout=120 * program.PATIENCE,
                          env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    results = [{} for _ in all_inputs]
    for name, array in safetensors_numpy.load(result).items():
        case, operand = name.split("/")
        results[int(case)][operand] = array
    return results


def test_every_operation_has_cases():
    contract = (REPOSITORY / "llmc/device/ops.h").read_text()
    # Products of bytes are on GPUs only (test/simt/runtime/cuda_fp8_test.cpp).
    of_bytes = {"quantise_to_bytes", "fp8_matmul_forward", "fp8_matmul_backward"}
    declared = set(re.findall(r"virtual void (\w+)\(", contract)) - {"set_workspace", "require_sizes"} - of_bytes
    assert declared == set(op_cases.OPERATIONS)


@pytest.mark.parametrize("op, dtype", OPERATIONS)
def test_equals_pytorch(op_probe, tmp_path, seed, op, dtype):
    compare(op_probe, tmp_path, seed, op, dtype)


@pytest.mark.parametrize("op", ["matmul_forward", "matmul_backward", "attention_forward", "attention_backward"])
def test_equals_pytorch_without_bf16_instructions(op_probe, tmp_path, seed, op):
    """As on a processor with AVX2 only: oneDNN must not use newer instructions."""
    compare(op_probe, tmp_path, seed, op, "bf16", DNNL_MAX_CPU_ISA="AVX2")


def compare(op_probe, tmp_path, seed, op, dtype, **environment):
    made = op_cases.make_cases(op, dtype, seed)
    results = run(op_probe, tmp_path, op, dtype, [case.inputs for case in made], **environment)
    found = [text for case, result in zip(made, results) for text in cases.differences(case, dtype, result)]
    assert not found, f"{op} in {dtype}, SEED={seed}:\n  " + "\n  ".join(found)


def test_gelu_of_a_product_is_made_of_the_stored_pre_gelu(op_probe, tmp_path, seed):
    """ops.h: out = GELU(pre_gelu rounded to X). The test above also accepts GELU of the number before rounding."""
    products = [case for case in op_cases.make_cases("matmul_forward", "bf16", seed) if "with_gelu" in case.inputs]
    results = run(op_probe, tmp_path, "matmul_forward", "bf16", [case.inputs for case in products])
    for product, result in zip(products, results):
        gelu = reference_ops.gelu_forward(cases.Maker(None, "bf16"), values=result["pre_gelu"])
        gelu.name = product.name
        assert not cases.differences(gelu, "bf16", {"out": result["out"]})


def test_bf16_parameters_are_the_rounded_master(op_probe, tmp_path, seed):
    """In every bit; the test above accepts any number near PyTorch's."""
    made = [case for case in op_cases.make_cases("adamw", "bf16", seed) if "rounding" not in case.inputs]
    for case, result in zip(made, run(op_probe, tmp_path, "adamw", "bf16", [case.inputs for case in made])):
        assert np.array_equal(result["parameters"], cases.to_bf16(result["master"])), case.name


@pytest.mark.parametrize("inputs, message", [
    ({"out": np.ones(3)}, "the input value is missing"),
    ({"out": np.array([0.1]), "value": np.ones(1)}, "0.1, which is not fp32"),
])
def test_probe_refuses_wrong_inputs(op_probe, tmp_path, inputs, message):
    """A mistyped name in a case, or an operand that was not rounded, must be noticed."""
    with pytest.raises(AssertionError, match=message):
        run(op_probe, tmp_path, "fill", "fp32", [inputs])


def test_committed_references_are_those_of_the_script(tmp_path):
    """test/make_references.py makes the files in test/reference, up to the last bits of fp64 sums."""
    made = make_references.write_ops(tmp_path)
    committed = make_references.FOLDER
    assert sorted(path.name for path in committed.glob("ops_*")) == sorted(path.name for path in made)
    for path in made:
        new, old = safetensors_numpy.load(path), safetensors_numpy.load(committed / path.name)
        assert sorted(new) == sorted(old), path.name
        for name, array in new.items():
            np.testing.assert_allclose(array, old[name], rtol=1e-12, atol=1e-14, err_msg=f"{path.name} {name}")
