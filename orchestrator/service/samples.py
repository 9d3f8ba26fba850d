"""A few rollouts of a step for the trackers to show: of as many environments as there are, the best and the worst of a group.

Read from the archive, in the thread of whoever asks.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from orchestrator.archive import ArchivedGroup, ArchivedRollout, RolloutReader
from orchestrator.archive.records import TRAINED, text_of

MOST_CHARS = 4000
"""Of a prompt or a reply."""


def read_samples(run_dir: Path, step: int, most: int) -> list[dict[str, Any]]:
    """At most so many rows, each a rollout; none where nothing was kept."""
    rows: list[dict[str, Any]] = []
    with RolloutReader(run_dir) as reader:
        found = list(
            reader.groups(step=step, outcome=TRAINED, split="train", texts=False, newest_first=False)
        )
        for group in _in_turns(found):
            if len(rows) >= most:
                break
            full = reader.group(group.seq)
            if full is not None and full.has_text:
                rows += [_row(full, rollout) for rollout in _extremes(full)]
    return rows[:most]


def _in_turns(groups: Sequence[ArchivedGroup]) -> Iterator[ArchivedGroup]:
    """One of each env, then a second one of each, and so on."""
    by_env: dict[str, list[ArchivedGroup]] = {}
    for group in groups:
        by_env.setdefault(group.env, []).append(group)
    turns = chain.from_iterable(zip_longest(*by_env.values()))
    return (group for group in turns if group is not None)


def _extremes(group: ArchivedGroup) -> list[ArchivedRollout]:
    """The rollouts with the highest and with the lowest reward; one where all are equal."""
    ordered = sorted(group.rollouts, key=lambda rollout: rollout.reward)
    return ordered[:1] if ordered[0].reward == ordered[-1].reward else [ordered[-1], ordered[0]]


def _row(group: ArchivedGroup, rollout: ArchivedRollout) -> dict[str, Any]:
    replies = [place for place, message in enumerate(rollout.messages) if message.get("role") == "assistant"]
    last = replies[-1] if replies else len(rollout.messages)
    before, reply = rollout.messages[:last], rollout.messages[last : last + 1]
    return {
        "env": group.env,
        "task": group.task,
        "version": group.version,
        "reward": rollout.reward,
        "group_mean": group.mean_reward,
        "tokens": rollout.tokens,
        "prompt": "\n\n".join(f"[{message.get('role', '')}] {text_of(message)}" for message in before)[
            -MOST_CHARS:
        ],
        "reply": "\n".join(map(text_of, reply))[:MOST_CHARS],
    }
