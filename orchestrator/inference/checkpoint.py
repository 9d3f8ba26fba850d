"""Looks at a folder of weights before an engine is asked to load it.

An engine that is given a folder that is not there, or a file that was cut short, answers first and dies at its
next request; so names, headers and sizes are looked at here. Tensors are not read: the cost is a few kilobytes
a file. Blocking; callers leave the event loop.
"""

import json
from pathlib import Path

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what the format allows
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # JSON of another shape


def find_problem(folder: Path) -> str:
    """Why the folder cannot be loaded, empty if nothing speaks against it."""
    try:
        if not folder.is_dir():
            return f"{folder} is not a folder"
        files = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
        if not files:
            return f"{folder} holds no weights ({', '.join(_WEIGHT_FILES)})"
        for index in sorted(folder.glob("*.index.json")):
            if problem := _find_missing_shards(index):
                return problem
        for path in sorted(files):
            if path.suffix == ".safetensors" and (problem := _find_damage(path)):
                return f"{path} {problem}"
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror or error})"
    return ""


def _find_missing_shards(index: Path) -> str:
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        missing = sorted(name for name in shards if not (index.parent / name).is_file())
    except _MALFORMED:
        return f"{index} is not an index of weights"
    return f"{index.parent} lacks {', '.join(missing)}, which {index.name} names" if missing else ""


def _find_damage(path: Path) -> str:
    """What is wrong with a safetensors file: 8 bytes with the header's length, the header in JSON, the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            return f"is cut short or no safetensors file ({size} bytes, not even its header is whole)"
        header = file.read(length)
    try:
        tensors = json.loads(header)
        end = max(
            (entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0
        )
        expected = _LENGTH_BYTES + length + int(end)
    except _MALFORMED:
        return "has a header that cannot be read"
    return "" if size == expected else f"has {size} bytes where its header says {expected}"
