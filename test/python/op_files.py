"""Case files for test/probe/op_check.cpp: `python op_files.py FOLDER` writes FOLDER/OP.safetensors.gz for a GPU."""

import argparse
import gzip
import pathlib

import numpy as np

import device_sizes
import op_cases
import safetensors_numpy

SEED = 1  # of the cases that a bundle has
# The most numbers in a case of a bundle, which would be too large otherwise. Most dtypes share their kernels' source with bf16.
MOST_IN_BF16, MOST_IN_OTHERS, MOST_OF_REFUSED = 22_000, 12_000, 2_000


def make_all(op, seed, device):
    """{OP.DTYPE.NUMBER: (case, the least chip that computes it)} in all dtypes."""
    made = {}
    for dtype in op_cases.dtypes_of(op):
        for number, case in enumerate(op_cases.make_cases(op, dtype, seed, device=device)):
            made[f"{op}.{dtype}.{number}"] = case, device_sizes.least_chip(device, op, case, dtype)
    return made


def write(path, made, compact=False):
    """`made` as by make_all(). A file that is `compact` has shorter numbers: results move by up to a 64th of their bounds, which
    are wider by as much and by a 128th."""
    arrays = {}
    for name, (case, least_chip) in made.items():
        kinds = {"input": case.inputs, "expected": case.expected, "bound": case.bounds}
        if compact:
            kinds["expected"] = {operand: in_fp32(x, case.bounds[operand]) for operand, x in case.expected.items()}
            kinds["bound"] = {operand: rounded_up(bound * (1 + 1 / 64)) for operand, bound in case.bounds.items()}
        kinds |= {"refused": {"1": np.array([float(least_chip)])}} if least_chip > 0 else {}
        kinds |= {"misaligned": {"1": np.ones(1)}} if name.split(".")[0] in op_cases.AT_ANY_ADDRESS else {}
        for kind, operands in kinds.items():
            arrays |= {f"{name}/{kind}/{operand}": np.asarray(array, dtype=np.float64) for operand, array in operands.items()}
    safetensors_numpy.save(path, arrays)


def in_fp32(x, bound):
    """The elements that change by no more than a 64th of their bound."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = x.astype(np.float32).astype(np.float64)
        return np.where(abs(near - x) <= bound / 64, near, x)


def rounded_up(bounds):
    """With 8 bits of the mantissa."""
    fraction, exponent = np.frexp(bounds)
    return np.ldexp(np.ceil(fraction * 256) / 256, exponent)


def numbers_of(case):
    return sum(np.size(array) for operands in (case.inputs, case.expected, case.bounds) for array in operands.values())


def most_numbers(name, least_chip):
    if least_chip == device_sizes.NONE:
        return MOST_OF_REFUSED
    return MOST_IN_BF16 if ".bf16." in name else MOST_IN_OTHERS


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir()
    for op in op_cases.OPERATIONS:
        cases = {name: made for name, made in make_all(op, SEED, "cuda").items() if numbers_of(made[0]) <= most_numbers(name, made[1])}
        if all(least_chip == device_sizes.NONE for _, least_chip in cases.values()):
            continue
        path = folder / f"{op}.safetensors"
        write(path, cases, compact=True)
        with open(f"{path}.gz", "wb") as packed, gzip.GzipFile("", "wb", 6, packed, mtime=0) as file:
            file.write(path.read_bytes())
        path.unlink()


if __name__ == "__main__":
    main()
