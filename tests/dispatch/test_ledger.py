"""The books of rollouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.ledger import KIND_LENGTH, KINDS, Lane, Ledger, Outcome


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Lane)),
            st.sampled_from("ab"),
            st.integers(1, 5),
            st.sampled_from(list(Outcome)),
            st.booleans(),
        )
    )
)
def test_the_books_balance_after_every_entry(entries: list[tuple[Lane, str, int, Outcome, bool]]) -> None:
    """dispatched = in flight + Σ outcomes, whatever happens in whatever order."""
    ledger = Ledger()
    for lane, env, n, outcome, end in entries:
        if end and ledger.inflight[lane, env] >= n:
            ledger.end(lane, env, n, outcome, "x")
        else:
            ledger.start(lane, env, n)
        assert ledger.balances()


def test_an_end_without_a_start_is_refused() -> None:
    """A rollout that ends twice is a bug, and is found where it happens."""
    ledger = Ledger()
    ledger.start(Lane.TRAIN, "a", 2)
    with pytest.raises(ValueError, match="3 rollouts of train env"):
        ledger.end(Lane.TRAIN, "a", 3, Outcome.COMPLETED)
    assert ledger.balances()


def test_totals_go_on_in_a_later_process() -> None:
    """What was in flight ended with the process; what had ended stays counted."""
    ledger = Ledger()
    ledger.start(Lane.TRAIN, "a", 3)
    ledger.end(Lane.TRAIN, "a", 2, Outcome.FAILED, "http")
    later = Ledger()
    later.load_state_dict(ledger.state_dict())
    assert later.balances()
    assert later.totals()["failed"] == 2
    assert later.total_inflight == 0


def test_kinds_without_end_become_one() -> None:
    """An environment that names every failure differently fills neither memory nor the metrics; also after a restart."""
    ledger = Ledger()
    for number in range(10_000):
        ledger.start(Lane.TRAIN, "a", 1)
        kind = ledger.kind(Lane.TRAIN, "a", f"failure {number} " + "x" * 1000)
        ledger.end(Lane.TRAIN, "a", 1, Outcome.FAILED, kind)
    assert ledger.balances()
    assert len(list(ledger.rows())) == KINDS + 1
    assert ledger.outcomes[Lane.TRAIN, "a", Outcome.FAILED, "other"] == 10_000 - KINDS
    assert max(len(detail) for _, _, _, detail, _ in ledger.rows()) <= KIND_LENGTH
    later = Ledger()
    later.load_state_dict(ledger.state_dict())
    assert later.outcomes == ledger.outcomes
    assert later.kind(Lane.TRAIN, "a", "a new one") == "other"
    assert later.kind(Lane.TRAIN, "b", "a new one") == "a new one"
