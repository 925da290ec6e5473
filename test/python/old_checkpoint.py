"""Checkpoints as earlier programs wrote them, without the settings that did not exist then."""

import ctypes
import ctypes.util
import json
import shutil

import boxes
import safetensors_numpy


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def checksum_of(text):
    """XXH3's checksum of 128 bits, as in manifests, by the library that the program is linked with."""
    xxh3 = ctypes.CDLL(ctypes.util.find_library("xxhash")).XXH3_128bits
    xxh3.restype, xxh3.argtypes = _Hash128, (ctypes.c_char_p, ctypes.c_size_t)
    data = text.encode() if isinstance(text, str) else text
    result = xxh3(data, len(data))
    return f"{result.high:016x}{result.low:016x}"


def sealed(manifest):
    """The manifest with the checksum of the other entries in its place."""
    rest = {name: value for name, value in manifest.items() if name != "xxh3_128"}
    return rest | {"xxh3_128": checksum_of(json.dumps(rest, separators=(",", ":"), ensure_ascii=False))}


def write_sealed(path, manifest):
    """Writes a manifest as the program does."""
    path.write_text(json.dumps(sealed(manifest), indent=2, ensure_ascii=False) + "\n")


def write_version_2(checkpoint, folder):
    """A checkpoint as version 2 had it: the weights in one file and the optimizer's state in another."""
    folder.mkdir(parents=True)
    safetensors_numpy.save(folder / "model.safetensors", boxes.weights(checkpoint))
    safetensors_numpy.save(folder / "optimizer.safetensors",
                           {name.removeprefix("optim.state."): array for name, array in boxes.state(checkpoint).items()})
    files = {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": checksum_of((folder / name).read_bytes())}
             for name in ("model.safetensors", "optimizer.safetensors")}
    write_sealed(folder / "manifest.json", json.loads((checkpoint / "manifest.json").read_text()) | {"version": 2, "files": files})
    return folder


def copy_without(settings, checkpoint, folder):
    """A copy of a checkpoint whose run did not have these settings."""
    shutil.copytree(checkpoint, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sealed(manifest) == manifest  # so that only the settings change
    for name in settings:
        del manifest["configuration"][name]
    write_sealed(folder / "manifest.json", manifest)
    return folder
