#!/usr/bin/env python3
"""Writes the results of `make bench`: FOLDER/GPU.md, with a table for each operation, and a roofline picture if
matplotlib is installed.

    report.py TIMINGS.jsonl FOLDER

A line of TIMINGS is one variant at one shape (dev/lab/session.cpp writes it). All lines are from one run on one GPU.
"""

import json
import pathlib
import re
import sys

try:
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
except ImportError:  # a machine with a GPU may lack it; the report then has no picture
    plt = None

# Kernels whose operations are not counted are spread over this range of the roofline's axis, in operations
# per byte.
MEMORY_ONLY = (0.1, 10)


def groups(lines):
    """{(operation, dtype, shape): lines}, in the order of the run."""
    found = {}
    for line in lines:
        found.setdefault((line["operation"], line["dtype"], tuple(line["shape"])), []).append(line)
    return found


def is_timing(line):
    """Whether the line is a timing; otherwise it says why a library has none."""
    return "missing" not in line


def cells(line):
    seconds = line["microseconds"] * 1e-6
    rate = f"{line['flops'] / seconds / 1e12:.1f}" if line["flops"] else ""
    ours = line["block"] > 0  # not a library's
    return [line["variant"], line["story"], str(line["block"]) if ours else "", f"{line['microseconds']:.1f}",
            f"{line['bytes'] / seconds / 1e9:.0f}", rate, f"{line['share']:.0%}",
            "<br>".join(f"{k['name']}: {k['registers']}, {k['shared_bytes']}, {k['occupancy']:.0%}" for k in line["kernels"])]


TITLES = ["variant", "", "block", "us", "GB/s", "TFLOP/s", "of the ceiling",
          "kernels: registers, shared bytes, occupancy"]


def table(lines):
    rows = [TITLES, ["---"] * 2 + ["--:"] * (len(TITLES) - 2), *(cells(line) for line in lines if is_timing(line))]
    feet = [f"\n{line['variant']} was not timed: {line['missing']}" for line in lines if not is_timing(line)]
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + feet)


def markdown(lines, picture):
    first = lines[0]
    parts = [f"# The kernel lab on one {first['gpu']}",
             "`make bench`: median times by events, the L2 cache flushed before each launch. In the run of the first "
             f"operation a device-to-device copy reached {first['copy_bytes_a_second'] / 1e9:.0f} GB/s (bytes read and "
             f"written) and an 8192 x 8192 x 8192 product in bf16 {first['product_flops_a_second'] / 1e12:.0f} TFLOP/s "
             "(cuBLASLt): the ceilings, measured anew for each operation. A kernel's own ceiling is the lower of the two for "
             "the bytes that it must move and the operations that it must do. If there is a choice of block sizes, the "
             "fastest is shown. The last column has the registers, shared bytes and occupancy of each kernel.",
             f"![Roofline]({picture})" if picture else "(No picture: python3 had no matplotlib.)"]
    for (operation, dtype, shape), group in groups(lines).items():
        sizes = ", ".join(f"{size} {name}" for size, name in zip(shape, group[0]["sizes"]))
        parts += [f"## {operation}, {dtype}, {sizes}", table(group)]
    return "\n\n".join(parts) + "\n"


def best_of(group):
    return min((line for line in group if is_timing(line) and line["block"] > 0), key=lambda line: line["microseconds"])


def draw(lines, path):
    """The roofline of this run. It shows the best variant of each operation in bf16, at its first shape."""
    bandwidth, peak = lines[0]["copy_bytes_a_second"], lines[0]["product_flops_a_second"]
    figure, axes = plt.subplots(figsize=(9, 6))
    ridge = peak / bandwidth
    intensities = [MEMORY_ONLY[0] / 2, ridge, ridge * 32]
    axes.plot(intensities, [min(peak, bandwidth * x) / 1e12 for x in intensities], color="black",
              label=f"{bandwidth / 1e9:.0f} GB/s, {peak / 1e12:.0f} TFLOP/s")
    best = {}
    for (operation, dtype, _), group in groups(lines).items():
        if dtype == "bf16":
            best.setdefault(operation, best_of(group))
    memory_only = [operation for operation, line in best.items() if not line["flops"]]
    low, high = MEMORY_ONLY
    for i, (operation, line) in enumerate(best.items()):
        if line["flops"]:
            intensity = line["flops"] / line["bytes"]
        else:
            intensity = low * (high / low) ** (memory_only.index(operation) / max(1, len(memory_only) - 1))
        roof = min(peak, bandwidth * intensity)
        axes.plot([intensity], [line["share"] * roof / 1e12], "so^D"[i // 10], markersize=6, color=f"C{i % 10}",
                  label=f"{operation} {line['variant']}: {line['share']:.0%}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(f"operations a byte (up to {MEMORY_ONLY[1]}: kernels that only move memory, side by side)")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{lines[0]['gpu']}: the best variant of each operation, and its share of the roof")
    axes.grid(True, which="major", color="#dddddd")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main():
    timings, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    with open(timings) as file:
        lines = [json.loads(line) for line in file]
    if not lines:
        sys.exit(f"error: {timings} has no timings")
    name = re.sub("[^a-z0-9]+", "-", lines[0]["gpu"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    picture = f"{name}.svg" if plt else None
    if picture:
        draw(lines, folder / picture)
    (folder / f"{name}.md").write_text(markdown(lines, picture))
    print(f"{folder / name}.md")


if __name__ == "__main__":
    main()
