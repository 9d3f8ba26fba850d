"""How the policy takes its seat in an episode of verifiers v1.

The library's harnesses ask the model through an interception server, which gives every trace a client made from
an endpoint's config. Here each trace that plays the policy gets a client that is answered by a `Model` of its
own, so that turns are recorded by trace; roles with an endpoint of their own keep the library's client.
Which rollout a trace belongs to follows from the context that it runs in.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]  # only in a virtualenv of its own
from verifiers.v1.clients.client import RelayReply  # type: ignore[import-not-found]  # as above
from verifiers.v1.dialects import ChatDialect  # type: ignore[import-not-found]  # as above
from verifiers.v1.interception import Interception  # type: ignore[import-not-found]  # as above

from envs.adapters.policy import completion, turn_options
from envs.errors import RolloutFailure
from envs.model import Model


@dataclass(slots=True)
class Seat:
    """One trace's policy, and the failure of its model that the trace only knows as text."""

    model: Model
    failure: RolloutFailure | None = None


@dataclass(slots=True)
class RolloutSeats:
    """One rollout: the model it was given, and a seat per trace that asks it."""

    model: Model
    seats: dict[str, Seat] = field(default_factory=dict)


current_rollout: ContextVar[RolloutSeats] = ContextVar("rollout")


class SeatClient(vf.Client):  # type: ignore[misc]  # the library has no types for us
    """The library's client, answered by a seat's `Model`."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def get_response(self, dialect: Any, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        seat = self._seat
        try:
            if not isinstance(dialect, ChatDialect):
                raise RolloutFailure(
                    "unsupported_api",
                    f"the harness speaks {type(dialect).__name__}; the policy is asked by chat completions",
                    retryable=False,
                )
            reply = await seat.model.chat(
                body["messages"], tools=body.get("tools"), **turn_options(seat.model, body)
            )
        except RolloutFailure as failure:
            seat.failure = failure
            # `Model` has already repeated what is worth it, so a status that the harness does not repeat.
            raise vf.ProviderError(failure.message, status_code=400) from failure
        seat.failure = None
        raw = completion(reply, model=seat.model.name)
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response

    async def relay(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A stream for harnesses that insist on one: the whole answer, in the dialect's events."""
        response = await self.get_response(dialect, body, *args, **kwargs)

        async def events() -> AsyncIterator[bytes]:
            for event in dialect.stream_events(response.raw):
                yield event

        async def close() -> None:
            pass

        return RelayReply(content_type="text/event-stream", chunks=events(), close=close)


class PolicyInterception(Interception):  # type: ignore[misc]  # the library has no types for us
    """The library's interception, with seats for the traces that play the policy."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    async def start(self) -> None:
        """The inner one is started and stopped by the library."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        rollout = current_rollout.get()
        async with self._inner.acquire(session) as slot:
            # Roles that the author or the args pinned to an endpoint of their own keep it.
            if session.ctx.client == client_config(rollout.model):
                seat = Seat(rollout.model.sibling(name=session.ctx.model))
                rollout.seats[session.trace.id] = seat
                session.client = SeatClient(seat)
            yield slot


def client_config(model: Model) -> Any:
    """How the library is told of our endpoint; only its listing of models is asked there directly."""
    return vf.EvalClientConfig(base_url=model.base_url, api_key_var="ROLLOUT_POLICY_KEY")
