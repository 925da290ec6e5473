"""Shared by the Python tests: the seed of this run, and the programs under test."""

import json
import os
import pathlib
import secrets
import signal
import sys
import tempfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / ".python"))  # packages that `make deps` installs from PyPI, in the place where the scripts find them
# Every mpirun of the tests may run as root, and prints nothing of its own beside a job's lines.
OF_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # some containers forbid it
    "EVENT_NOEPOLL": "1",  # scripts/launch.sh gives the reason
}
# Replaces pyarrow, so that tests need no real Parquet files: texts are lines of JSON.
PARQUET_OF_LINES = """
import json, types
class ArrowException(Exception): pass
class ParquetFile:
    def __init__(self, path): self.file = open(path)
    def __enter__(self): return self
    def __exit__(self, *trouble): self.file.close()
    def iter_batches(self, batch_size, columns):
        assert columns == ["text"]
        for line in self.file:
            try: texts = json.loads(line)
            except ValueError: raise ArrowException("no lines of JSON")
            yield types.SimpleNamespace(column=lambda i: types.SimpleNamespace(to_pylist=lambda: texts))
"""


def pytest_configure(config):
    # A process that a shell starts in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The algorithms that the trainer chooses are kept here, not in the user's cache.
    config.cache_of_tests = tempfile.TemporaryDirectory(prefix="cache-of-tests-")
    os.environ["XDG_CACHE_HOME"] = config.cache_of_tests.name
    os.environ.update(OF_OPEN_MPI)
    config.addinivalue_line("markers", "more: runs in `make test-more`, not in `make test`")
    config.seed = int(os.environ.get("SEED", secrets.randbelow(2**31)))


def pytest_unconfigure(config):
    config.cache_of_tests.cleanup()


def pytest_report_header(config):
    return f"random operands: repeat with SEED={config.seed}"


@pytest.fixture(scope="session")
def seed(request):
    return request.config.seed


@pytest.fixture
def parquet_of_lines(tmp_path, monkeypatch):
    """Makes scripts find PARQUET_OF_LINES as pyarrow. Returns a function that makes such a file."""
    folder = tmp_path / "modules" / "pyarrow"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PARQUET_OF_LINES)
    (folder / "parquet.py").write_text("from pyarrow import ParquetFile\n")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.syspath_prepend(folder.parent)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "pyarrow"}
    yield lambda texts: "".join(json.dumps(texts[i:i + 3]) + "\n" for i in range(0, len(texts), 3)).encode()
    for name in ("pyarrow", "pyarrow.parquet"):
        sys.modules.pop(name, None)
    sys.modules.update(kept)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, seed):
    from simulated_experiment import Experiment  # imports PyTorch
    return Experiment(tmp_path_factory.mktemp("experiment"), seed)
