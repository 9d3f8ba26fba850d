"""Rollouts of a run directory for the page: found, read and sampled, in plain data that is bounded in number and size.

Every question opens a reader of its own, so that any thread may ask. A search for a text looks for a bounded time and
says how far it came. Raises ValueError for a question that makes no sense.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.archive import ArchivedGroup, ArchivedRollout, RolloutReader
from orchestrator.archive.records import content_text, text_of, tool_calls_of

MAX_GROUPS = 100
SEARCH_S = 1.5
MAX_TEXT = 50_000
"""Characters of one message."""
MAX_MESSAGES = 500
MAX_FAILURES = 50
MAX_DETAIL = 5_000


class ArchivedRollouts:
    """Asked by the page."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._clock = clock

    def find(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """A page of groups that fit, newest first, without their conversations."""
        contains = wanted.get("contains", "")
        with RolloutReader(self._run_dir) as reader:
            found, next_seq, partial = list[ArchivedGroup](), None, False
            until = self._clock() + SEARCH_S
            for group in reader.groups(
                env=wanted.get("env") or None,
                outcome=wanted.get("outcome") or None,
                step=_bounds("step", wanted),
                task=_whole("task", wanted),
                min_reward=_number("min_reward", wanted),
                max_reward=_number("max_reward", wanted),
                after=_whole("after", wanted),
                texts=bool(contains),
            ):
                next_seq = group.seq
                if not contains or _says(group, contains):
                    found.append(group)
                if len(found) >= MAX_GROUPS:
                    break
                if self._clock() > until:
                    partial = True
                    break
            else:
                next_seq = None
            counts = reader.counts()
        return {
            "groups": [_plain(group) for group in found],
            "next": next_seq,
            "partial": partial,
            "envs": sorted({count.env for count in counts}),
            "outcomes": sorted({count.outcome for count in counts}),
        }

    def group(self, key: str) -> dict[str, Any] | None:
        """One group with its conversations."""
        with RolloutReader(self._run_dir) as reader:
            group = reader.group(int(key) if key.isdecimal() else key)
            return None if group is None else _plain(group, texts=True)

    def failures(self) -> list[dict[str, Any]]:
        """What went wrong, the most frequent first."""
        with RolloutReader(self._run_dir) as reader:
            found = reader.failures()[:MAX_FAILURES]
        return [
            {**asdict(one), "detail": one.detail[-MAX_DETAIL:], "text": one.text[:MAX_DETAIL]}
            for one in found
        ]

    def sample(self, last_step: int, *, groups: int, max_bytes: int) -> dict[str, Any]:
        """Groups of every env from all over the run, newest first, as many as fit; for a report."""
        with RolloutReader(self._run_dir) as reader:
            counts = reader.counts()
            envs = sorted({count.env for count in counts})
            found: dict[int, dict[str, Any]] = {}
            size = 0
            for group in _spread_out(reader, envs, last_step, groups):
                if group.seq in found or size > max_bytes:
                    continue
                found[group.seq] = _plain(group, texts=True)
                size += sum(
                    len(text_of(message)) for rollout in group.rollouts for message in rollout.messages
                )
        return {
            "groups": [found[seq] for seq in sorted(found, reverse=True)],
            "kinds": {
                "envs": envs,
                "outcomes": sorted({count.outcome for count in counts}),
                "note": "a sample",
            },
            "failures": self.failures(),
        }


def _spread_out(
    reader: RolloutReader, envs: list[str], last_step: int, groups: int
) -> Iterator[ArchivedGroup]:
    """Groups with conversations, some of each env from each part of the run."""
    parts = max(1, min(8, last_step))
    each = max(1, groups // (parts * max(1, len(envs))))
    for part in range(parts):
        span = (1 + last_step * part // parts, max(1, last_step * (part + 1) // parts))
        for env in envs:
            looked = reader.groups(env=env, step=span, limit=4 * each)
            yield from [group for group in looked if group.has_text][:each]


def _says(group: ArchivedGroup, text: str) -> bool:
    wanted = text.casefold()
    return any(
        wanted in text_of(message).casefold() for rollout in group.rollouts for message in rollout.messages
    )


def _plain(group: ArchivedGroup, *, texts: bool = False) -> dict[str, Any]:
    told = {
        "seq": group.seq,
        "id": group.id,
        "env": group.env,
        "split": group.split,
        "task": group.task,
        "step": group.step,
        "version": group.version,
        "version_end": group.version_end,
        "outcome": group.outcome,
        "rewards": list(group.rewards),
        "mean_reward": group.mean_reward,
        "tokens": group.tokens,
        "truncated": group.truncated,
        "seconds": group.seconds,
        "finished_at": group.finished_at,
        "has_text": group.has_text,
    }
    return {**told, "rollouts": [_plain_rollout(one) for one in group.rollouts]} if texts else told


def _plain_rollout(rollout: ArchivedRollout) -> dict[str, Any]:
    return {
        "number": rollout.number,
        "reward": rollout.reward,
        "tokens": rollout.tokens,
        "metrics": rollout.metrics,
        "timings": rollout.timings,
        "seats": rollout.seats,
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "messages": [_plain_message(message) for message in rollout.messages[:MAX_MESSAGES]],
    }


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    text = content_text(message.get("content"))
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return {
        "role": str(message.get("role", "")),
        "name": str(message.get("name") or ""),
        "text": text[:MAX_TEXT],
        "cut": max(0, len(text) - MAX_TEXT),
        "reasoning": content_text(thought)[:MAX_TEXT],
        "calls": [(name, given[:MAX_TEXT]) for name, given in tool_calls_of(message)],
    }


def _whole(name: str, wanted: Mapping[str, str]) -> int | None:
    given = wanted.get(name, "").strip()
    if given and not (given.isdecimal() and len(given) < 19):
        raise ValueError(f"{name}: {given!r} is not a whole number")
    return int(given) if given else None


def _bounds(name: str, wanted: Mapping[str, str]) -> int | tuple[int, int] | None:
    first, between, last = wanted.get(name, "").partition("-")
    low = _whole(name, {name: first})
    high = _whole(name, {name: last})
    if not between:
        return low
    if low is None or high is None:
        raise ValueError(f"{name}: a number like 12, or a range like 10-20")
    return low, high


def _number(name: str, wanted: Mapping[str, str]) -> float | None:
    given = wanted.get(name, "").strip()
    try:
        return float(given) if given else None
    except ValueError:
        raise ValueError(f"{name}: {given!r} is not a number") from None
