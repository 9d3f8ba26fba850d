"""What the service and its Ray driver tell each other: one message a frame, JSON."""

from typing import Any

import msgspec


class DriverSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is told when it starts, over standard input. `control`: where it listens to the service."""

    control: str
    address: str | None
    runtime_env: dict[str, Any]
    log_bytes: int


class Start(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Start a server; `key` names this life of it. `instructions` is a `ServerSpec` without an address to bind."""

    key: int
    server: str
    instructions: bytes
    python: str | None
    path: list[str]
    environ: dict[str, str]
    resources: dict[str, float]
    log: str

    def __repr__(self) -> str:
        """Without the instructions and the environment, which may be secret."""
        return f"Start(key={self.key}, server={self.server!r})"


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End a server: with time to end by itself, or at once."""

    key: int
    grace_s: float


class Listening(msgspec.Struct, tag=True, frozen=True):
    """A server can be connected to."""

    key: int
    address: str
    node: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A server has ended: with a code, or in a way that `why` tells."""

    key: int
    code: int | None
    why: str = ""


class Connected(msgspec.Struct, tag=True, frozen=True):
    """There is a cluster to start servers on."""


class Unusable(msgspec.Struct, tag=True, frozen=True):
    """There is no cluster to start servers on; the driver waits to be ended."""

    why: str


ToDriver = Start | Stop
ToService = Connected | Listening | Ended | Unusable
