"""How a connection notices that the other host has gone without a word.

A host that loses its power or its network closes nothing. TCP's own patience is a quarter of an hour while something is
unacknowledged, without end while nothing is, and its repetitions come up to two minutes apart, so that a network which
is back is not noticed either. Here nothing may stay unacknowledged for `GONE_S`, an idle connection is asked for, and a
connection that is not made within `CONNECT_S` is begun anew. `orchestrator.trainer.channel` does the same: it may not
import this.
"""

import socket
from typing import Any

import zmq

GONE_S = 20
CONNECT_S = 5
_IDLE_S, _INTERVAL_S, _QUESTIONS = 10, 5, 3


def notice_vanished(socket: zmq.Socket[bytes]) -> None:
    """Before a socket binds or connects; other transports than TCP take no notice."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _QUESTIONS)
    socket.setsockopt(zmq.TCP_MAXRT, GONE_S * 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_S * 1000)


def watchful_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket of an HTTP client (aiohttp's `socket_factory`): an answer may take hours, but not from a host that is gone."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


_NAMED = {
    "TCP_KEEPIDLE": _IDLE_S,
    "TCP_KEEPINTVL": _INTERVAL_S,
    "TCP_KEEPCNT": _QUESTIONS,
    "TCP_USER_TIMEOUT": GONE_S * 1000,
}
_OPTIONS = [(getattr(socket, name), value) for name, value in _NAMED.items() if hasattr(socket, name)]
"""Not every system has all of them."""
