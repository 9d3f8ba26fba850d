"""CURVE keys for servers that are reached over TCP: making, storing and reading them.

Both sides have a key pair. A client knows the server's public key; a server knows the public keys of the
clients that it lets in. Keys are Z85 text of 40 characters. A key is given as a path to a file or as
"env:NAME", an environment variable; never on a command line. Secret key files are made readable by their
owner alone, and secrets do not appear in any repr or error message.
"""

import asyncio
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import structlog
import zmq
import zmq.utils.z85

from envs.drained import DrainedSocket

log = structlog.get_logger()

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyFileError(ValueError):
    """A key that cannot be read; the message names the file or variable, never its content."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret half."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client needs: its own pair and the public key of the servers."""

    own: KeyPair
    server: str


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a server needs: its own pair and the public keys of those it lets in."""

    own: KeyPair
    clients: tuple[str, ...]


def generate_pair() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Make `<name>.public` and `<name>.secret` in a directory; existing files are never overwritten."""
    pair = generate_pair()
    directory.mkdir(parents=True, exist_ok=True)
    public, secret = directory / f"{name}.public", directory / f"{name}.secret"
    for path in (public, secret):
        if path.exists():
            raise KeyFileError(f"{path} exists already; delete it first, or choose another directory")
    for path, key, mode in ((secret, pair.secret, 0o600), (public, pair.public, 0o644)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
    return public, secret


def read_key(source: str | Path) -> str:
    """A key from a file, or from an environment variable as "env:NAME"."""
    text = str(source)
    if text.startswith("env:"):
        value = os.environ.get(text[4:])
        if value is None:
            raise KeyFileError(f"the environment variable {text[4:]} with a CURVE key is not set")
    else:
        try:
            value = Path(text).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise KeyFileError(f"cannot read the CURVE key {text}: {why}") from None
    value = value.strip()
    if not _Z85.fullmatch(value):
        raise KeyFileError(
            f"{text} does not hold a CURVE key (40 characters of Z85); make one with `env keygen`"
        )
    return value


def read_pair(source: str | Path) -> KeyPair:
    """The pair of a secret key; the public half follows from it. A file that others can read is pointed out."""
    secret = read_key(source)
    if not str(source).startswith("env:"):
        _warn_of_loose_permissions(Path(source).absolute())
    try:
        return KeyPair(zmq.curve_public(secret.encode()).decode(), secret)
    except (zmq.ZMQError, ValueError):
        raise KeyFileError(f"{source} does not hold a CURVE secret key") from None


@lru_cache(maxsize=64)
def _warn_of_loose_permissions(path: Path) -> None:
    """Once for each file, however many environments use it."""
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "key.readable_by_others", file=str(path), mode=oct(stat.S_IMODE(mode)), remedy=f"chmod 600 {path}"
        )


def read_client_keys(*, server_key: str | Path, client_key: str | Path) -> ClientKeys:
    """What a client needs, from the server's public key and the client's own secret key."""
    return ClientKeys(read_pair(client_key), read_key(server_key))


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Make a socket speak CURVE as a client; before it connects."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())


class Gatekeeper:
    """Lets in only clients whose public key is known: the context's answer to ZMQ's authentication requests (ZAP).

    One per context, there before a server's socket is bound; stop it before the context ends.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Iterable[str]) -> None:
        self._clients = frozenset(zmq.utils.z85.decode(key.encode()) for key in clients)
        socket = context.socket(zmq.REP)
        socket.bind("inproc://zeromq.zap.01")
        self._socket = DrainedSocket(socket, self._on_request, loop=asyncio.get_running_loop())

    def _on_request(self, frames: list[bytes]) -> None:
        version, request_id, _, _, _, mechanism, *credentials = frames
        known = mechanism == b"CURVE" and bool(self._clients.intersection(credentials))
        verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self._socket.send([version, request_id, *verdict, b"", b""])

    def stop(self) -> None:
        self._socket.close()


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Make a socket speak CURVE as a server; before it binds."""
    socket.setsockopt(zmq.ZAP_DOMAIN, b"global")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
