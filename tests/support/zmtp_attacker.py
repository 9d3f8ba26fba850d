"""Peers that break the rules of ZMTP, as raw TCP: floods of pings and messages, resets, halves of messages, silence.

A connection whose input stopped because nobody reads, whose peer then resets it, and in whose buffer a ping is left:
that once ended the whole process inside libzmq.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = _frame(4, b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
PING = _frame(4, b"\x04PING" + struct.pack(">H", 0) + b"x")


def message(body: bytes, *, more: bool = False) -> bytes:
    """One frame of a message; `more` frames belong to it."""
    return _frame(1 if more else 0, body)


@contextmanager
def connection(port: int, *, handshake: bool = True) -> Iterator[socket.socket]:
    """A connection that has shaken hands; leaving the block resets it."""
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if handshake:
            peer.sendall(GREETING + READY)
            received = 0
            while received <= len(GREETING):
                received += len(peer.recv(4096))
        yield peer


def pose_as_service(listener: socket.socket) -> None:
    """Take the next connection of a trainer, flood it with messages and pings, and reset it."""
    peer, _ = listener.accept()
    with peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.settimeout(10.0)
        peer.sendall(GREETING + _frame(4, b"\x05READY" + _property(b"Socket-Type", b"ROUTER")))
        received = 0
        while received <= len(GREETING):
            received += len(peer.recv(4096))
        peer.settimeout(1.0)
        try:
            peer.sendall((message(b"\xc1") + PING) * 2000)
        except OSError:
            return


def strike(port: int) -> None:
    """Flood with messages and pings that nobody asked for, never read an answer, and reset."""
    with connection(port) as peer:
        peer.settimeout(1.0)
        try:
            peer.sendall((message(b"\xc1") + PING) * 2000)
            peer.sendall(PING * 2000)
        except OSError:
            return


def fill_and_reset(peer: socket.socket, high_water: int) -> None:
    """Send more than a peer that reads nothing takes in, each message with a ping, and reset once its input has stopped.

    A pong for every ping says how far it has come. What is left of the last buffer that it read has pings in it.
    """
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.settimeout(20.0)
    peer.sendall((message(b"\xc1") + PING) * (high_water + 500))
    pong = len(_frame(4, b"\x04PONGx"))
    received = 0
    while received < pong * (high_water - 1):
        received += len(peer.recv(65536))
    peer.close()


def accept(listener: socket.socket) -> socket.socket:
    """The next connection of a client, which has shaken hands."""
    peer, _ = listener.accept()
    peer.settimeout(20.0)
    peer.sendall(GREETING + _frame(4, b"\x05READY" + _property(b"Socket-Type", b"ROUTER")))
    received = b""
    while b"READY" not in received:
        received += peer.recv(4096)
    return peer
