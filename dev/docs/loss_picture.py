#!/usr/bin/env python3
"""Draws the loss of a run as README.md shows it: docs/pictures/loss.png, by `make pictures`.

    python3 dev/docs/loss_picture.py RUN [FILE]

scripts/plot.py draws it. Few colors make the file small; the background is white, so that the lines can
be read on a dark page too.
"""

import pathlib
import subprocess
import sys
import tempfile

from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "loss.png"
COLORS = 64

if __name__ == "__main__":
    run, path = sys.argv[1], pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE
    with tempfile.TemporaryDirectory() as folder:
        drawn = pathlib.Path(folder, "loss.png")
        subprocess.run([sys.executable, ROOT / "scripts" / "plot.py", run, "-o", drawn], check=True, stdout=subprocess.DEVNULL)
        picture = Image.open(drawn).convert("RGB")
        picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"wrote {path}")
