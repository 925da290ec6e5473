#!/usr/bin/env python3
"""Makes the reference files in test/reference, with PyTorch, from fixed seeds: test/make_references.py [NAME ...]

Each function of REFERENCES writes its files into a folder and returns their paths; NAME chooses some of them.
"""

import pathlib
import sys

import numpy as np

TEST = pathlib.Path(__file__).resolve().parent
FOLDER = TEST / "reference"
sys.path.insert(0, str(TEST / "python"))

import op_cases
import safetensors_numpy

SEED = 1


def write_ops(folder):
    """ops_NAME.safetensors for every operation: the small cases of op_cases.py.

    Of the k-th case in a dtype: operands DTYPE.k/input/..., exact results DTYPE.k/expected/... and how far from them
    each element may be, DTYPE.k/bound/... (absent where the result must be exact).
    """
    paths = []
    for op, operation in op_cases.OPERATIONS.items():
        tensors = {}
        for dtype in operation.dtypes:
            for k, case in enumerate(op_cases.make_cases(op, dtype, SEED, only_small=True)):
                for name, array in case.inputs.items():
                    tensors[f"{dtype}.{k}/input/{name}"] = in_fp32_if_exact(array)
                for name, array in case.expected.items():
                    tensors[f"{dtype}.{k}/expected/{name}"] = array
                    bound = case.bounds[name]
                    if bound.any():
                        # Rounded to fp32, upwards.
                        tensors[f"{dtype}.{k}/bound/{name}"] = (bound * (1 + 2.0**-23)).astype(np.float32)
        paths.append(folder / f"ops_{op}.safetensors")
        safetensors_numpy.save(paths[-1], tensors)
    return paths


def in_fp32_if_exact(array):
    short = array.astype(np.float32)
    return short if np.array_equal(short, array, equal_nan=True) else array


REFERENCES = {"ops": write_ops}


def main():
    names = sys.argv[1:] or list(REFERENCES)
    unknown = set(names) - set(REFERENCES)
    if unknown:
        sys.exit(f"error: there is no reference {', '.join(sorted(unknown))}; there are {', '.join(REFERENCES)}")
    for name in names:
        for path in REFERENCES[name](FOLDER):
            print(f"{path.relative_to(TEST.parent)}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
