"""Versions that the trainer publishes: each is checked once and counts only when it can be loaded."""

from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from orchestrator.trainer_link.publications import Decision, Publications


class Checked:
    """Publications whose checks are decided by the test."""

    def __init__(self, version: int = 0) -> None:
        self.checks: list[tuple[int, str | None, Callable[[str], None]]] = []
        self.published: list[tuple[int, str | None]] = []
        self.decisions: list[tuple[str, Decision]] = []
        self._first = version
        self.publications = Publications(
            newest=lambda: self.version,
            check=lambda version, path, decided: self.checks.append((version, path, decided)),
            on_publish=lambda version, path, step: self.published.append((version, path)),
        )

    @property
    def version(self) -> int:
        return self.published[-1][0] if self.published else self._first

    def publish(self, version: int, path: str | None = "p", source: str = "rank 0") -> None:
        self.publications.publish(
            version,
            path,
            step=0,
            source=source,
            then=lambda decision: self.decisions.append((source, decision)),
        )


def test_nothing_is_decided_before_the_check_is() -> None:
    """Then the version counts, once."""
    checked = Checked()
    checked.publish(1)
    assert (checked.published, checked.decisions, checked.version) == ([], [], 0)
    checked.checks[0][2]("")
    checked.checks[0][2]("")
    checked.checks[0][2]("too late")
    assert checked.published == [(1, "p")]
    assert checked.decisions == [("rank 0", Decision(accepted=True))]
    assert checked.version == 1


def test_a_version_that_cannot_be_loaded_leaves_no_trace_but_a_line() -> None:
    """It can be published again, and is then checked again."""
    checked = Checked()
    with capture_logs() as logs:
        checked.publish(1)
        checked.checks[0][2]("no weights at p")
    assert checked.decisions == [("rank 0", Decision(accepted=False, note="no weights at p"))]
    assert (checked.published, checked.version) == ([], 0)
    assert [entry["event"] for entry in logs] == ["trainer.version_refused"]
    checked.publish(1)
    checked.checks[0][2]("")
    assert checked.published == [], "a decision of the first check does not count for the second"
    checked.checks[1][2]("")
    assert checked.published == [(1, "p")]


def test_who_asks_while_it_is_checked_gets_the_same_decision_and_causes_no_second_check() -> None:
    """A rank that asks again is answered once, where it asked last."""
    checked = Checked()
    for source in ("rank 0", "rank 0", "rank 1"):
        checked.publish(1, source=source)
    assert len(checked.checks) == 1
    checked.checks[0][2]("")
    assert [source for source, _ in checked.decisions] == ["rank 0", "rank 1"]
    assert checked.published == [(1, "p")]


def test_a_version_that_a_newer_one_overtook_while_it_was_checked_changes_nothing() -> None:
    """Versions only grow."""
    checked = Checked()
    checked.publish(1)
    checked.publish(2)
    checked.checks[1][2]("")
    checked.checks[0][2]("")
    assert checked.published == [(2, "p")]
    assert "older than the published 2" in checked.decisions[1][1].note


def test_an_older_version_is_ignored_without_a_check() -> None:
    """And the log says so."""
    checked = Checked(version=5)
    with capture_logs() as logs:
        checked.publish(4)
    assert (checked.checks, checked.published) == ([], [])
    assert [entry["event"] for entry in logs] == ["trainer.version_ignored"]


@pytest.mark.parametrize("flood", [17, 500])
def test_checks_that_wait_are_bounded(flood: int) -> None:
    """A trainer that publishes faster than weights can be looked at is told to come again."""
    checked = Checked()
    for version in range(1, flood + 1):
        checked.publish(version)
    assert len(checked.checks) == 16
    assert len(checked.decisions) == flood - 16
    assert all("again later" in decision.note for _, decision in checked.decisions)


def test_a_check_that_fails_itself_refuses_the_version() -> None:
    """The trainer does not wait for ever, and the log has the error."""
    decisions: list[Decision] = []

    def check(version: int, path: str | None, decided: Callable[[str], None]) -> None:
        raise OSError("the disk is gone")

    publications = Publications(newest=lambda: 0, check=check, on_publish=lambda version, path, step: None)
    with capture_logs() as logs:
        publications.publish(1, "p", step=1, source="rank 0", then=decisions.append)
    assert decisions == [Decision(accepted=False, note="version 1 could not be checked: the disk is gone")]
    assert logs[0]["event"] == "trainer.version_check_failed"
