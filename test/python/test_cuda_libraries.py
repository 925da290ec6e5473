"""The trainer for GPUs opens cuBLASLt only when it needs it (llmc/device/cuda/shared_library.h). It starts without the library,
and finds it where the build found it. Reading the library's version needs no GPU."""

import os
import pathlib
import subprocess

import pytest

import run_paths

BUILD = pathlib.Path(os.environ.get("BUILD_DIR", pathlib.Path(__file__).resolve().parents[2] / "build"))
TRAINER = BUILD / "gpu/train_gpt"
OBJECT = BUILD / "objects/llmc/device/cuda/cublaslt_library.o"
ASKS = """
#include <cstdio>
#include <exception>
extern "C" std::size_t cublasLtGetVersion();
int main() {
    try {
        std::printf("%zu\\n", cublasLtGetVersion());
    } catch (const std::exception& error) {
        std::printf("%s\\n", error.what());
    }
}
"""
pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="the trainer for GPUs is not built here, or with sanitizers")


def run(*command, folder=None):
    """The output of a command with LD_LIBRARY_PATH set to this folder only, or unset."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | ({"LD_LIBRARY_PATH": str(folder)} if folder else {}))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def link(program, folders):
    """A program that prints the library's version or an error, and looks for it in these folders."""
    program.with_suffix(".cpp").write_text(ASKS)
    run("g++", program.with_suffix(".cpp"), OBJECT, "-lfmt", "-ldl", *[f"-Wl,-rpath,{folder}" for folder in folders], "-o", program)
    return program


@pytest.fixture(scope="module")
def asks(tmp_path_factory):
    """A program that looks in the trainer's folders."""
    return link(tmp_path_factory.mktemp("asks") / "asks", run_paths.of(TRAINER))


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with an empty file in place of the library."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / run_paths.find(TRAINER, "libcublasLt.so.*").name).touch()
    return folder


def test_found_where_the_build_had_it(asks, elsewhere, tmp_path):
    major = int(run_paths.find(TRAINER, "libcublasLt.so.*").name.split(".")[2])
    assert int(run(asks)) // 10000 == major
    # It looks there, not only among the system's libraries.
    assert f"{elsewhere}/libcublasLt.so.{major}: file too short" in run(link(tmp_path / "other", [elsewhere]))


def test_one_line_says_what_is_missing(asks, elsewhere):
    said = run(asks, folder=elsewhere)
    library = run_paths.find(TRAINER, "libcublasLt.so.*").name
    assert said == (f"--device cuda: {elsewhere}/{library}: file too short (searched in LD_LIBRARY_PATH, where `make` found it, and in "
                    f"the system's libraries); add the directory of {library} to LD_LIBRARY_PATH (the CUDA toolkit has it, and "
                    "PyTorch for CUDA), or use --device cpu")


def test_one_line_says_what_is_too_old(asks, elsewhere):
    [library] = elsewhere.iterdir()
    run("g++", "-shared", "-x", "c++", "/dev/null", "-o", library)
    said = run(asks, folder=elsewhere)
    assert said == f"--device cuda: {library.name} is too old: it has no cublasLtGetVersion; install a newer version, or use --device cpu"


def test_the_trainer_starts_without_it(elsewhere):
    assert "libcublas" not in run("ldd", TRAINER)
    assert run(TRAINER, "--version", folder=elsewhere).startswith("train_gpt ")
