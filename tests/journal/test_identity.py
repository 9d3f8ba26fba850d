"""Which tasks a run has: noted in the journal, and what changed between two processes is told in sentences."""

from dataclasses import replace
from pathlib import Path

from orchestrator.journal import EnvIdentity, RunIdentity, differences, digest_of, notices
from tests.support.journal_opening import open_journal

MATH = EnvIdentity("envs.builtin.math:Math", "train", 100, digest_of({"digits": 2}))
CODE = EnvIdentity("envs.builtin.code:Code", "train", None, digest_of({}))
BEFORE = RunIdentity(7, {"math": MATH, "code": CODE})


def test_the_same_run_has_no_differences() -> None:
    """Nor has one of which nothing was noted yet."""
    assert differences(BEFORE, BEFORE) == notices(BEFORE, BEFORE) == []
    assert differences(RunIdentity(), BEFORE) == notices(RunIdentity(), BEFORE) == []
    assert differences(RunIdentity(7), BEFORE) == notices(RunIdentity(7), BEFORE) == []


def test_what_changes_the_tasks_is_named_with_both_values() -> None:
    """Seed, id, split and number of tasks, each in a sentence of its own."""
    changed = EnvIdentity("other:Math", "test", None, MATH.args)
    assert differences(BEFORE, RunIdentity(8, {"math": changed, "code": replace(CODE, num_tasks=5)})) == [
        "the seed was 7 and is 8: tasks come in another order",
        'env "math": the id was "envs.builtin.math:Math" and is "other:Math"',
        'env "math": the split was "train" and is "test"',
        'env "math": it had 100 tasks and has tasks without end',
        'env "code": it had tasks without end and has 5 tasks',
    ]


def test_envs_that_come_and_go_and_other_args_are_told_and_not_refused() -> None:
    """They change no task that a recorded position stands for, as far as anybody can know."""
    now = RunIdentity(7, {"math": replace(MATH, args=digest_of({"digits": 3})), "chat": CODE})
    assert differences(BEFORE, now) == []
    assert notices(BEFORE, now) == [
        'env "chat" is new and starts at its first task',
        'env "code" was removed; its place is kept, should it come back',
        'env "math": its args have changed; its tasks may be others',
    ]


def test_another_curriculum_is_told_and_not_refused() -> None:
    """Open tasks have their record; journals that noted none had the order without one."""
    frontier = {"strategy": "frontier", "options": {}, "explore": 0.1}
    uniform = {"strategy": "uniform", "options": {}, "explore": 0.5}
    for one, other in ((MATH, frontier), (replace(MATH, curriculum=frontier), {**frontier, "explore": 0.2})):
        before, now = (RunIdentity(7, {"math": env}) for env in (one, replace(MATH, curriculum=other)))
        assert differences(before, now) == []
        (told,) = notices(before, now)
        assert told.startswith('env "math": its curriculum was ')
        assert "tasks that are open stay" in told
    before = RunIdentity(7, {"math": MATH})
    assert notices(before, RunIdentity(7, {"math": replace(MATH, curriculum=uniform)})) == []


def test_a_digest_does_not_depend_on_the_order_of_the_arguments() -> None:
    """Two processes that read the same configuration agree."""
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})


async def test_the_journal_keeps_it_over_restarts_with_envs_that_are_gone(tmp_path: Path) -> None:
    """An env that comes back is held against what it was."""
    async with open_journal(tmp_path) as journal:
        assert journal.identity == RunIdentity()
        journal.set_identity(BEFORE)
    async with open_journal(tmp_path) as journal:
        assert journal.identity == BEFORE
        journal.set_identity(RunIdentity(7, {"math": MATH}))
    async with open_journal(tmp_path) as journal:
        assert journal.identity == BEFORE
