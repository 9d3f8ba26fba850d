"""What an env server is told when it starts: one line of JSON on its standard input. Shared by both sides."""

from typing import Any

import msgspec

from envs.curve import KeyPair, ServerKeys
from envs.logs import LogFormat

EXIT_STARTUP = 3
"""Exit code of a server that could not start."""


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a server is told: `name` is its own, `env` the environment's. `splits` are loaded before it is ready.

    `report` names a file in which it describes its first tasks before it is ready. What is random while the environment
    is loaded, and while its tasks are made, follows from `seed`.
    """

    name: str
    id: str
    bind: str
    env: str = ""
    args: dict[str, Any] = {}
    splits: list[str] = []
    capacity: int = 256
    seed: int = 0
    insecure: bool = False
    curve_secret: str = ""
    curve_public: str = ""
    curve_clients: list[str] = []
    key_variables: list[str] = []
    log_level: str = "info"
    log_format: LogFormat = "json"
    report: str = ""

    def __repr__(self) -> str:
        """Without keys and arguments, which may be secret."""
        return f"ServerSpec(name={self.name!r}, id={self.id!r}, bind={self.bind!r})"

    @property
    def keys(self) -> ServerKeys | None:
        if not self.curve_secret:
            return None
        return ServerKeys(KeyPair(self.curve_public, self.curve_secret), tuple(self.curve_clients))
