"""An Atropos `BaseEnv`, unmodified, as an environment of this package. Imported only where atroposlib is installed.

A group is one `collect_trajectories`: the environment asks the policy, scores, and hands in what it likes. Every rollout of
the group is handed on: those it scored with their score, those it left out with the group's mean, so that
they weigh nothing. A group that it drops (None) is handed on with equal rewards, which the service does not train on.
Its items come from a cursor and not by index: an index keeps its item for as long as this process remembers it.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from atroposlib.envs.base import BaseEnv  # type: ignore[import-not-found]  # only in a virtualenv of its own
from atroposlib.envs.server_handling.server_baseline import (  # type: ignore[import-not-found]  # as above
    APIServerConfig,
)
from transformers import AutoTokenizer  # type: ignore[import-not-found]  # comes with atroposlib

from envs.adapters.atropos_record import Conversation, GroupRecord, OneSize, find
from envs.adapters.atropos_server import PolicyServer, current_group, managed_server
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, FailureKind, RolloutFailure
from envs.importing import nearest
from envs.model import Model
from envs.rollout import InvalidRolloutError, Rollout, Sequence

_ITEMS_KEPT = 4096
_MODEL = "policy"


class Items:
    """Tasks without end; what a task is, the environment's cursor decides when it is first asked for."""

    def __getitem__(self, index: int) -> Task:
        return {"index": index}


class AtroposEnvironment(Environment):
    """One environment. `args` are fields of its config."""

    def __init__(self, name: str, found: Any, args: Mapping[str, Any]) -> None:
        self.name = f"atropos::{name}"
        if not is_environment(found):
            raise EnvironmentLoadError(f"{self.name} is not a subclass of Atropos' BaseEnv")
        # The class as it is, asking our server instead of one of the library's.
        served = type(found.__name__, (found,), {"server_cls": PolicyServer, "__module__": found.__module__})
        config = _config(self.name, found, args)
        servers = [APIServerConfig(base_url="http://policy", model_name=_MODEL, health_check=False)]
        _check_tokenizer(self.name, config.tokenizer_name)
        self._env = served(config, servers, slurm=False, testing=False)
        self._env.server.managed_server = managed_server(_MODEL, self._env.tokenizer)
        self._items: OrderedDict[int, Any] = OrderedDict()
        self._backlog: deque[Any] = deque()
        self._cursor = asyncio.Lock()
        self._sizes = OneSize(self._env.config)

    def tasks(self, split: str) -> Tasks:
        return Items()

    async def setup(self) -> None:
        await self._env.setup()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return (await self.rollout_group(task, model, 1))[0]

    async def rollout_group(self, task: Task, model: Model, count: int) -> list[Rollout]:
        record = GroupRecord(model)
        token = current_group.set(record)
        try:
            async with self._sizes.of(count):
                item = await self._item(task["index"])
                collected, backlog = await self._env.collect_trajectories(item)
                self._backlog.extend(backlog or ())
                collected = await self._env.postprocess_histories(collected)
        # Foreign code: whatever became of it, what the model raised is what happened.
        except Exception as error:
            if record.failure is not None and record.failure is not error:
                raise record.failure from error
            raise
        finally:
            current_group.reset(token)
        groups = [group for group in (collected if isinstance(collected, list) else [collected]) if group]
        return HandedIn(record, self._env.tokenizer, count).rollouts(groups)

    async def _item(self, index: int) -> Any:
        """The item of an index: the one it had, else a leftover of an earlier group, else the cursor's next."""
        async with self._cursor:
            if index not in self._items:
                item = self._backlog.popleft() if self._backlog else await self._env.get_next_item()
                if item is None:
                    raise RolloutFailure("no_such_task", f"{self.name} has no next item", retryable=False)
                self._items[index] = item
                while len(self._items) > _ITEMS_KEPT:
                    self._items.popitem(last=False)
            return self._items[index]


class HandedIn:
    """From what an environment returned for a group to `count` rollouts."""

    def __init__(self, record: GroupRecord, tokenizer: Any, count: int) -> None:
        self._record = record
        self._tokenizer = tokenizer
        self._count = count
        self._left = list(record.conversations)

    def rollouts(self, groups: list[Mapping[str, Any]]) -> list[Rollout]:
        """Several groups are steps of one: each becomes a seat, so that its rewards are compared among themselves."""
        for group in groups:
            if any(group.get("images") or ()):
                raise RolloutFailure(
                    FailureKind.NOT_TEXT,
                    "the environment handed in images; only text works here",
                    retryable=False,
                )
            if len(group["scores"]) > self._count:
                raise InvalidRolloutError(
                    f"the environment handed in {len(group['scores'])} sequences for a group of {self._count}"
                )
        if not any(group["scores"] for group in groups):
            return self._dropped()
        members: list[list[tuple[float, Sequence | None, Conversation | None]]] = [
            [] for _ in range(self._count)
        ]
        for step, group in enumerate(groups, 1):
            seat = f"step {step}" if len(groups) > 1 else ""
            for place, score in enumerate(group["scores"]):
                sequence, talk = self._sequence(group, place) if self._record.model.train else (None, None)
                if sequence is not None and seat:
                    sequence.seat, sequence.reward = seat, float(score)
                members[place].append((float(score), sequence, talk))
        scores = [score for member in members for score, _, _ in member]
        mean = sum(scores) / len(scores)
        return [self._scored(member) if member else self._unscored(mean) for member in members]

    def _scored(self, member: list[tuple[float, Sequence | None, Conversation | None]]) -> Rollout:
        talks = [talk for _, _, talk in member if talk is not None]
        return self._rollout(
            sum(score for score, _, _ in member) / len(member),
            [sequence for _, sequence, _ in member if sequence is not None],
            talks,
            {"scored": 1.0},
        )

    def _unscored(self, reward: float) -> Rollout:
        """A rollout that the environment left out; an evaluation has nothing to say of it."""
        if not self._left or not self._record.model.train:
            raise self._record.failure or RolloutFailure(
                "unscored",
                f"the environment scored fewer than {self._count} rollouts and asked the policy for no more",
                retryable=False,
            )
        talk = self._left.pop(0)
        return self._rollout(reward, [talk.sequence], [talk], {"scored": 0.0})

    def _dropped(self) -> list[Rollout]:
        if self._record.failure is not None:
            raise self._record.failure
        talks = self._record.conversations
        if not talks or not self._record.model.train:
            raise RolloutFailure(
                "dropped", "the environment dropped the group, so that there is no score", retryable=False
            )
        # Fewer conversations than rollouts: equal rewards teach nothing, so that some may stand twice.
        chosen = [talks[place % len(talks)] for place in range(self._count)]
        return [self._rollout(0.0, [talk.sequence], [talk], {"scored": 0.0}) for talk in chosen]

    def _rollout(
        self,
        reward: float,
        sequences: list[Sequence],
        talks: list[Conversation],
        metrics: dict[str, float],
    ) -> Rollout:
        replies = [reply for talk in talks for reply in talk.replies]
        return Rollout(
            sequences=sequences,
            reward=reward,
            metrics=metrics,
            messages=[message for talk in talks for message in talk.messages],
            stop_reason=replies[-1].finish_reason if replies else "stop",
            truncated=any(reply.truncated for reply in replies),
            timings={
                "total": time.perf_counter() - self._record.started,
                "inference": sum(reply.duration_s for reply in replies),
            },
        )

    def _sequence(self, group: Mapping[str, Any], place: int) -> tuple[Sequence, Conversation | None]:
        """The engine's tokens of what was handed in at this place."""
        tokens, masks = group["tokens"][place], group["masks"][place]
        unmasked = [token for token, mask in zip(tokens, masks, strict=True) if mask != -100]
        talk = find(self._left, tokens, self._tokenizer.decode(unmasked, skip_special_tokens=True))
        if talk is None:  # a reply may hold what this tokenizer takes for special
            talk = find(self._left, tokens, self._tokenizer.decode(unmasked))
        if talk is not None:
            self._left.remove(talk)
            return talk.sequence, talk
        logprobs = group.get("inference_logprobs")
        if not logprobs:
            raise RolloutFailure(
                "unknown_tokens",
                "the environment handed in a sequence that the policy did not say, so that it has no log-probabilities",
                retryable=False,
            )
        mask = np.asarray(masks) != -100
        found = np.where(mask, np.asarray(logprobs[place], np.float32), 0.0).astype(np.float32)
        return Sequence(np.asarray(tokens, np.int32), mask.astype(np.uint8), found), None


def _check_tokenizer(name: str, tokenizer: str) -> None:
    """The library loads it whether the environment needs it or not."""
    try:
        AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise EnvironmentLoadError(
            f'{name}: tokenizer "{tokenizer}" cannot be loaded; set args.tokenizer_name to the model\'s, or to a '
            f"directory with one ({str(error).splitlines()[0]})"
        ) from error


def is_environment(value: object) -> bool:
    """Whether it is one of the library's environments."""
    return isinstance(value, type) and issubclass(value, BaseEnv) and value is not BaseEnv


def _config(name: str, found: Any, args: Mapping[str, Any]) -> Any:
    """The author's configuration with the `args`; nothing is sent to a tracker or to an API server."""
    config, _ = found.config_init()
    fields = type(config).model_fields
    unknown = [key for key in args if key not in fields]
    if unknown:
        raise EnvironmentLoadError(f'{name} has no option "{unknown[0]}"; {nearest(unknown[0], fields)}')
    try:
        return type(config)(**{**config.model_dump(), **args, "use_wandb": False})
    except ValueError as error:  # also pydantic's
        raise EnvironmentLoadError(f"{name}: args do not fit: {' '.join(str(error).split())}") from None
