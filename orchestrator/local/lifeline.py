"""The spec of a child process: the first line of its standard input, whose end means that the parent is gone."""

import os
import signal
import sys
from typing import TypeVar

import msgspec

from envs.lifeline import Lifeline

T = TypeVar("T")


def read_spec(kind: type[T]) -> tuple[T, Lifeline]:
    """The spec, and the lifeline it came by; a mistake in it ends the process with one line on standard error."""
    # Interrupts from the terminal are the parent's to handle, unless a person typed the spec.
    if not os.isatty(0):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline = Lifeline()
    try:
        return msgspec.json.decode(lifeline.read_line() or b"{}", type=kind), lifeline
    except msgspec.DecodeError as error:
        sys.exit(f"the spec on standard input cannot be used: {error}")
