"""What the policy said in one group of an Atropos environment, and which part of it a score belongs to.

An environment asks the policy as it likes: several answers to one prompt, conversations side by side. Each call
continues a conversation or begins one, as its tokens say; a conversation is one sequence, with the ids and
log-probabilities of the engine. What the environment hands in is found among them by its token ids, else by the text
of its unmasked tokens, because most environments tokenise the text again by themselves.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.errors import FailureKind, RolloutFailure
from envs.merging import Turn, extends, merge_turns
from envs.model import Model, Reply
from envs.rollout import Sequence


@dataclass(slots=True, eq=False)
class Conversation:
    """Turns that extend each other, with what was asked last: a chat, or a raw prompt. Evaluations have no turns."""

    replies: list[Reply]
    asked: list[dict[str, Any]] | str
    turns: list[Turn] = field(default_factory=list)

    @property
    def sequence(self) -> Sequence:
        """The conversation as it is trained on; nothing sampled at all is a failure, repeated."""
        sequences = merge_turns(self.turns)
        if not sequences:
            raise RolloutFailure(
                FailureKind.EMPTY_COMPLETION, "the policy sampled no token in a conversation", retryable=True
            )
        return sequences[-1]

    @property
    def messages(self) -> list[dict[str, Any]]:
        asked = self.asked if isinstance(self.asked, list) else [{"role": "user", "content": self.asked}]
        return [*asked, self.replies[-1].message]

    @property
    def texts(self) -> list[str]:
        return [reply.text for reply in self.replies]


class GroupRecord:
    """The calls of one group. `failure` is the last that the model raised, whatever the environment made of it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.conversations: list[Conversation] = []
        self.failure: RolloutFailure | None = None
        self.started = time.perf_counter()

    async def chat(
        self, messages: Seq[Mapping[str, Any]], tools: Any, count: int, options: Mapping[str, Any]
    ) -> list[Conversation]:
        """`count` answers to one chat, as the conversations that they continue or begin."""
        asked = [dict(message) for message in messages]
        return self._place(
            asked, await self._ask(count, lambda model: model.chat(asked, tools=tools, **options))
        )

    async def complete(
        self, prompt: str | Seq[int], count: int, options: Mapping[str, Any]
    ) -> list[Conversation]:
        """The same for a raw prompt."""
        asked = prompt if isinstance(prompt, str) else f"({len(prompt)} token ids)"
        return self._place(asked, await self._ask(count, lambda model: model.complete(prompt, **options)))

    async def _ask(self, count: int, call: Callable[[Model], Awaitable[Reply]]) -> list[Reply]:
        async def one() -> Reply:
            return await call(self.model.sibling())

        failed: list[RolloutFailure] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(one()) for _ in range(count)]
        except* RolloutFailure as group:
            failed += _leaves(group)
        if failed:
            self.failure = failed[0]
            raise failed[0]
        return [task.result() for task in asked]

    def _place(self, asked: list[dict[str, Any]] | str, replies: list[Reply]) -> list[Conversation]:
        """No await in here: what is found is still so when it is continued."""
        before = self._continued(replies[0].turn) if replies else None
        earlier = ([], []) if before is None else (list(before.replies), list(before.turns))
        placed = []
        for reply in replies:
            turns = [] if reply.turn is None else [reply.turn]
            made = Conversation([*earlier[0], reply], asked, [*earlier[1], *turns])
            if before is not None:
                before.replies, before.asked, before.turns = made.replies, made.asked, made.turns
                made, before = before, None
            else:
                self.conversations.append(made)
            placed.append(made)
        return placed

    def _continued(self, turn: Turn | None) -> Conversation | None:
        if turn is None:
            return None
        continued = (talk for talk in self.conversations if talk.turns and extends(turn, talk.turns[-1]))
        return next(continued, None)


class OneSize:
    """The size of a group is the config's of the whole instance, so that groups of another size wait for those that run.

    In the order in which they came: else groups of one size, of which some always run, keep the others out for ever.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._free = asyncio.Condition()
        self._running = 0

    @asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[None]:
        """Run a group of this size inside."""
        async with self._turn, self._free:
            await self._free.wait_for(lambda: not self._running or self._config.group_size == count)
            self._config.group_size = count
            self._running += 1
        try:
            yield
        finally:
            async with self._free:
                self._running -= 1
                self._free.notify_all()


def find(conversations: Seq[Conversation], tokens: Seq[int], said: str) -> Conversation | None:
    """The conversation that an environment handed in as these tokens, whose unmasked ones read as `said`."""
    ids = np.asarray(tokens)
    for talk in conversations:
        if np.array_equal(talk.sequence.tokens, ids):
            return talk
    best: tuple[int, int] = (0, 0)
    found = None
    for talk in conversations:
        fit = _fit(talk, _squeezed(said))
        if fit > best:
            best, found = fit, talk
    return found


def _leaves(group: BaseExceptionGroup[RolloutFailure]) -> Iterator[RolloutFailure]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _fit(talk: Conversation, said: str) -> tuple[int, int]:
    """How well a text fits: all replies, or the last, as they are; within more; cut to a limit. Then by length."""
    whole, last = _squeezed("".join(talk.texts)), _squeezed(talk.texts[-1])
    if said in (whole, last):  # also a reply of nothing
        return (3, len(said))
    for part in filter(None, (whole, last)):
        if part in said:
            return (2, len(part))
    return (1, len(said)) if said and (whole.startswith(said) or last.startswith(said)) else (0, 0)


def _squeezed(text: str) -> str:
    """Without white space, which tokenisers and templates treat as they like."""
    return "".join(text.split())
