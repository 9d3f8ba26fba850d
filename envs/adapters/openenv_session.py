"""One session of an OpenEnv server: a WebSocket on which every message gets one answer.

A server pings its clients and drops those that do not answer within seconds, and only a client that reads answers
pings. So a task of its own reads from the first to the last moment, also while the policy thinks.
What the server says is wrong becomes one of three things: `ServerFullError` (try again later),
`ActionRefusedError` (the policy's mistake) or a `RolloutFailure`.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from envs.errors import FailureKind, RolloutFailure, shown_url

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_CLOSE_S = 2.0
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
_RETRYABLE = ("FACTORY_ERROR", "SESSION_ERROR")


class ServerFullError(Exception):
    """The server has no session left; `max_sessions` is how many it has, 0 when it does not say."""

    def __init__(self, message: str, max_sessions: int) -> None:
        super().__init__(message)
        self.max_sessions = max_sessions


class ActionRefusedError(Exception):
    """The server could not read the action; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a reset or a step."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class Session:
    """An environment of the server, for one rollout."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, shown: str) -> None:
        self._socket = socket
        self._shown = shown
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()

    async def reset(self, arguments: Mapping[str, Any]) -> Outcome:
        """Begin an episode."""
        return self._outcome(await self._ask("reset", arguments))

    async def step(self, action: Mapping[str, Any]) -> Outcome:
        """Act, or raise ActionRefusedError."""
        return self._outcome(await self._ask("step", action))

    async def state(self) -> None:
        """Ask for anything: a server answers only who has a session."""
        await self._ask("state", None)

    async def close(self) -> None:
        """Say that the session is over, so that its place is free at once."""
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_json({"type": "close"})

    async def read(self) -> None:
        """Read until the server closes; also what answers its pings."""
        async for message in self._socket:
            if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                self._answers.put_nowait(message.data)
        self._answers.put_nowait(None)

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Any:
        message: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": data}
        # A server that is full says so and closes, perhaps before this is sent: what it said is there to be read.
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_str(msgspec.json.encode(message).decode())
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)
            raise RolloutFailure(
                FailureKind.CONNECTION,
                f"{self._shown} closed the session (code {self._socket.close_code})",
                retryable=True,
            )
        try:
            decoded = msgspec.json.decode(answer)
            said, found = decoded["type"], decoded["data"]
        except (msgspec.DecodeError, KeyError, TypeError):
            raise self._bad_answer(kind, answer) from None
        if said == "error":
            raise self._error(kind, found if isinstance(found, dict) else {"message": str(found)})
        return found

    def _error(self, kind: str, data: Mapping[str, Any]) -> Exception:
        code, message = str(data.get("code", "")), str(data.get("message", ""))
        if code == "CAPACITY_REACHED":
            most = data.get("max_sessions")
            return ServerFullError(message, most if isinstance(most, int) else 0)
        if code in _REFUSED and kind == "step":
            return ActionRefusedError(_validation_text(data) or message)
        return RolloutFailure(
            code.lower() or "error", f"{self._shown}: {kind} failed: {message}", retryable=code in _RETRYABLE
        )

    def _outcome(self, data: Any) -> Outcome:
        if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise self._bad_answer("observation", data)
        reward = data.get("reward")
        if reward is not None and not isinstance(reward, (int, float)):
            raise self._bad_answer("reward", data)
        return Outcome(data["observation"], None if reward is None else float(reward), bool(data.get("done")))

    def _bad_answer(self, what: str, answer: object) -> RolloutFailure:
        return RolloutFailure(
            FailureKind.BAD_RESPONSE,
            f"{self._shown} did not answer {what} as an OpenEnv server does: {str(answer)[:200]}",
            retryable=True,
        )


@contextlib.asynccontextmanager
async def open_session(http: aiohttp.ClientSession, base_url: str) -> AsyncIterator[Session]:
    """A session at `<base_url>/ws`, ended with the block. Raises what the block raises, never a group."""
    shown = shown_url(base_url)
    try:
        socket = await http.ws_connect(
            f"{base_url}/ws",
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise RolloutFailure(
            FailureKind.CONNECTION, f"{shown}: no session: {error or type(error).__name__}", retryable=True
        ) from None
    session = Session(socket, shown)
    try:
        async with socket, asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(session.read())
            yield session
            await session.close()
            reading.cancel()
    except BaseExceptionGroup as group:
        # Only the block raises: the reader ends quietly, whatever becomes of the connection.
        raise group.exceptions[0] from None


def _validation_text(data: Mapping[str, Any]) -> str:
    """What pydantic says of each field, in one line."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return ""
    said = []
    for error in errors:
        if isinstance(error, dict):
            place = ".".join(map(str, error.get("loc") or ()))
            said.append(f"{place}: {error.get('msg', '')}" if place else str(error.get("msg", "")))
    return "; ".join(said)
