"""The part `kernels` of the check: every operation on the GPU, within the bounds of its formula of PyTorch's results, and the
tests of PTX wrappers and launchers.

Each operation and each suite runs in its own process, so that a kernel that breaks the GPU's context hides no other. Then
some run under compute-sanitizer.
"""

import concurrent.futures
import gzip
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time

import programs
import safetensors_file
from results import CheckFailed, Late, Skipped, TimeOver, require

AT_ONCE = 4  # the lab's references run on the CPU
SUITE_SECONDS = 150
# The suites and operations whose threads share memory, the most complicated first.
SANITIZED = ["Ptx*", "attention_forward", "attention_backward", "layernorm_backward", "matmul_backward", "fused_classifier",
             "encoder_backward", "rmsnorm_backward", "head_norm_backward", "optimizer_update", "attention_cached_forward", "quantise_to_bytes"]
# The CPU has the same random numbers.
ROUNDED_AT_RANDOM = ["accumulate", "optimizer_update"]
SANITIZER_SECONDS = 100
SMALLEST = "Ptx.LaneId"  # a kernel of one instruction


def run(results, tiny):
    suites = attempt_list(results)
    operations = sorted(path.name.split(".")[0] for path in programs.OPERATIONS.glob("*.gz"))
    checks = [(f"operation {op}", run_operation, op) for op in (ROUNDED_AT_RANDOM[:1] if tiny else operations)]
    checks += [(suite, run_suite, suite) for suite in suites[:2 if tiny else None]]
    sanitizer = find_sanitizer()
    for tool in ("memcheck", "racecheck"):
        if not sanitizer:
            results.add(f"compute-sanitizer {tool}", "skipped", "compute-sanitizer is not here")
            continue
        checks += [(f"compute-sanitizer {tool}, {pattern}", sanitize, results, of_tool, pattern)
                   for of_tool in [Sanitizer(sanitizer, tool)] for pattern in SANITIZED[:1 if tiny else None]]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        at_once = {pool.submit(check, *arguments): name for name, check, *arguments in results.left_first(checks)}
        for done in concurrent.futures.as_completed(at_once):
            results.attempt(at_once[done], done.result)


def attempt_list(results):
    """The names of the suites. If the program does not list them, adds a failure of its own and returns none."""
    return results.attempt("the list of tests", list_suites).get("suites", [])


def list_suites():
    listed = programs.run([programs.KERNELS, "--gtest_list_tests"], 60)
    # "Suite." or "Suite/0.  # TypeParam = float"
    suites = [match[1] for line in listed.stdout.splitlines() if (match := re.match(r"(\S+)\.( |$)", line))]
    require(suites, f"{programs.KERNELS.name} lists no tests: {programs.tail(listed.stderr)}")
    # llmc's own kernels come before the lab's variants.
    return {"detail": f"{len(suites)} suites", "suites": sorted(suites, key=lambda suite: (suite.startswith("Lab"), suite))}


def run_suite(suite):
    """Runs the tests of the suites that match a pattern."""
    if programs.Clock.at_most(5) < 5:
        raise TimeOver
    done = programs.run([programs.KERNELS, f"--gtest_filter={suite}.*", "--gtest_color=no"], SUITE_SECONDS)
    passed = len(re.findall(r"^\[       OK \]", done.stdout, re.M))
    failed = sorted(set(re.findall(r"^\[  FAILED  \] (\S+?),? ", done.stdout, re.M)))
    if done.returncode != 0 or failed:
        said = re.findall(r"^(?:.*Failure|error: .*)\n(?:.*\n){0,4}", done.stdout, re.M)
        output = done.stdout + done.stderr
        raise CheckFailed(f"{passed} passed; status {done.returncode}; {', '.join(failed)}: " +
                          " ".join((said[0] if said else programs.tail(output)).split()), output)
    require(passed > 0, "no test ran")
    return {"detail": f"{passed} passed", "tests": passed}


def unpacked(op, folder):
    """The case file of an operation, in `folder`."""
    path = pathlib.Path(folder, f"{op}.safetensors")
    with gzip.open(programs.OPERATIONS / f"{path.name}.gz") as packed, open(path, "wb") as whole:
        shutil.copyfileobj(packed, whole)
    return path


def run_operation(op):
    """Compares an operation's results with the required ones, and some with the bits of the CPU device."""
    if programs.Clock.at_most(5) < 5:
        raise TimeOver
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        cases, results = unpacked(op, folder), {}
        for device in ("cuda", "cpu") if op in ROUNDED_AT_RANDOM else ("cuda",):
            path = pathlib.Path(folder, device)
            done = programs.run([programs.OP_CHECK, device, cases, path], SUITE_SECONDS)
            said = done.stdout + done.stderr
            # The file has the GPU's bounds, and what the GPU lacks: the CPU's differences do not count.
            require(done.returncode == 0 or device == "cpu" and path.exists(), programs.tail(said))
            results[device] = safetensors_file.load(path)
    on_gpu = results["cuda"]
    others = [name for name, entry in on_gpu.items() if results.get("cpu", on_gpu).get(name) != entry]
    require(not others, f"{len(others)} results have other bits on the CPU, such as {', '.join(others[:3])}")
    cases = {name.split("/")[0] for name in on_gpu}
    require(cases, "no case ran")
    return {"detail": f"{len(cases)} cases", "cases": len(cases)}


def find_sanitizer():
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", "")] + [f"{home}/bin" for home in homes if home])
    return shutil.which("compute-sanitizer", path=path)


class Sanitizer:
    """A tool of compute-sanitizer. The smallest test finds out, once, whether the tool works on this machine."""

    def __init__(self, path, tool):
        self.command = [path, "--tool", tool]
        self.lock = threading.Lock()
        self.refusal = None  # None: not known yet; "": the tool works

    def run(self, results, pattern):
        """The tool's output, the match of its error summary if it has one, and the tests' status."""
        seconds = min(SANITIZER_SECONDS, results.seconds_left())
        if seconds < 10:
            raise TimeOver
        try:
            if (programs.OPERATIONS / f"{pattern}.safetensors.gz").exists():
                with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
                    done = programs.run([*self.command, programs.OP_CHECK, "cuda", unpacked(pattern, folder)], seconds)
            else:
                done = programs.run([*self.command, programs.KERNELS, f"--gtest_filter={pattern}"], seconds)
        except Late as late:
            if seconds < SANITIZER_SECONDS:
                raise TimeOver from late
            raise Skipped(f"it takes longer than {seconds:.0f} s") from late
        said = done.stdout + done.stderr
        return said, re.search(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) error", said), done.returncode

    def why_refused(self, results):
        with self.lock:
            if self.refusal is None:
                said, summary, _ = self.run(results, SMALLEST)
                refused = re.search(r"(?i)=+ .*(not supported|LibraryNotLoaded|failed to initialize|unable to|internal sanitizer error).*", said)
                self.refusal = refused[0].strip("= ") if refused else "" if summary else programs.tail(said, 2) or "it says nothing"
        return self.refusal


def sanitize(results, sanitizer, pattern):
    if refusal := sanitizer.why_refused(results):
        raise Skipped(f"refused here: {refusal}")
    start = time.monotonic()
    said, summary, status = sanitizer.run(results, pattern)
    require(summary, f"it ended without a summary, with status {status}: {programs.tail(said)}")
    errors = int(summary[1] if summary[1] is not None else summary[3])
    first = re.search(r"^=+ (?:Error|ERROR|Invalid|Uninitialized|Race|Program hit).*", said, re.M)
    require(errors == 0, f"{errors} errors, the first: {first[0].strip('= ') if first else programs.tail(said)}")
    require(status == 0, f"a test failed: {programs.tail(said)}")
    return {"detail": f"nothing found in {time.monotonic() - start:.0f} s"}
