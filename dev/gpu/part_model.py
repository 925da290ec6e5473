"""The part `model` of the check: the whole model on the GPU, compared with PyTorch, with the CPU device, and with itself.

Bounds: in fp32 the project promises losses within 1e-5 of PyTorch's in fp64 on every device. Two devices are thus within
twice that. In bf16 the bound is likewise twice the one for random rounding (test/python/model_bounds.py).
"""

import filecmp
import importlib.util
import statistics
import tempfile
from pathlib import Path

import programs
from results import CheckFailed, Skipped, require

SEED = 1
TWICE = 2
CONSTANT_RATE = ["--lr=1e-3", "--lr-schedule=constant", "--beta2=0.999", "--weight-decay=0", "--grad-clip=0"]


class Extent:
    """The amount of work: all of it on a GPU, very little on a simulated GPU."""

    def __init__(self, tiny):
        self.tiny = tiny
        # The sizes of a model. On a GPU it has whole tiles, as in ordinary runs, and more than one tile.
        self.layers, self.heads, self.channels, self.T, self.V, self.batch = \
            (1, 1, 16, 8, 17, 4) if tiny else (2, 2, 128, 136, 259, 4)
        self.pytorch_steps, self.fp32_steps, self.bf16_steps, self.long_steps = (3, 3, 2, 4) if tiny else (50, 20, 5, 200)
        self.own_steps = 4 if tiny else 20
        self.ranks = [2] if tiny else [2, 4]
        # The ZeRO runs: ranks, dtype, micro-batches per step, and when gradients are reduced.
        self.zero = [(2, "bf16", 2, "micro-batch"), (4, "fp32", 2, "step"), (2, "fp32", 1, "step")][:1 if tiny else 3]

    def sizes(self):
        from reference_gpt2 import GPT2
        return GPT2(layers=self.layers, heads=self.heads, channels=self.channels, seq_len=self.T, vocab_size=self.V)

    def models(self):
        import model_comparison
        from reference_gpt2 import GPT2
        return [(GPT2(layers=1, heads=2, channels=16, seq_len=5, vocab_size=11), 2, 1)] if self.tiny else model_comparison.MODELS

    def text_model(self):
        """The options of a model of bytes, which learns the embedded stories."""
        small = ["--layers=1", "--heads=1", "--channels=8", "--seq-len=8", "--global-batch-tokens=16", "--val-batches=1"]
        return small if self.tiny else ["--model=tiny", "--global-batch-tokens=1536", "--val-batches=1"]


def run(results, tiny):
    extent = Extent(tiny)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        results.attempt_all(checks(extent, Path(name)))


def checks(extent, folder):
    """[(name, check, its arguments, its seconds if they are many)], the most valuable first."""
    found = []

    def add(name, check, *arguments, seconds=0):
        found.append((name, check, (extent, folder, *arguments), seconds))

    for dtype in ("fp32", "bf16"):
        add(f"loss and gradients against PyTorch, {dtype}", gradients, dtype)
    add(f"{extent.pytorch_steps} steps of AdamW against PyTorch, fp32", adamw_steps)
    for dtype, attention, steps in (("fp32", "flash", extent.fp32_steps), ("bf16", "flash", extent.bf16_steps),
                                    ("bf16", "cudnn", extent.bf16_steps), ("fp16", "flash", extent.bf16_steps),
                                    ("te-fp8", "flash", extent.bf16_steps)):
        add(f"{steps} steps against the CPU device, {dtype}, {attention} attention", against_cpu, dtype, attention, steps)
    add(f"{extent.long_steps} steps against the CPU device, bf16", many_steps, seconds=30)
    for attention in ("flash", "cudnn"):
        add(f"{extent.own_steps} steps twice, bit for bit, {attention} attention", repeated, attention)
        add(f"stopped after {extent.own_steps // 2} steps and resumed, bit for bit, {attention} attention", resumed, attention)
    add(f"{extent.own_steps} steps with the state and the layers in host memory and on a disk, bit for bit, bf16", offloaded, seconds=30)
    for ranks in extent.ranks:
        add(f"{extent.own_steps} steps on {ranks} NCCL ranks that share the GPU, fp32", on_ranks, ranks, seconds=30)
    for ranks, dtype, micro_batches, reduce_every in extent.zero:
        what = f"{micro_batches} micro-batches, reduced every {reduce_every}" if micro_batches > 1 else "1 micro-batch"
        add(f"{extent.own_steps} steps of each ZeRO stage on {ranks} NCCL ranks, bit for bit, {dtype}, {what}", stages, ranks, dtype,
            micro_batches, reduce_every, seconds=60)
    for number in extent.ranks:
        add(f"{extent.own_steps} steps of each schedule of a pipeline of {number} NCCL ranks, bit for bit, bf16", schedules, number,
            seconds=60)
    return found


def have_pytorch():
    if not importlib.util.find_spec("torch"):
        raise Skipped("python3 has no PyTorch here")


def gradients(extent, folder, dtype):
    have_pytorch()
    import model_comparison
    for sizes, batch, micro_batch in extent.models():
        try:
            found = model_comparison.loss_and_gradients(programs.PROBE, folder, sizes, batch, micro_batch, dtype, SEED,
                                                        device="cuda", environment=programs.environment())
        except AssertionError as wrong:
            raise CheckFailed(f"{sizes}: {wrong}") from wrong
    return {"detail": f"{len(extent.models())} models; of the last: {found}"}


def experiment(extent, folder):
    have_pytorch()
    from model_comparison import Experiment
    return Experiment(programs.emptied(folder), extent.sizes(), extent.batch, SEED)


def within(losses, others, bound, reference):
    require(len(losses) == len(others), f"{len(losses)} steps, not {len(others)}")
    error = max(abs(a - b) for a, b in zip(losses, others))
    detail = f"losses within {error:.1e} of {reference}, {bound:.1e} allowed"
    require(error <= bound, detail)
    return {"detail": detail, "error": error, "bound": bound}


def adamw_steps(extent, folder):
    data = experiment(extent, folder / "adamw")
    import model_bounds
    import reference_model
    steps = extent.pytorch_steps
    expected, _, _ = reference_model.train(data.weights, data.sizes, [data.tokens] * steps, lr=1e-3)
    trained = programs.train(data.folder / "run", *data.options(steps, *CONSTANT_RATE, "--dtype=fp32"))
    return within(trained.losses, expected, model_bounds.LOSS_FP32, "PyTorch's")


def train_with(attention, out_dir, *options):
    """Trains; skips the check if the program was built without cuDNN."""
    try:
        return programs.train(out_dir, *options, f"--attention={attention}")
    except CheckFailed as refused:
        if attention == "cudnn" and "--attention cudnn" in str(refused):
            raise Skipped(str(refused)) from refused
        raise


# The bounds of other levels of --precision, in that of bf16. fp16 rounds to 2^-11 in place of 2^-8, which leaves
# the errors of fp32. Of fp8: test/python/test_simulated_fp8.py.
BOUNDS_IN_BF16 = {"bf16": 1, "fp16": 1 / 8, "te-fp8": 2**2.5}


def against_cpu(extent, folder, precision, attention, steps):
    data = experiment(extent, folder / f"cpu-{precision}-{attention}")
    import model_bounds
    options = data.options(steps, *CONSTANT_RATE, f"--precision={precision}")
    try:
        gpu = train_with(attention, data.folder / "gpu", *options)
    except CheckFailed as refused:
        if "products in 8 bits need a GPU of sm_89" in str(refused):
            raise Skipped("a GPU before sm_89 has no products in 8 bits") from refused
        raise
    cpu = programs.train(data.folder / "cpu", *options, device="cpu")
    bound = model_bounds.LOSS_FP32 if precision in ("fp32", "fp16") else 0
    if precision != "fp32":
        weights = {name: weight.bfloat16().double() for name, weight in data.weights.items()}
        bound += BOUNDS_IN_BF16[precision] * model_bounds.training_bound_bf16(weights, data.sizes, [data.tokens] * steps, lr=1e-3)
    return within(gpu.losses, cpu.losses, TWICE * bound, "the CPU's")


# The first run of a command autotunes, and leaves its choices in the check's own cache (main.py) for the next run.
SAME = {"detail": "losses, norms and weights are the same"}


# The file, in a run's folder, that has all weights on any mesh.
WEIGHTS = "weights.safetensors"


def train(out_dir, *options, **how):
    """For same_run."""
    return programs.train(out_dir, *options, f"--export={out_dir}/{WEIGHTS}", **how)


def own_run(extent, out_dir, attention, steps, *more):
    return train_with(attention, out_dir, *extent.text_model(), "--dtype=bf16", "--lr-schedule=constant", f"--steps={steps}",
                      f"--export={out_dir}/{WEIGHTS}", *more)


def repeated(extent, folder, attention):
    first, again = (own_run(extent, folder / attention / name, attention, extent.own_steps) for name in ("first", "again"))
    same_run(first, again, extent.own_steps)
    return SAME


def resumed(extent, folder, attention):
    steps, first, parted = extent.own_steps, folder / attention / "first", folder / attention / "parted"
    # The run to compare with may be from an earlier run of the part.
    whole = programs.program.Run(first) if (first / "metrics.jsonl").exists() else own_run(extent, first, attention, steps)
    own_run(extent, parted, attention, steps // 2)
    same_run(whole, own_run(extent, parted, attention, steps, "--resume"), steps)
    return SAME


def same_run(first, second, steps):
    for column in ("loss", "grad_norm"):
        a, b = first.column(column), second.column(column)
        require(len(a) == len(b) == steps, f"{len(a)} and {len(b)} steps, not {steps}")
        apart = [i + 1 for i in range(steps) if a[i] != b[i]]
        require(not apart, f"{column} differs from step {apart[0] if apart else 0} on")
    files = [run.out_dir / WEIGHTS for run in (first, second)]
    require(filecmp.cmp(*files, shallow=False), "the weights differ")


def on_ranks(extent, folder, ranks, *mesh):
    """Several processes train on the same batch and sum in another order: losses are within the promised bound."""
    options = [*extent.text_model(), "--dtype=fp32", "--lr=1e-3", "--lr-schedule=constant", f"--steps={extent.own_steps}",
               "--micro-batch-size=1" if extent.tiny else "--micro-batch-size=3", *(["--layers=8"] if mesh else [])]
    one = programs.train(folder / f"one-of-{ranks}", *options)
    several = programs.train(folder / f"ranks-{ranks}", *options, *mesh, ranks=ranks, timeout=90)
    world = several.record["mesh"]["world"]
    require(world == ranks, f"the job had {world} ranks")
    return within(one.losses, several.losses, 1e-5, "one process's")


def stages(extent, folder, ranks, dtype, micro_batches, reduce_every):
    """ZeRO stages give the same bits: a stage only changes where buffers are."""
    folder = folder / f"zero-{ranks}-{dtype}-{micro_batches}"
    sequences = 2 * ranks if extent.tiny else 24  # 1536 tokens of the named model, 64 per sequence
    options = [*extent.text_model(), f"--dtype={dtype}", f"--steps={extent.own_steps}", f"--reduce-every={reduce_every}",
               f"--micro-batch-size={sequences // ranks // micro_batches}"]
    if extent.tiny:
        options.append(f"--global-batch-tokens={sequences * extent.T}")
    whole = train(folder / "stage-0", *options, ranks=ranks, timeout=90)
    for number in (1, 2, 3):
        run = train(folder / f"stage-{number}", *options, f"--zero-stage={number}", ranks=ranks, timeout=90)
        try:
            same_run(whole, run, extent.own_steps)
        except CheckFailed as difference:
            raise CheckFailed(f"--zero-stage {number}: {difference}") from difference
    return SAME


def schedules(extent, folder, number):
    """Pipeline schedules give the same bits: the order of the work changes nothing."""
    folder = folder / f"pipeline-{number}"
    options = [*extent.text_model(), "--dtype=bf16", f"--steps={extent.own_steps}", "--layers=8", f"--pipeline-parallel={number}",
               "--micro-batch-size=1" if extent.tiny else "--micro-batch-size=3"]
    if extent.tiny:
        options.append(f"--global-batch-tokens={number * extent.T}")
    whole = train(folder / "1f1b", *options, ranks=number, timeout=90)
    for schedule, *more in (["gpipe"], ["interleaved", "--recompute=block"], ["zb-h1"]):
        run = train(folder / schedule, *options, f"--pipeline-schedule={schedule}", *more, ranks=number, timeout=90)
        try:
            same_run(whole, run, extent.own_steps)
        except CheckFailed as difference:
            raise CheckFailed(f"--pipeline-schedule {schedule}: {difference}") from difference
    return SAME


def offloaded(extent, folder, tiers=(("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme"))):
    """What lies in the host's memory or on a disk gives the same bits: the host updates as the GPU does."""
    folder = folder / "offload"
    options = [*extent.text_model(), "--dtype=bf16", f"--steps={extent.own_steps}", "--layers=6",
               "--micro-batch-size=1" if extent.tiny else "--micro-batch-size=3"]
    whole = train(folder / "none", *options, timeout=90)
    for state, parameters in tiers:
        run = train(folder / f"{state}-{parameters}", *options, f"--offload-optimizer={state}", f"--offload-parameters={parameters}",
                    *([f"--nvme-dir={folder}/disk"] if state == "nvme" else []), timeout=90)
        try:
            same_run(whole, run, extent.own_steps)
        except CheckFailed as difference:
            raise CheckFailed(f"--offload-optimizer {state} --offload-parameters {parameters}: {difference}") from difference
    return SAME


def many_steps(extent, folder):
    steps, last = extent.long_steps, max(2, extent.long_steps // 10)
    options = [*extent.text_model(), "--dtype=bf16", "--lr=1e-3", f"--steps={steps}"]
    gpu, cpu = (statistics.mean(programs.train(folder / f"many-{device}", *options, device=device).losses[-last:])
                for device in ("cuda", "cpu"))
    apart = abs(gpu / cpu - 1)
    detail = f"mean loss of the last {last} {gpu:.4f}, on the CPU {cpu:.4f}: {apart:.2%} apart, 1% allowed"
    require(apart <= 0.01, detail)
    return {"detail": detail, "apart": apart}
