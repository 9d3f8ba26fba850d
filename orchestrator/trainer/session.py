"""The trainer's half of the conversation without any I/O: frames in, frames out.

Keeps what was asked and not yet answered, and asks again after every handshake: when the service restarts, or the
network breaks, the connection is unknown to it, the rank joins again and nothing that was asked is lost. What
can only be wrong (another run, one that was set back, another world size, a rank taken over by a newer process) raises TrainerLinkError.
"""

import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Answer,
    Engines,
    Finished,
    Join,
    Leave,
    Missing,
    Next,
    Ok,
    Ping,
    Pong,
    ProtocolError,
    Published,
    Refused,
    Request,
    Served,
    Unknown,
    Welcome,
    decode_to_server,
    decode_to_trainer,
    encode,
)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer; `frames` are those of the batch for `served`."""

    answer: Answer
    frames: Sequence[Any] = ()


class TrainerSession:
    """One rank's conversation over any number of connections."""

    def __init__(self, *, rank: int, world_size: int, token: str) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be at least 0 and below the world size, got {rank} of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self._token = token
        self._client = uuid.uuid4().hex
        self._ids = 0
        self._asked: dict[int, Request] = {}
        self._joined = False
        self.welcome: Welcome | None = None
        self.engines_waiting = 0
        """Engines that wait for weights, as the service said last."""
        self.over = ""
        """Why the run is over, once the service has said so; until it is served again."""

    def hello(self) -> bytes:
        """What a new connection starts with."""
        self._joined = False
        host, pid = socket.gethostname(), os.getpid()
        asks_for_it = any(isinstance(asked, Next) and asked.rewind for asked in self._asked.values())
        rewinds = None if self.welcome is None or asks_for_it else self.welcome.rewinds
        return encode(
            Join(PROTOCOL, self.rank, self.world_size, self._client, host, pid, self._token, rewinds)
        )

    def goodbye(self) -> bytes:
        return encode(Leave())

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    def ask(self, request: Request) -> list[bytes]:
        """Remember a request until it is answered; what to send now. ValueError when it is out of bounds."""
        frame = encode(request)
        # The service would refuse the connection for it; the caller's own line is the better place to hear of it.
        decode_to_server(frame)
        self._asked[request.id] = request
        return [frame] if self._joined else []

    def forget(self, request_id: int) -> None:
        """The answer to a request no longer matters."""
        self._asked.pop(request_id, None)

    def silence(self) -> bytes:
        """What to send when nothing has come for a while."""
        return encode(Ping()) if self._joined else self.hello()

    def receive(self, frames: Sequence[Any]) -> tuple[list[bytes], Answered | None]:
        """Take a message in: what to send now, and the answer that it is, if it is one that is waited for."""
        try:
            message = decode_to_trainer(frames[0] if frames else b"")
        except ProtocolError as error:
            raise TrainerLinkError(
                f"the orchestrator's message cannot be understood ({error}); do both sides have the same version?"
            ) from error
        match message:
            case Welcome():
                self._check_run(message)
                again = self._joined
                self.welcome, self._joined = message, True
                if not again:
                    self.over = ""
                # While the service was away several joins may have piled up; one answer is enough to ask again.
                return [] if again else [encode(asked) for asked in self._asked.values()], None
            case Unknown():
                return [self.hello()] if self._joined else [], None
            case Refused():
                raise TrainerLinkError(f"rank {self.rank} was refused: {message.reason}")
            case Pong():
                self.engines_waiting = message.waiting
                self.over = message.over or self.over
                return [], None
            case Served() | Missing() | Finished() | Ok() | Published() | Engines():
                if isinstance(message, Finished):
                    self.over = message.reason
                known = self._asked.pop(message.id, None) is not None
                return [], Answered(message, frames[1:]) if known else None

    def _check_run(self, welcome: Welcome) -> None:
        if self.welcome is not None and self.welcome.run != welcome.run:
            raise TrainerLinkError(
                f"the orchestrator now serves run {welcome.run}, rank {self.rank} trains on run {self.welcome.run}; "
                "restart the trainer for the new run"
            )
