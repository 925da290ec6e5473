"""Checkpoints as programs before this one wrote them: without the settings that they did not have."""

import ctypes
import ctypes.util
import json
import shutil


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def checksum_of(text):
    """XXH3's of 128 bits, as manifests have it, by the library that the program is linked with."""
    xxh3 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_128bits
    xxh3.restype, xxh3.argtypes = _Hash128, (ctypes.c_char_p, ctypes.c_size_t)
    data = text.encode()
    result = xxh3(data, len(data))
    return f"{result.high:016x}{result.low:016x}"


def sealed(manifest):
    """With the checksum of the rest in its place."""
    rest = {name: value for name, value in manifest.items() if name != "xxh3_128"}
    return rest | {"xxh3_128": checksum_of(json.dumps(rest, separators=(",", ":"), ensure_ascii=False))}


def copy_without(settings, checkpoint, folder):
    """A copy of a checkpoint whose run had no such settings."""
    shutil.copytree(checkpoint, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sealed(manifest) == manifest  # so that it is the settings alone that change
    for name in settings:
        del manifest["configuration"][name]
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest), indent=2, ensure_ascii=False) + "\n")
    return folder
