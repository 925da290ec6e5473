"""The report of a check on a GPU, from its lines (results.py): gpu.md, and the summary in gpu.json."""

import statistics

GOALS = {"H100": 500_000, "H200": 550_000}  # tokens/s of the 124M model
RATIO_GOAL = 1.2  # PyTorch's tokens/s times this
PEAK = 989e12
SHARE_GOAL = 0.50  # share of 989 TFLOP/s, for the 1558M model
OUTSIDE_GOAL = 0.02


def machine_of(lines):
    return next((line for line in reversed(lines) if line["name"] == "machine"), {})


def turns(lines):
    """{(model, program): lines of its turns}, in the order of the bench."""
    found = {}
    for line in lines:
        if "tokens_a_second" in line:
            found.setdefault((line["model"], line["program"]), []).append(line)
    return found


def rate(group):
    """The median rate of the turns."""
    return statistics.median(line["tokens_a_second"] for line in group)


def summary(lines):
    """All lines, and the median rate of each model and program."""
    medians = [{"model": model, "program": name, "tokens_a_second": rate(group), "turns": len(group)}
               for (model, name), group in turns(lines).items()]
    return {"machine": machine_of(lines), "goals": [dict(zip(("goal", "found", "share"), goal)) for goal in goals(lines)],
            "rates": medians, "results": lines}


def goals(lines):
    """[(goal, result, result as a share of the goal)] of the goals that were measured."""
    rates = {key: rate(group) for key, group in turns(lines).items()}
    found = []

    def fastest(model):
        return max((tokens for (of, name), tokens in rates.items() if of == model and name.startswith("train_gpt")), default=None)

    gpu = machine_of(lines).get("gpu", "")
    tokens = next((goal for name, goal in GOALS.items() if name in gpu), None)
    if not tokens:
        return []  # the goals are for these GPUs only
    if small := fastest("124M"):
        found.append((f"124M: {tokens:,} tokens/s", f"{small:,.0f}", small / tokens))
        if pytorch := rates.get(("124M", "PyTorch")):
            found.append((f"124M: {RATIO_GOAL} times PyTorch", f"{small / pytorch:.2f} times", small / pytorch / RATIO_GOAL))
    for (model, name), group in turns(lines).items():
        if model == "1558M" and name.startswith("train_gpt") and rate(group) == fastest(model):
            share = statistics.median(line["flops_a_second"] for line in group) / PEAK
            found.append(("1558M: 50% of 989 TFLOP/s", f"{share:.1%}", share / SHARE_GOAL))
    for line in lines:
        if "outside_kernels" in line and "program" not in line:  # the trainer's own turn for this
            share = line["outside_kernels"]
            found.append((f"{line['model']}: below 2% of the time outside kernels", f"{share:.2%}",
                          OUTSIDE_GOAL / share if share else 1.0))
    return found


def table(titles, rows, numbers_from=1):
    """A Markdown table; columns from `numbers_from` on are numbers."""
    line = ["---" if i < numbers_from else "--:" for i in range(len(titles))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [titles, line, *rows])


def checks(lines, part):
    # The machine and the kernels' timings have places of their own.
    of_part = [line for line in lines if line["part"] == part and "gpu" not in line and "timing" not in line]
    if not of_part:
        return []
    count = {status: sum(line["status"] == status for line in of_part) for status in ("passed", "failed", "skipped")}
    heading = f"## {part}: " + ", ".join(f"{number} {status}" for status, number in count.items()) + \
        "".join(f", commit {commit}" for commit in sorted({line["commit"] for line in of_part if line.get("commit")}))
    # Passed checks are short; the others come first.
    order = sorted(of_part, key=lambda line: ("failed", "skipped", "measured", "passed").index(line["status"]))
    rows = [[line["status"].upper() if line["status"] == "failed" else line["status"], line["name"], cell(line["detail"])]
            for line in order]
    return [heading, table(["", "check", "found"], rows, numbers_from=3)]


def cell(text):
    return text.replace("|", "\\|")


def training(lines):
    groups = turns(lines)
    if not groups:
        return []
    product = next((line["product_flops_a_second"] for line in lines if "product_flops_a_second" in line), 0)
    rows = []
    for (model, name), group in groups.items():
        flops = statistics.median(line["flops_a_second"] for line in group)
        pytorch = groups.get((model, "PyTorch"))
        spread = " to ".join(f"{f(line['tokens_a_second'] for line in group):,.0f}" for f in (min, max)) if len(group) > 1 else ""
        between = [line["between_steps"] for line in group if line.get("between_steps") is not None]
        rows.append([model, name, group[0]["batch"], f"{rate(group):,.0f}", spread, f"{flops / PEAK:.1%}",
                     f"{flops / product:.1%}" if product else "", f"{rate(group) / rate(pytorch):.2f}" if pytorch else "",
                     f"{statistics.median(between):.2%}" if between else "", outside_kernels(lines, model, name)])
    titles = ["model", "program", "sequences", "tokens/s", "of the turns", "of 989 TFLOP/s", "of the measured product",
              "times PyTorch", "between steps", "outside kernels"]
    notes = ("Programs take turns, each in a process of its own; the median of the turns counts. Model FLOPs per token are 6 for each " "parameter, and 6 L C T for attention. Between steps: the share of a step's time before its first and "
                                                              "after its last operation, by GPU events. Outside kernels: the share in which a profiler saw no kernel and no copy.")
    return ["## Training steps", notes, table(titles, rows, numbers_from=2), clocks(lines)]


def outside_kernels(lines, model, name):
    shares = [line["outside_kernels"] for line in lines if line.get("model") == model and "outside_kernels" in line and
              line.get("program", "train_gpt") == name.split(",")[0]]
    return f"{statistics.median(shares):.2%}" if shares else ""


def clocks(lines):
    rows = [[line["model"], line["program"], *(f"{line[when].get(field, '')}" for field in ("clocks.sm", "clocks.mem", "temperature.gpu",
             "power.draw", "slowed by") for when in ("clocks", "clocks_while"))]
            for line in lines if "tokens_a_second" in line and line.get("clocks")]
    if not rows:
        return "The GPU's clocks could not be read."
    titles = ["model", "program", *(f"{name} {when}" for name in ("SM clock", "memory clock", "C", "power", "slowed by")
                                    for when in ("before", "while"))]
    return table(titles, rows, numbers_from=2)


def kernels(lines):
    timings = [line["timing"] for line in lines if "timing" in line]
    if not timings:
        return []
    rows = []
    for timing in timings:
        seconds = timing["microseconds"] * 1e-6
        rows.append([timing["operation"], " x ".join(map(str, timing["shape"])), "ours" if timing["block"] > 0 else timing["variant"],
                     f"{timing['microseconds']:.1f}", f"{timing['bytes'] / seconds / 1e9:.0f}",
                     f"{timing['flops'] / seconds / 1e12:.0f}" if timing["flops"] else "", f"{timing['share']:.0%}"])
    return ["## Kernels in bf16", "The ceiling is the larger of two times: that of the bytes that must be moved, at the rate of a copy, "
            "and that of the operations, at the rate of a large product. Both rates are measured in the same run.",
            table(["operation", "shape", "", "us", "GB/s", "TFLOP/s", "of the ceiling"], rows, numbers_from=3)]


def markdown(lines):
    machine = machine_of(lines)
    versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "cuBLASLt", "NCCL", "cuDNN", "PyTorch", "python")
                         if machine.get(name))
    parts = [f"# train_gpt on {machine.get('gpu') or 'a simulated GPU'}",
             f"`make gpu-check`, commit {machine.get('commit', 'unknown')}, {machine.get('date', '')}: {machine.get('memory', '')}, "
             f"{machine.get('cores', '?')} cores, {versions}."]
    if measured := goals(lines):
        parts += ["## Goals", table(["goal", "found", "of the goal"], [[goal, found, f"{share:.0%}"] for goal, found, share in measured])]
    for line in lines:
        if "product_flops_a_second" in line:
            parts.append(f"Measured in the same run: {line['detail']}.")
    parts += training(lines) + kernels(lines)
    for part in ("first", "kernels", "model", "bench", "lab"):
        parts += checks(lines, part)
    return "\n\n".join(parts) + "\n"
