"""Checkpoints as earlier programs wrote them, without the settings that did not exist then."""

import ctypes
import ctypes.util
import json
import shutil


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def checksum_of(text):
    """XXH3's checksum of 128 bits, as in manifests, by the library that the program is linked with."""
    xxh3 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_128bits
    xxh3.restype, xxh3.argtypes = _Hash128, (ctypes.c_char_p, ctypes.c_size_t)
    data = text.encode()
    result = xxh3(data, len(data))
    return f"{result.high:016x}{result.low:016x}"


def sealed(manifest):
    """The manifest with the checksum of the other entries in its place."""
    rest = {name: value for name, value in manifest.items() if name != "xxh3_128"}
    return rest | {"xxh3_128": checksum_of(json.dumps(rest, separators=(",", ":"), ensure_ascii=False))}


def copy_without(settings, checkpoint, folder):
    """A copy of a checkpoint whose run did not have these settings."""
    shutil.copytree(checkpoint, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sealed(manifest) == manifest  # so that only the settings change
    for name in settings:
        del manifest["configuration"][name]
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest), indent=2, ensure_ascii=False) + "\n")
    return folder
