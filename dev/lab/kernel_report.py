#!/usr/bin/env python3
"""Reads the output of `nvcc -Xptxas -v`, and PTX directives after it, and writes a line for each kernel and chip.

    kernel_report.py LOG... >report.txt

A line has: the architecture (80 for sm_80), the mangled name, registers per thread, bytes of stack frame, bytes of spill
stores and loads, bytes of static shared memory, and the most threads per block. The last is that of __launch_bounds__, or
1024 without it. A kernel in several logs is compiled from the same header and counts once.
"""

import math
import re
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)[a-z]?'")  # 90a, 100f
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
TARGET = re.compile(r"\.target sm_(\d+)")
KERNEL = re.compile(r"\.entry (\w+)")
MOST_THREADS = re.compile(r"\.maxntid (\d+)(?:, *(\d+))?(?:, *(\d+))?")
UNBOUNDED = 1024


def read_log(lines):
    """The kernels of a log: {(architecture, name): (registers, stack, spills, shared, most threads per block)}."""
    kernels, key, stack, target, bounds = {}, None, None, None, {}
    for line in lines:
        if entry := ENTRY.search(line):
            key, stack = (int(entry[2]), entry[1]), None
        elif key and (frame := STACK.search(line)):
            stack = (int(frame[1]), int(frame[2]) + int(frame[3]))
        elif key and stack and (used := USED.search(line)):
            shared = SHARED.search(line)
            kernels[key] = (int(used[1]), *stack, int(shared[1]) if shared else 0)
            key = None
        elif found := TARGET.search(line):
            target = int(found[1])
        elif found := KERNEL.search(line):
            name = found[1]
        elif found := MOST_THREADS.search(line):
            bounds[target, name] = math.prod(int(size or 1) for size in found.groups())
    return {key: (*figures, bounds.get(key, UNBOUNDED)) for key, figures in kernels.items()}


def main():
    kernels = {}
    for path in sys.argv[1:]:
        with open(path) as log:
            lines = log.read().splitlines()
        found = read_log(lines)
        entries = sum("Compiling entry function" in line for line in lines)
        if len(found) != entries:
            sys.exit(f"error: {path}: of {entries} kernels {len(found)} could be read")
        kernels |= found
    for (architecture, name), figures in sorted(kernels.items()):
        print(architecture, name, *figures)


if __name__ == "__main__":
    main()
