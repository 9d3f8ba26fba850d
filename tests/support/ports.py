"""Ports for servers that have to be told theirs before they listen, because others are told it too.

They lie outside of those that the system gives to connections and to whoever asks for any port, and each of the tests that run side by
side has a part of them, handed out in turn: what was free when it was asked for is free when a server listens, and after a restart.
"""

import itertools
import os
import random
import socket

_FIRST, _LAST = 20_000, 32_000
_PARTS = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
_SIZE = (_LAST - _FIRST) // _PARTS
_turns = itertools.count(random.SystemRandom().randrange(_SIZE))
"""Begins anywhere, for the sake of tests of another checkout."""


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    while True:
        place = next(_turns) % (_SIZE - count)
        for _ in range(count - 1):
            next(_turns)
        first = _FIRST + _WORKER * _SIZE + place
        if all(map(_is_free, range(first, first + count))):
            return first


def free_port() -> int:
    """A port that nobody uses, at any address of this machine."""
    return free_ports(1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
