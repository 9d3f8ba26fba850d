"""A digest of a task: 63 bits that are equal in two processes if, and in all likelihood only if, the task is.

What is digested is the task's content, as canonical msgpack: keys in order, numbers and texts as they are, arrays of
numpy by type, shape and bytes, an object that does not show itself by its attributes, and any other by its `repr`
without memory addresses. Members of a group, which may run on different servers, must have the same; 0 stands for "none
was made". Pure.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_63_BITS = (1 << 63) - 1


def digest_of(content: object) -> int:
    """The digest of a task, or of whatever identifies it."""
    try:
        encoded = _encoder.encode(content)
    # Keys of several types have no order, numbers beyond 64 bits no place: what they look like must do.
    except Exception:  # noqa: BLE001  foreign data, whose repr may raise anything too
        encoded = _without_address(content).encode("utf-8", "surrogatepass")
    number = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
    return number & _63_BITS or 1


def _plain(value: object) -> Any:
    """Stand-in for what msgpack does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [value.dtype.str, list(value.shape), value.tobytes()]
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return [type(value).__qualname__, vars(value)]
    return _without_address(value)


def _without_address(value: object) -> str:
    try:
        return _ADDRESS.sub("", repr(value))
    # A digest must not fail a rollout, whatever the environment's objects do when they are shown.
    except Exception:  # noqa: BLE001  see above
        return type(value).__qualname__


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
