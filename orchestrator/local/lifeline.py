"""The child's end of standard input: the spec comes in as its first line, and its end means that the parent is gone.

The descriptor is read raw and unbuffered, so that nothing is lost between the two and no lock is held when the
interpreter ends. Interrupts from the terminal are the parent's to handle, unless a person typed the spec.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")
_STDIN = 0
_MAX_SPEC_BYTES = 2**20


def read_spec(kind: type[T]) -> T:
    """The spec on the first line; a mistake in it ends the process with one line on standard error."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < _MAX_SPEC_BYTES:
        byte = os.read(_STDIN, 1)
        if not byte:
            break
        line += byte
    try:
        spec = msgspec.json.decode(bytes(line) or b"{}", type=kind)
    except msgspec.DecodeError as error:
        sys.exit(f"the spec on standard input cannot be used: {error}")
    if not os.isatty(_STDIN):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return spec


def watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` from a thread of its own, once, when standard input ends."""

    def watch() -> None:
        while os.read(_STDIN, 4096):
            pass
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
