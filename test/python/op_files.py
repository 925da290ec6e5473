"""Case files for test/probe/op_check.cpp: `python op_files.py FOLDER` writes FOLDER/OP.safetensors.gz for a GPU."""

import argparse
import gzip
import pathlib

import numpy as np

import device_sizes
import op_cases
import safetensors_numpy

SEED = 1  # of the cases that a bundle has
MOST_NUMBERS = 20_000  # in a case of a bundle, which would be too large otherwise


def make_all(op, seed, device):
    """{OP.DTYPE.NUMBER: (case, the least chip that computes it)} in all dtypes."""
    made = {}
    for dtype in op_cases.dtypes_of(op):
        for number, case in enumerate(op_cases.make_cases(op, dtype, seed, device=device)):
            made[f"{op}.{dtype}.{number}"] = case, device_sizes.least_chip(device, op, case, dtype)
    return made


def rounded_up(bounds):
    """In fp32, which takes half of the bytes."""
    with np.errstate(over="ignore"):
        near = np.asarray(bounds).astype(np.float32)
    return np.where(near < bounds, np.nextafter(near, np.float32(np.inf)), near)


def write(path, made):
    """`made` as by make_all()."""
    arrays = {}
    for name, (case, least_chip) in made.items():
        kinds = {"input": case.inputs, "expected": case.expected}
        kinds |= {"refused": {"1": np.array([float(least_chip)])}} if least_chip > 0 else {}
        kinds |= {"misaligned": {"1": np.ones(1)}} if name.split(".")[0] in op_cases.AT_ANY_ADDRESS else {}
        for kind, operands in kinds.items():
            arrays |= {f"{name}/{kind}/{operand}": np.asarray(array, dtype=np.float64) for operand, array in operands.items()}
        arrays |= {f"{name}/bound/{operand}": rounded_up(bounds) for operand, bounds in case.bounds.items()}
    safetensors_numpy.save(path, arrays)


def numbers_of(case):
    return sum(np.size(array) for operands in (case.inputs, case.expected, case.bounds) for array in operands.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir()
    for op in op_cases.OPERATIONS:
        path = folder / f"{op}.safetensors"
        write(path, {name: made for name, made in make_all(op, SEED, "cuda").items() if numbers_of(made[0]) <= MOST_NUMBERS})
        with open(f"{path}.gz", "wb") as packed, gzip.GzipFile("", "wb", 6, packed, mtime=0) as file:
            file.write(path.read_bytes())
        path.unlink()


if __name__ == "__main__":
    main()
