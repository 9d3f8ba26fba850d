"""Looks at a folder of weights before an engine is asked to load it.

An engine that is given a folder that is not there, or a file that was cut short, answers first and dies at its
next request; so names, headers and sizes are looked at here: every file of weights is a whole file of its kind, every
tensor lies where its header says and has the bytes that its shape needs, and every shard that an index names is there with the
tensors that it should have. Tensors are not read: the cost is a header a file. Blocking; callers leave the event loop.
"""

import json
import math
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what the format allows
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What JSON of another shape raises."""
_POINTER = b"version https://git-lfs"
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Of the types of safetensors that take whole bytes; sizes of others are not looked at."""


class _Damaged(Exception):  # noqa: N818  carries what is said of a file
    """A file that an engine cannot load."""


def find_problem(folder: Path) -> str:
    """Why the folder cannot be loaded, empty if nothing speaks against it."""
    try:
        if not folder.is_dir():
            return f"{folder} is not a folder"
        files = {path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)}
        if not files:
            return f"{folder} holds no weights ({', '.join(_WEIGHT_FILES)})"
        tensors: dict[str, frozenset[str]] = {}
        for path in sorted(files):
            try:
                tensors[path.name] = _tensors_in(path)
            except _Damaged as damage:
                return f"{path} {damage}"
        for index in sorted(folder.glob("*.index.json")):
            if problem := _compare(index, tensors):
                return problem
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror or error})"
    return ""


def _compare(index: Path, tensors: Mapping[str, frozenset[str]]) -> str:
    """What an index of shards names and its folder does not have."""
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = set(places.values())
        missing = sorted(name for name in shards if name not in tensors)
    except _MALFORMED:
        return f"{index} is not an index of weights"
    if missing:
        return f"{index.parent} lacks {', '.join(missing[:5])}, which {index.name} names"
    for tensor, shard in places.items():
        if shard.endswith(".safetensors") and tensor not in tensors[shard]:
            return f'{index.parent / shard} has no tensor "{tensor}", which {index.name} says is there'
    return ""


def _tensors_in(path: Path) -> frozenset[str]:
    """The names of a file's tensors, where its kind tells them without reading it; _Damaged if it is not whole."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise _Damaged("is not a file")
    if path.suffix == ".safetensors":
        return _read_safetensors(path, facts.st_size)
    with path.open("rb") as file:
        first = file.read(len(_POINTER))
    if not first:
        raise _Damaged("is empty")
    _refuse_pointer(first)
    if path.suffix == ".gguf" and not first.startswith(b"GGUF"):
        raise _Damaged("is no GGUF file")
    # A file of torch is a zip archive, whose table of contents is at its end, or, from older versions, a pickle.
    if first.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise _Damaged(f"is cut short ({facts.st_size} bytes, and no table of contents at the end)")
    return frozenset()


def _read_safetensors(path: Path, size: int) -> frozenset[str]:
    """8 bytes with the header's length, the header in JSON, the data."""
    with path.open("rb") as file:
        first = file.read(len(_POINTER))
        _refuse_pointer(first)
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise _Damaged(
                f"is cut short or no safetensors file ({size} bytes, not even its header is whole)"
            )
        file.seek(_LENGTH_BYTES)
        header = file.read(length)
    try:
        tensors: dict[str, Any] = json.loads(header)
        tensors.pop("__metadata__", None)
        spans = sorted((int(begin), int(end), name) for name, (begin, end) in _offsets(tensors))
        needed = {name: _bytes_of(entry) for name, entry in tensors.items()}
    except _MALFORMED as error:
        raise _Damaged("has a header that cannot be read") from error
    expected = _LENGTH_BYTES + length + max((end for _, end, _ in spans), default=0)
    if size != expected:
        raise _Damaged(f"has {size} bytes where its header says {expected}")
    place = 0
    for begin, end, name in spans:
        if begin != place or end < begin:
            raise _Damaged(f'has a header that cannot be right: tensor "{name}" lies at {begin} to {end}')
        place = end
        if needed[name] is not None and end - begin != needed[name]:
            raise _Damaged(
                f'has {end - begin} bytes of tensor "{name}" where its shape and type need {needed[name]}'
            )
    return frozenset(tensors)


def _offsets(tensors: Mapping[str, Any]) -> list[tuple[str, tuple[int, int]]]:
    return [(name, tuple(entry["data_offsets"])) for name, entry in tensors.items()]


def _bytes_of(entry: Mapping[str, Any]) -> int | None:
    item_bytes = _ITEM_BYTES.get(entry["dtype"])
    return None if item_bytes is None else math.prod(map(int, entry["shape"])) * item_bytes


def _refuse_pointer(first: bytes) -> None:
    if first.startswith(_POINTER):
        raise _Damaged("is a pointer of Git LFS, not the weights themselves")
