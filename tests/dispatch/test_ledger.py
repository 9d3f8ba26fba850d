"""The books of rollouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.ledger import Lane, Ledger, Outcome


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
