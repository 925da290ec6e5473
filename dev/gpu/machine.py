"""The GPU and the libraries that a check ran with, and the GPU's clocks."""

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess

SECONDS = 60  # the most time for nvidia-smi
FIELDS = ["clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "utilization.gpu"]
# The reasons why the clocks are not higher; older drivers use the second name.
REASONS = ["clocks_event_reasons.active", "clocks_throttle_reasons.active"]
# The bits of those reasons that slow a busy GPU down (nvidia-smi's documentation).
SLOWED_BY = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
             0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}


def query(fields):
    """The values for the GPU that the programs use. None if nvidia-smi is missing, does not know the fields or hangs."""
    if not shutil.which("nvidia-smi"):
        return None
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        run = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={gpu}"],
                             capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return [value.strip() for value in run.stdout.strip().split(",")] if run.returncode == 0 else None


def clocks():
    """The clocks, temperature and power of this moment, and what limits the clocks; {} if unknown."""
    values = query(FIELDS)
    if not values:
        return {}
    found = dict(zip(FIELDS, values))
    reasons = query(REASONS[:1]) or query(REASONS[1:])
    if reasons:
        with contextlib.suppress(ValueError):  # "[N/A]"
            bits = int(reasons[0], 16)
            found["slowed by"] = ", ".join(name for bit, name in SLOWED_BY.items() if bits & bit) or "nothing"
    return found


def library(name):
    """A CUDA library, from the folder where the launcher found it; None if there is none."""
    for folder in os.environ.get("BUNDLE_LIBRARY_PATH", "").split(":"):
        path = pathlib.Path(folder, name)
        if folder and path.exists():
            try:
                return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            except OSError:
                return None
    return None


def number_of(name, function):
    """The version number that a library reports; 0 if it is missing."""
    loaded = library(name)
    if not loaded or not hasattr(loaded, function):
        return 0
    call = getattr(loaded, function)
    if function == "ncclGetVersion":
        version = ctypes.c_int()
        call(ctypes.byref(version))
        return version.value
    call.restype = ctypes.c_size_t
    return call()


def dotted(number, *units):
    return ".".join(str(number // unit % 100) for unit in units) if number else ""


def about(bundle):
    """The machine and the versions of its software, for the head of a report."""
    name, driver, memory = query(["name", "driver_version", "memory.total"]) or ("", "", "")
    return {
        "gpu": name, "driver": driver, "memory": memory,
        "cuda": cuda_version(),
        "cuBLASLt": dotted(number_of("libcublasLt.so.13", "cublasLtGetVersion"), 10000, 100, 1),
        "NCCL": dotted(number_of("libnccl.so.2", "ncclGetVersion"), 10000, 100, 1),
        "cuDNN": dotted(number_of("libcudnn.so.9", "cudnnGetVersion"), 10000, 100, 1),
        "PyTorch": torch_version(),
        "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": (bundle / "commit.txt").read_text().strip(),
    }


def cuda_version():
    """The driver's version of CUDA; the programs link their own runtime, which uses the driver's interface."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def torch_version():
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
