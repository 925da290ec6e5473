"""The quick checks of `make lint`: how the C++ files are formatted, and what shellcheck and pyflakes find; that the files
of `make test-long` can be read; and how long the files of llmc/ are."""

import collections
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import prose

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Target of the Makefile: whether its tool is installed, and how to fix what it finds.
CHECKS = {
    "check-format": (lambda: shutil.which("clang-format-14"), "`make format` formats these files"),
    "check-shell": (lambda: shutil.which("shellcheck"), "mend what shellcheck names"),
    "check-python": (lambda: importlib.util.find_spec("pyflakes"), "mend what pyflakes names"),
    "check-prose": (lambda: True, "mend these sentences (docs/terms.md, test/python/prose.py)"),
}


@pytest.mark.parametrize("target", CHECKS)
def test_is_clean(target, tmp_path):
    is_here, remedy = CHECKS[target]
    if not is_here():
        pytest.skip(f"the tool of `make {target}` is not installed; `make lint` installs it")
    # A build folder of its own: make notes its flags there. This call has no flags, but `make test` may have some.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", target, f"BUILD={tmp_path}", f"PYTHON={sys.executable}"]
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if check.returncode != 0:
        pytest.fail(f"{remedy}:\n{check.stdout}{check.stderr}", pytrace=False)


def test_long_suites_are_collected():
    """If a module that they import is removed, this test fails; otherwise only `make test-long` would."""
    files = sorted((ROOT / "test/python").glob("long_*.py"))
    assert files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *files]
    environment = {"BUILD_DIR": str(ROOT / "build"), **os.environ}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    # NO_TESTS_COLLECTED: all of them skip themselves on this machine.
    assert found.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), found.stdout + found.stderr


# A header and its sources are read together. In llmc/ they have at least 100 lines, and each file has at most 400. These are
# shorter, for a reason.
SHORTER = {
    "many files include it, which need nothing else from its neighbors": """
        core/dtype core/error core/memory_layout core/random core/standard_library core/standard_streams core/version
        comm/tree_sum device/heads device/stochastic_rounding device/cpu/activation_math device/cpu/parallel
        device/cuda/cuda_tensors device/cuda/gpus device/cuda/grid device/cuda/heads device/cuda/launch device/cuda/reduce
        device/cuda/runtime device/cuda/shared_library model/operation_rows model/tensor_parallel optim/schedule
        parallel/step/step_streams""",
    "takes another file's place in a build without a library": """
        comm/transport_no_mpi comm/nccl/no_nccl device/cuda/no_cuda device/cuda/no_cudnn""",
    "the kernel lab has a page of the same name": "device/cuda/relu_squared device/cuda/soft_cap",
    "compiled apart, since all of CudaOps together would be the longest step of a build": """
        device/cuda/ops_attention device/cuda/ops_embedding""",
    "part of another program or another library": "data/bpe_c device/cuda/cublaslt_library",
    "the header of two files with other names": "data/stories/story_plots",
    "one of the files that implement a header, which is longer": """
        model/check_model model/operations_attention model/placing model/run_list""",
    "one subject that only one other file needs, which is long": """
        comm/machine_lock model/rope_angles parallel/step/chunk_buffers train/token_choice""",
}


def test_files_have_100_to_400_lines():
    lines = collections.Counter()
    for path in (ROOT / "llmc").rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            count = len(path.read_text().splitlines())
            assert count <= 400, f"{path}: {count} lines, the most are 400; divide it by subject"
            lines[str(path.relative_to(ROOT / "llmc").with_suffix(""))] += count
    shorter = [name for names in SHORTER.values() for name in names.split()]
    assert sorted(name for name, count in lines.items() if count < 100) == sorted(shorter)


WORDS = "word " * 20
# File: its text, and what is found in it.
PROSE = {
    "dangling.h": ("// Of two ranks the first one counts.\n", "opens with a dangling 'Of'"),
    "second.cpp": ("int x;  // The first. Where it ends\n// no, this is another comment\n", "opens with a dangling 'Where'"),
    "words.md": ("A line.\nThe " + "word " * 35 + "end.\n", "37 words, the most are 35"),
    "cell.md": ("| a | Beside the shards nothing is kept |\n|---|---|\n", "opens with a dangling 'Beside'"),
    "doc.py": ('"""Behind this nothing follows."""\n', "opens with a dangling 'Behind'"),
    "hash.sh": ("# What is left over goes.\n", "opens with a dangling 'What'"),
    "term.py": ("x = 1  # the rehearsal of products\n", "'rehearsal' is retired, say autotune"),
    "first_term.h": ("// moments in shards\n", "'moments in shards' is retired"),
    # Dangling words in lower case.
    "lower.h": ("int x;  // of two ranks\n", "opens with a dangling 'of'"),
    "lower.cu": ("// where rank 0 listens\n", "opens with a dangling 'where'"),
    "later.h": ("// It ends. of two ranks.\n", "opens with a dangling 'of'"),
    "lower.py": ("x = 1  # beside the others\n", "opens with a dangling 'beside'"),
    "lower.md": ("| what | where |\n|---|---|\n| what it needs | a file |\n", "opens with a dangling 'what'"),
    "aligned.h": ("int x;  // the first\nint y;  // of two ranks\n", "aligned.h:2: opens with a dangling 'of'"),
    "aligned.py": ("x = 1  # the first\ny = 2  # of two ranks\n", "aligned.py:2: opens with a dangling 'of'"),
    # Labels before the sentence.
    "note.h": ("// Note: Of two ranks one counts.\n", "opens with a dangling 'Of'"),
    "numbered.h": ("int x;  // (1) Of two ranks.\n", "opens with a dangling 'Of'"),
    "chapter.h": ("// 1.2. Of two ranks.\n", "opens with a dangling 'Of'"),
    "example.h": ("// Example 2b: Of two ranks.\n", "opens with a dangling 'Of'"),
    "lettered.md": ("a) Where it ends.\n", "opens with a dangling 'Where'"),
    "footnote.md": ("[^1]: What is left over goes.\n", "opens with a dangling 'What'"),
    "rank.cpp": ('fail("error: Of two ranks one is gone");\n', "opens with a dangling 'Of'"),
    "counted.py": ("# rank 3: where it listens\n", "opens with a dangling 'where'"),
    "bold.md": ("**Note:** Of two ranks one counts.\n", "opens with a dangling 'Of'"),
    "tag.md": ("<b>Of</b> two ranks one counts.\n", "opens with a dangling 'Of'"),
    "parameter.h": ("// @param x Of two ranks.\n", "opens with a dangling 'Of'"),
    # Indented comments, and messages.
    "indented.h": ("// It is so:\n//   Where it ends, another begins.\n", "opens with a dangling 'Where'"),
    "long.cpp": (f'fail("The {WORDS}"\n     "{WORDS}");\n', "41 words"),
    "wide.h": ("// A comment of many columns, which no formatter breaks: " + "x" * 80 + "\n", "columns, the most are 120"),
    # Comments of all kinds.
    "block.h": ("int x; /* Of two ranks. */\n", "opens with a dangling 'Of'"),
    "stars.h": ("/*\n * A rank counts. What is left\n * over goes.\n */\n", "opens with a dangling 'What'"),
    "no_stars.h": (f"    /* The {WORDS}\n       {WORDS}. */\n", "41 words"),
    "item.h": (f"// A list:\n// - The {WORDS}\n//   {WORDS}end.\n", "item.h:2: 42 words"),
    "inner_item.h": (f"// - A list:\n//   - The {WORDS}\n//     {WORDS}end.\n", "inner_item.h:2: 42 words"),
    "item.py": (f"# - A list:\n#   1. The {WORDS}\n#      {WORDS}end.\n", "item.py:2: 42 words"),
    "after_items.h": ("// - A list.\n//   - An item.\n//   Where it ends.\n", "opens with a dangling 'Where'"),
    "async.py": ('async def f():\n    """Of two ranks."""\n', "opens with a dangling 'Of'"),
    "trailing.sh": ("x=$#  # Of two ranks\n", "opens with a dangling 'Of'"),
    "trailing.toml": ('x = "# of a string"  # Of two ranks\n', "opens with a dangling 'Of'"),
    "trailing/Makefile": ("x := 1  # Of two ranks\n", "opens with a dangling 'Of'"),
    "help/Makefile": ("test: x  ## what is tested\n", "opens with a dangling 'what'"),
    "Containerfile": ("# Of two layers.\n", "opens with a dangling 'Of'"),
    "CITATION.cff": ('message: "Of two papers cite one."\n', "opens with a dangling 'Of'"),
    ".clang-tidy": ("# What is checked.\n", "opens with a dangling 'What'"),
    ".ci/run": ("# What is run.\n", "opens with a dangling 'What'"),
    ".github/workflows/ci.yml": ("name: ci  # what is run\n", "opens with a dangling 'what'"),
    # Pages.
    "under_item.md": ("- An item.\n\n      Of code\n\n  Of an item.\n", "under_item.md:5: opens with a dangling 'Of'"),
    "deep_item.md": (f"1. A list\n   - The {WORDS}\n     {WORDS}end.\n", "deep_item.md:2: 42 words"),
    "deep_paragraph.md": ("1. A list\n   - An item\n\n     Of an item.\n", "opens with a dangling 'Of'"),
    "html.md": ("A line. <!-- x --> Of two ranks.\n", "opens with a dangling 'Of'"),
    "html_lines.md": ("A line.\n\n<!-- x\ny --> Of two ranks.\n", "html_lines.md:4: opens with a dangling 'Of'"),
    # Retired terms with endings.
    "rehearsed.h": ("// a product that is rehearsed\n", "'rehearse' is retired"),
    "rehearsing.md": ("It is rehearsing.\n", "'rehearse' is retired"),
    "meetings.sh": ("# after two meetings\n", "'meeting' is retired, say rendezvous"),
    "publications.toml": ("# the publications\n", "'publication' is retired"),
    "making.py": ("# making again the values\n", "'make again' is retired"),
    # Strings.
    "message.cpp": ('fail("Where there is one, it stays.");\n', "opens with a dangling 'Where'"),
    "adjacent.cpp": ('fail("Of "  // one\n     "two " "ranks one.");\n', "adjacent.cpp:1: opens with a dangling 'Of'"),
    "second_line.cpp": ('fail("a title\\n  Where there is one.");\n', "opens with a dangling 'Where'"),
    "raw.cpp": ('auto x = R"(Of two "ranks" one)";\n', "opens with a dangling 'Of'"),
    "number.cpp": ("auto x = 1'000;  // of it's own\n", "opens with a dangling 'of'"),
    "term.cpp": ('fail("the meetings of all ranks");\n', "'meeting' is retired"),
    "message.py": ('fail("Beside it " "there is one.")\n', "opens with a dangling 'Beside'"),
    "formatted.py": ('fail(f"What {name} gives is wrong.")\n', "opens with a dangling 'What'"),
    "inside.py": ('fail(f"{name}: {\', \'.join(x) or \'Of all ranks none.\'}")\n', "opens with a dangling 'Of'"),
    "message.sh": ('echo "Of two ranks one."\n', "opens with a dangling 'Of'"),
}


@pytest.mark.parametrize("name", PROSE)
def test_a_sentence_that_must_be_read_twice_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    text, finding = PROSE[name]
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    assert [finding in found for found in prose.findings(tmp_path / name, prose.retired_terms())] == [True]


PLAIN = {
    "plain.md": "What is a mesh? It has ranks.\n\n    Of code nothing is read\n\n`Of` is a word.\n",
    "item.md": "- An item.\n\n      Of code\n\nText.\n\n    Of code\n",
    "cells.md": "| what | Where |\n|---|---|\n| a line of `x` | a file |\n",
    "html.md": "A line. <!-- Of a comment -->\n\n<!--\nOf a comment\n-->\n",
    "plain.cpp": 'const char* text = "// of a string";  // Officially, a rank counts.\n//    of a picture\n',
    "strings.cpp": 'f("Where is it to be?"); f("of fragments there are many"); f("Of three words"); f(/*what=*/1, /*where*/2);\n',
    "picture.h": "// - An item:\n//       of a picture\n//   its end\n",
    "picture.py": "# A formula:\n#     of a picture\n",
    "strings.py": 'fail("of all fragments one", "Of three words", f"{x}: Of a string in it")\n',
    "strings.sh": 'x="a # of a string"; y=${x#of}; z=a#of\n',
    "help/Makefile": "test: x  ## the tests of it\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_questions_code_and_plain_sentences_are_no_findings(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(PLAIN[name])
    assert list(prose.findings(tmp_path / name, prose.retired_terms())) == []


def test_files_without_a_known_ending_are_read_too():
    names = {str(path.relative_to(ROOT)) for path in prose.files_of_the_repository()}
    assert names >= {".ci/run", ".github/workflows/ci.yml", ".clang-tidy", "CITATION.cff", "Containerfile", "Makefile"}
