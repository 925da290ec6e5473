"""The table of the test suites: how each is started, in which tier it runs, and what it needs. Not run by itself:
run_suites.py runs them.

The tiers are `make test`, `make test-more` and `make test-long`. A suite starts as soon as its programs are built, if there
are cores for it. Its budget is the CPU time that it takes on a quiet machine, in seconds: the longest suites start first, and
a suite that takes more is named at the end of a run.
"""

import dataclasses
import fnmatch
import itertools
import os
import pathlib
import re
import sys

TIERS = ["test", "more", "long"]
# Groups of programs, in the order in which they are built: the targets programs-NAME of the Makefile.
GROUPS = ["trainer", "tests", "simulated", "kernels", "more", "long"]
RANKS = [1, 2, 3, 4, 8]
MATRIX_RANKS = [1, 2, 3, 4, 8]  # the process counts of the parallel matrix
# Seconds after which a suite is ended: several times its duration on two cores, because a machine may be busy.
# PATIENCE multiplies them and the tests' own time limits; the Makefile sets it for builds with sanitizers.
UNIT_TIMEOUT, MPI_TIMEOUT, KERNEL_TIMEOUT, PYTHON_TIMEOUT, LONG_TIMEOUT, MATRIX_TIMEOUT = 300, 240, 600, 420, 5400, 5400
# The suites that check for leaks in a build with address checks. Open MPI has leaks, which only the whole stack of an
# allocation distinguishes from ours (test/leaks.txt). Recording it takes up to 15 times as long, so few suites do.
OF_MPI_PROGRAMS = "detect_leaks=1:fast_unwind_on_malloc=0"
LEAK_CHECKS = {"unit": "detect_leaks=1", "mpi-1": OF_MPI_PROGRAMS, "mpi-2": OF_MPI_PROGRAMS, "program": OF_MPI_PROGRAMS}


@dataclasses.dataclass
class Needs:
    tier: str
    programs: str  # the groups of programs
    cores: float  # that it keeps busy; 0.3 if it mostly waits
    budget: float = 0  # CPU seconds


# The first pattern that fits a suite's name counts.
NEEDS = {
    "more_unit": Needs("more", "tests", 1),
    "parallel_matrix-*": Needs("more", "tests", 1.5),
    "mpi-8": Needs("more", "tests", 1.5),
    "tcp-8": Needs("more", "tests", 1.5),
    "mpi-3": Needs("more", "tests", 1.5),
    "tcp-[34]": Needs("more", "tests", 1.5),
    "bench": Needs("more", "tests", 1),
    "model_switches": Needs("more", "tests", 1),
    "plot": Needs("more", "tests", 1),
    "mpi-4": Needs("test", "tests", 1.5),
    "kernels-address": Needs("more", "kernels", 1),
    "kernels-thread": Needs("more", "more", 1),
    "kernels-plain": Needs("long", "long", 1),
    "lab-plain": Needs("long", "long", 1),
    "lab-*": Needs("more", "more", 1),
    "cuda-runtime-address": Needs("long", "long", 1),
    "cuda-runtime-plain": Needs("test", "simulated", 1),
    "cuda_libraries": Needs("more", "more", 1),
    "matrix-*": Needs("long", "tests", 2),
    "kernel_report": Needs("more", "kernels more", 1),
    "lab_report": Needs("more", "kernels more", 1),
    "pages_of_lab": Needs("more", "more", 1),
    "gpu_check": Needs("more", "simulated kernels more", 1),
    "adapters": Needs("test", "tests", 1.5),
    "hellaswag": Needs("test", "tests simulated", 1),
    "checkpoints": Needs("test", "simulated", 1.5),
    "simulated_gpu_errors": Needs("test", "simulated", 1),
    "ops": Needs("test", "tests simulated", 1),
    "more_ops": Needs("more", "simulated kernels more", 1),
    "simulated_plans": Needs("more", "simulated", 1),
    "more_plans": Needs("more", "tests simulated", 1),
    "searches": Needs("more", "tests", 2),
    "fp16": Needs("more", "tests", 1.5),
    "offload*": Needs("more", "tests", 1.5),
    "simulated_*": Needs("more", "simulated", 1),
    "pages": Needs("test", "tests simulated", 1),
    "communicator": Needs("test", "tests", 0.3),
    "tcp": Needs("test", "tests", 0.3),
    "same_data": Needs("test", "trainer", 0.5),
    "signals": Needs("test", "trainer", 0.3),
    "background_save": Needs("test", "trainer", 1),
    "failing_runs": Needs("test", "trainer", 0.3),
    "download": Needs("test", "trainer", 0.3),
    "gpu_results": Needs("test", "trainer", 0.3),
    "wrong_input": Needs("test", "trainer", 0.5),
    "coming_from": Needs("test", "trainer", 1),
    "zero": Needs("test", "tests", 1.5),
    "memory_peak": Needs("more", "tests", 2),
    "*": Needs("test", "tests", 1),
}
# CPU seconds of a suite: about a quarter more than it took on two cores of a server in 2026, beside the build. (Ranks that
# wait for others on a busy machine take more.)
BUDGETS = {
    "kernels-thread": 15, "lab-address": 45, "lab-thread": 50, "simulated_gpu": 120, "gpu_check": 110, "simulated_meshes": 125,
    "mpi-8": 82, "zero": 100, "mpi-4": 90, "kernels-address": 8, "tcp-8": 60, "pipeline": 65, "pages": 62, "unit": 45, "more_unit": 115, "more_of_pipeline": 50, "more_of_fp8": 20,
    "more_of_planner": 25, "more_of_tokenizer": 18, "more_of_zero": 13, "parallel_matrix-4": 27, "parallel_matrix-8": 9,
    "simulated_algorithms": 49, "signals": 42, "cuda-runtime-plain": 36, "tcp-4": 35, "training_against_pytorch": 100,
    "model_switches": 27, "mesh": 32, "memory_peak": 25, "mpi-3": 23, "simulated_gpu_errors": 22, "commands": 45,
    "mpi-2": 22, "plot": 20, "pages_of_lab": 20, "wrong_input": 18, "resume": 16, "tcp-3": 15, "defaults": 18, "folders": 15,
    "tcp": 14, "allocations": 14, "communicator": 13, "run_folders": 12, "data": 15, "tokenizer": 30, "tokenizer_data": 20, "chat": 16, "chat_data": 22, "conversations": 12, "program": 11,
    "hellaswag": 10, "gguf": 10, "checkpoints": 12, "background_save": 75, "more_of_checkpoints": 50, "bench": 9, "lint": 9, "model_against_pytorch": 31, "pipeline_timeline": 8, "failing_runs": 7,
    "adapters": 85, "simulated_adapters": 70,
    "ops": 105, "optimizers": 45, "more_ops": 480, "planner": 80, "simulated_plans": 45, "searches": 120, "fp16": 80, "offload": 180, "offload_drawn": 70, "simulated_offload": 260, "fp8": 45, "small_state": 20, "simulated_families": 15, "simulated_fp8": 55, "more_plans": 80, "metrics": 6, "recipes": 6, "kernel_report": 6, "lab_report": 6,
}
DEFAULT_BUDGET, LONG_BUDGET = 6, 6000
SECONDS_PER_CPU_SECOND = 6  # the most that a suite may take on a busy machine
# A GoogleTest suite that takes long runs in so many parts, side by side. (The kernels' suites are whole: one of their tests
# looks at all that the others launched.)
SHARDS = {"more_unit": 2}
# The tests of build/test/unit that search, or follow steps of many shapes: the suite more_unit.
MORE_OF_UNIT = "*Stages*:*StepWaits*:*PipelinePlans*:*SmallEncoding*:Search.*"


# `make check` runs these suites if a file with one of these names has changed. The first pattern that fits counts.
CHECKED_BY = {
    "llmc/core/scratch_file.*": "unit offload",
    "llmc/core/*": "unit",
    "llmc/comm/launcher.*": "unit signals failing_runs",
    "llmc/comm/*": "unit communicator tcp mpi-2",
    "llmc/data/*chat_format*": "chat kept_tokenizer",
    "llmc/data/*": "unit more_unit tokenizer data same_data conversations",
    "llmc/io/adapter_files.*": "adapters",
    "llmc/io/*": "unit resume checkpoints background_save metrics situations keep_best run_folders kept_tokenizer mpi-2",
    "llmc/model/low_rank.*": "adapters",
    "llmc/model/*": "unit mpi-1 mpi-2 model_switches",
    "llmc/optim/*": "unit program ops optimizers",
    "llmc/parallel/mesh*": "unit mpi-2 mpi-4 mesh pipeline",
    "llmc/parallel/*": "unit more_unit mpi-2 mpi-4",
    "llmc/plan/*": "unit more_unit program planner",
    "llmc/planner/*": "more_unit planner more_of_planner coming_from",
    "llmc/timeline/*": "unit pipeline_timeline",
    "llmc/device/cpu/*": "unit ops mpi-1",
    "llmc/device/cuda/*.cuh": "ops kernels-address",
    "llmc/device/cuda/*": "ops cuda-runtime-plain simulated_gpu",
    "llmc/device/op*": "unit ops bench planner",
    "llmc/device/*": "unit",
    "llmc/train/adapter_options.*": "adapters",
    "llmc/train/stop.*": "unit signals",
    "llmc/train/chat.*": "chat",
    "llmc/train/background_save.*": "background_save",
    "llmc/train/checkpointer.*": "resume checkpoints background_save keep_best",
    "llmc/train/run_locks.*": "two_starts run_folders",
    "llmc/train/*": "program resume situations defaults keep_best run_folders options_page wrong_input same_data",
    "train_gpt.cu": "program resume",
    "dev/*.cu*": "lab-address lab-thread",
    "dev/lab/*": "lab-address",
    "dev/gpu/*": "gpu_results gpu_check",
    "dev/cpu/*": "bench",
    "dev/*.h": "lab-address",
    "dev/docs/options_page.py": "options_page",
    "dev/docs/*": "pictures",
    "dev/data/*": "tokenizer",
    "data/*gguf*": "gguf",
    "data/smollm2.py": "gguf",
    "data/model_folder.py": "gguf",
    "data/*": "data datasets download tokenizer_data chat_data",
    "scripts/launch.sh": "signals recipes",
    "scripts/deps.sh": "commands datasets",
    "scripts/plan_error.py": "planner",
    "scripts/*": "plot watch metrics recipes tensorboard",
    "test/unit/*": "unit more_unit",
    "test/mpi/*": "mpi-2 parallel_matrix-2",
    "test/kernels/*": "kernels-address kernels-thread",
    "test/lab/*": "lab-address lab-thread",
    "test/simt/*": "cuda-runtime-plain kernels-address",
    "test/probe/*": "unit ops communicator",
    "test/reference/saved_by_peft/*": "adapters",
    "test/reference/saved_by_*": "checkpoints",
    "test/reference/*": "unit",
    "test/*.h": "unit",
    "test/python/op_*": "ops",
    "test/python/device_sizes.py": "ops",
    "test/python/bounded.py": "ops",
    "test/python/cases.py": "ops",
    "test/python/reference_*": "ops model_against_pytorch",
    "test/*.py": "commands",
    ".ci/*": "commands",
    "docs/planner.md": "planner documents",
    "docs/coming-from.md": "coming_from documents pages",
    "*.md": "documents options_page",
    "docs/published_steps.tsv": "planner",
    "docs/*": "documents",
    "Makefile": "commands",
    "*.mk": "commands",
}


def has_more(path):
    """Whether some tests of a file have the mark `more`: they are a suite of their own, in `make test-more`."""
    return "@pytest.mark.more\n" in path.read_text()


def suites_of_file(name):
    """The names of the suites that `make check` runs for a changed file."""
    own = re.fullmatch(r"test/python/(?:test|long)_(\w+)\.py", name)
    if own:
        return [own[1], f"more_of_{own[1]}"] if pathlib.Path(name).is_file() and has_more(pathlib.Path(name)) else [own[1]]
    return next((suites.split() for pattern, suites in CHECKED_BY.items() if fnmatch.fnmatch(name, pattern)), [])


@dataclasses.dataclass
class Suite:
    name: str
    command: list
    timeout: float
    needs: Needs
    environment: dict = dataclasses.field(default_factory=dict)
    skipped: str = ""  # why it cannot run here
    whole: str = ""  # the name of the suite of which it is a part

    def is_meant(self, pattern):
        return fnmatch.fnmatch(self.name, pattern) or fnmatch.fnmatch(self.whole, pattern)


def needs_of(name, is_long=False):
    if is_long:
        return Needs("long", "simulated kernels more long", 2, LONG_BUDGET)
    needs = next(of for pattern, of in NEEDS.items() if fnmatch.fnmatch(name, pattern))
    default = LONG_BUDGET if needs.tier == "long" else DEFAULT_BUDGET
    return dataclasses.replace(needs, budget=BUDGETS.get(name, default))


def started(transport, ranks, program):
    """The beginning of a command that starts a program with this many processes."""
    if transport == "tcp" or os.environ.get("MPI") == "0":
        return [program, "--processes", str(ranks)]
    return ["scripts/launch.sh", "-np", str(ranks), "--bind-to", "none", program]


def googletest_suites(name, command, timeout, report, **more):
    """One suite, or several that share its tests."""
    count = SHARDS.get(name, 1)
    for number in range(1, count + 1):
        part = name if count == 1 else f"{name}.{number}"
        environment = {**more.get("environment", {}),
                       **({"GTEST_TOTAL_SHARDS": str(count), "GTEST_SHARD_INDEX": str(number - 1)} if count > 1 else {})}
        needs = needs_of(name)
        yield Suite(part, [*command, f"--gtest_output=xml:{report(part)}", "--gtest_color=no"], timeout,
                    dataclasses.replace(needs, budget=needs.budget / count * (1.2 if count > 1 else 1)), environment,
                    more.get("skipped", ""), name)


def process_suites(build, report):
    """The suites of build/test/mpi with several processes, over MPI and over TCP."""
    transports = ["tcp"] if os.environ.get("MPI") == "0" else ["mpi", "tcp"]
    for transport, ranks in itertools.product(transports, RANKS):
        left_out = "*WholeMatrix*:ParallelMatrix*"  # the suites matrix-* and parallel_matrix-* run these
        if transport == "tcp" and len(transports) > 1:  # the sums are the same either way: run the long trainings once
            left_out += ":*ShardedTraining*:HybridSharding*:*RecomputedTraining*:*WrongWeight*:StrangeFamily*"
        yield from googletest_suites(f"{transport}-{ranks}", [*started(transport, ranks, f"{build}/test/mpi"), f"--gtest_filter=-{left_out}"],
                                     MPI_TIMEOUT, report)
    for ranks in RANKS:
        yield from googletest_suites(f"parallel_matrix-{ranks}", [*started("mpi", ranks, f"{build}/test/mpi"), "--gtest_filter=ParallelMatrix*"],
                                     MPI_TIMEOUT, report)
    for ranks in MATRIX_RANKS:
        yield from googletest_suites(f"matrix-{ranks}", [*started("mpi", ranks, f"{build}/test/mpi"),
                                                         f"--gtest_filter=*WholeMatrix*of_{ranks}_*"], MATRIX_TIMEOUT, report)


def simulated_suites(build, report, has_simt, has_runtime):
    for program, of_compiler in (("kernels", "report"), ("lab", "lab-report")) if has_simt else ():
        for kind in ("address", "thread", "plain"):
            yield from googletest_suites(f"{program}-{kind}", [f"{build}/test/{program}-{kind}"], KERNEL_TIMEOUT, report,
                                         environment={"KERNEL_REPORT": f"{build}/nvcc/{of_compiler}.txt"})
    for kind in ("plain", "address") if has_simt else ():
        yield from googletest_suites(f"cuda-runtime-{kind}", [f"{build}/test/cuda-runtime-{kind}"], KERNEL_TIMEOUT, report,
                                     skipped="" if has_runtime else f"cuda-runtime-{kind} is not built: cublasLt.h or nccl.h is missing")


def python_suites(report):
    for path in sorted(pathlib.Path("test/python").glob("*.py")):
        if not re.match("(test|long)_", path.name):
            continue
        name, is_long = path.stem.split("_", 1)[1], path.name.startswith("long_")
        parts = [(name, "not more"), (f"more_of_{name}", "more")] if has_more(path) else [(name, "")]
        for part, mark in parts:
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-v", *(["-m", mark] if mark else []), str(path),
                       f"--junitxml={report(part)}"]
            needs = needs_of(name, is_long)
            if mark == "more":
                needs = dataclasses.replace(needs, tier="more", budget=BUDGETS.get(part, DEFAULT_BUDGET))
            # They run the trainer.
            if "trainer" not in needs.programs.split():
                needs = dataclasses.replace(needs, programs=f"trainer {needs.programs}")
            # Ignore pytest plugins that happen to be installed.
            yield Suite(part, command, LONG_TIMEOUT if is_long else PYTHON_TIMEOUT, needs, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, whole=part)


def find_suites(build, report, has_simt=True, has_runtime=True):
    """All suites; report(name) is the file of a suite's report. A build with sanitizers has no `has_simt`: no programs for the
    kernels' executor. Without the headers of NCCL and cuBLASLt there is no simulated runtime."""
    suites = [*googletest_suites("unit", [f"{build}/test/unit", f"--gtest_filter=-{MORE_OF_UNIT}"], UNIT_TIMEOUT, report),
              *googletest_suites("more_unit", [f"{build}/test/unit", f"--gtest_filter={MORE_OF_UNIT}"], UNIT_TIMEOUT, report),
              *process_suites(build, report),
              *simulated_suites(build, report, has_simt, has_runtime), *python_suites(report)]
    patience = float(os.environ.get("PATIENCE", 1))
    for suite in suites:
        # A suite with much work takes long beside other work. (The limits of the long ones are long.)
        if suite.needs.tier != "long":
            suite.timeout = max(suite.timeout, SECONDS_PER_CPU_SECOND * suite.needs.budget)
        suite.timeout *= patience
        if suite.whole in LEAK_CHECKS:
            options = [os.environ.get("ASAN_OPTIONS", ""), LEAK_CHECKS[suite.whole]]
            suite.environment["ASAN_OPTIONS"] = ":".join(filter(None, options))
    return suites
