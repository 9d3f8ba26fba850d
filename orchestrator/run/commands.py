"""What a person can tell a run while it goes on, as plain values: JSON objects with a "command" in them. Pure.

`parse_command` is the only way in: what it returns has the right shape, though it may still be refused by the run.
docs/control.md has the contract.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec


class Pause(msgspec.Struct, frozen=True, tag_field="command", tag="pause", forbid_unknown_fields=True):
    """Open no new groups; what is open ends, what is queued is served."""


class Resume(msgspec.Struct, frozen=True, tag_field="command", tag="resume", forbid_unknown_fields=True):
    """Go on after a pause."""


class Drain(msgspec.Struct, frozen=True, tag_field="command", tag="drain", forbid_unknown_fields=True):
    """End as after a signal."""


class Ratio(msgspec.Struct, frozen=True, tag_field="command", tag="ratio", forbid_unknown_fields=True):
    """Other ratios for some envs, in the sense of the configuration."""

    envs: dict[str, float]


class Quarantine(
    msgspec.Struct, frozen=True, tag_field="command", tag="quarantine", forbid_unknown_fields=True
):
    """Leave an env out, without probes, until it is restored by hand."""

    env: str


class Restore(msgspec.Struct, frozen=True, tag_field="command", tag="restore", forbid_unknown_fields=True):
    """Take an env back, whoever left it out."""

    env: str


class Evaluate(msgspec.Struct, frozen=True, tag_field="command", tag="eval", forbid_unknown_fields=True):
    """Evaluate an env now, or all of them."""

    env: str | None = None


class MaxInflight(
    msgspec.Struct, frozen=True, tag_field="command", tag="max-inflight", forbid_unknown_fields=True
):
    """How many rollouts may be in flight."""

    value: int


class Endpoint(msgspec.Struct, frozen=True, tag_field="command", tag="endpoint", forbid_unknown_fields=True):
    """One inference server more, or one less."""

    action: Literal["add", "remove"]
    url: str


Command = Pause | Resume | Drain | Ratio | Quarantine | Restore | Evaluate | MaxInflight | Endpoint

RUN_HEADER = "Run-Id"
"""With which a status says whose it is: a port that a killed run had may be another one's by now."""

TOKEN_FILE = "control.token"  # noqa: S105  the name of a file
"""In the run directory: the token that whoever sends a command needs."""

NAMES = ("pause", "resume", "drain", "ratio", "quarantine", "restore", "eval", "max-inflight", "endpoint")


class CommandError(ValueError):
    """What was sent is no command."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who said it, and when by the wall clock (seconds of the epoch)."""

    by: str
    at: float

    def __str__(self) -> str:
        return f"since {shown_time(self.at)}, by {self.by}"


def parse_command(value: object) -> Command:
    """A command from decoded JSON; CommandError that says what is wrong with it."""
    if not isinstance(value, Mapping) or not isinstance(value.get("command"), str):
        raise CommandError('a command is an object such as {"command": "pause"}')
    if value["command"] not in NAMES:
        raise CommandError(f'there is no command "{value["command"]:.40}"; there are: {", ".join(NAMES)}')
    try:
        command: Command = msgspec.convert(value, type=Command)
    except msgspec.ValidationError as error:
        raise CommandError(f"{value['command']}: {error}") from None
    return command


def as_json(command: Command) -> dict[str, Any]:
    """The command as it is sent and recorded."""
    return dict(msgspec.to_builtins(command))


def shown_time(at: float) -> str:
    """A time of the wall clock, for people."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
