"""Whether an index is one task: groups whose rollouts disagree are dropped, changed data is told."""

from typing import Any

import msgspec
from msgspec.structs import replace
from structlog.testing import capture_logs

from envs.wire import Result
from orchestrator.dispatch.work import PendingGroup
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import NEVER, TestedWorld, make_data, make_pending, make_world


def result_of(digest: int, question: str, rewards: list[float]) -> Result:
    """Rollouts of one server, which asked this."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    transcript = msgspec.msgpack.encode([{"messages": messages}] * len(rewards))
    return replace(make_data(rewards), digest=digest, transcript=transcript)


def pending_of(position: int, *results: Result) -> PendingGroup:
    group = make_pending(position, [0.0, 1.0] * len(results))
    group.results[:] = results
    return group


def world() -> TestedWorld:
    return make_world({"a": Behaviour(latency=lambda rng: NEVER)}, batch_size=8)


def complete(made: TestedWorld, group: PendingGroup) -> list[dict[str, Any]]:
    made.parts.mix.on_dispatch("a", group.size, now=made.now)
    with capture_logs() as logs:
        made.parts.sink.completed(group, made.now)
    return [dict(entry) for entry in logs]


def test_a_group_whose_rollouts_answered_different_questions_is_dropped_and_told_once() -> None:
    """It is counted, its task is done, and the first of an env is logged with both texts."""
    made = world()
    one, other = result_of(1, "2+2?", [0.0, 1.0]), result_of(2, "3+3?", [1.0, 0.0])
    (said,) = complete(made, pending_of(0, one, other))
    assert (said["event"], said["env"], said["index"]) == ("group.task_mismatch", "a", 0)
    assert (said["one"], said["other"]) == ("2+2?", "3+3?")
    assert complete(made, pending_of(1, one, other)) == []
    assert made.parts.facts.envs["a"].dropped == {"task_mismatch": 8}
    assert made.journal.tasks == [("a", 0, "task_mismatch"), ("a", 1, "task_mismatch")]
    assert made.parts.buffer.sequences == 0


def test_servers_that_make_no_digest_are_believed() -> None:
    """Those of an earlier release; a digest beside none is no contradiction."""
    made = world()
    group = pending_of(0, result_of(0, "2+2?", [0.0, 1.0]), result_of(5, "2+2?", [1.0, 0.0]))
    assert complete(made, group) == []
    assert made.parts.buffer.sequences == 4


def test_an_index_that_has_become_another_task_is_told_once_per_env() -> None:
    """In a later epoch, or in a later process of the run: what the journal held is remembered."""
    made, earlier = world(), world()
    complete(earlier, pending_of(0, result_of(1, "2+2?", [0.0, 1.0]), result_of(1, "2+2?", [1.0, 0.0])))
    made.parts.sink.remember(earlier.journal.groups)
    (said,) = complete(
        made, pending_of(0, result_of(2, "3+3?", [0.0, 1.0]), result_of(2, "3+3?", [1.0, 0.0]))
    )
    assert (said["event"], said["env"], said["index"]) == ("env.tasks_changed", "a", 0)
    group = pending_of(0, result_of(3, "4+4?", [0.0, 1.0]), result_of(3, "4+4?", [1.0, 0.0]))
    assert complete(made, group) == []
    assert made.parts.buffer.sequences == 8
