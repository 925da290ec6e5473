"""docs/options.md is what `make docs` would write now, and has every option of the program."""

import re
import sys

import pytest

import program

sys.path.append(str(program.ROOT / "dev" / "docs"))

import options_page  # noqa: E402


@pytest.fixture(scope="module")
def help_text():
    return program.run("--help").stdout


def test_the_page_is_as_new(help_text):
    new = options_page.page(help_text, program.run("plan", "--help").stdout)
    assert options_page.PAGE.read_text() == new, "`make docs` writes docs/options.md"


def test_every_option_is_on_the_page(help_text):
    rows = re.findall(r"^\| `(--[a-z0-9-]+).*?` \| (.*) \| (.*) \|$", options_page.page(help_text), re.MULTILINE)
    options = re.findall(r"^  (?:-h,)?(--[a-z0-9-]+)", help_text.split("\nGeneration:")[0], re.MULTILINE)
    assert len(options) > 60
    assert sorted(options) == sorted(name for name, _, _ in rows)
    assert all(meaning for _, _, meaning in rows)
    assert sum(default != "" for _, default, _ in rows) > 40 and not any("default" in meaning for _, _, meaning in rows)


def test_values_and_defaults():
    text = """
Model:
  --model {a,b}                     Start from these sizes (default: a)
  --bias [={true,false}]            Use biases
  --longer-than-the-column {some,others}
                                    A text
                                    on two lines (default: some; others
                                    on GPUs)
  --check-replicas-at-all NUMBER    Compare what is alike (on all ranks)
  --resume [DIR]                    Resume | a run


Generation:
  --generate prints the prompt and more.

Exit status:
  0   done
"""
    assert options_page.page(text).split("## Model")[1] == r"""

| option | default | meaning |
|---|---|---|
| `--model {a,b}` | a | Start from these sizes |
| `--bias` |  | Use biases |
| `--longer-than-the-column {some,others}` | some; others on GPUs | A text on two lines |
| `--check-replicas-at-all NUMBER` |  | Compare what is alike (on all ranks) |
| `--resume [DIR]` |  | Resume \| a run |

## Generation

    --generate prints the prompt and more.

## Exit status

    0   done
"""
