#!/usr/bin/env python3
"""tinyshakespeare: 1 MB of Shakespeare's plays, as one document; its last tenth is for validation.

    python data/tinyshakespeare.py                       338 thousand tokens of GPT-2, in data/tinyshakespeare
    python data/tinyshakespeare.py --tokenizer bytes --out data/tinyshakespeare_bytes
"""

import fractions

import common
import documents
from download import RemoteFile

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def plan(arguments, downloader):
    folder = arguments.out / "download"
    remote = RemoteFile(URL, "tinyshakespeare.txt", SHA256)
    path = downloader.fetch(remote, folder)
    part = common.remote_part(remote, downloader, folder, lambda path: [documents.file_bytes(path)])
    streams = common.split_streams(lambda: [documents.file_bytes(path)], part.files, fractions.Fraction(1, 10))
    return common.Plan(URL, streams)


if __name__ == "__main__":
    common.main(__doc__, "tinyshakespeare", plan)
