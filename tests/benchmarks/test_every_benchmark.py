"""A small version of every benchmark runs, so that none is broken when somebody wants its figures.

Times are not looked at: that there are figures, with the words that others rely on, is all that is asserted.
"""

import math

import pytest

from benchmarks.frame import Effort
from benchmarks.readme import CHOSEN, says
from benchmarks.runner import ROOT, benchmark_names, run_benchmark

QUICK = {"archive", "buffer", "curriculum", "env_sdk", "simulate"}
"""Those that take a second or two; all others are slow tests."""
DIFFERENCES = ("CPU more with the journal", "50 open pages")
"""What is taken from another measurement may be below zero where little is measured."""
COUNTS = ("feasible batches", "rollouts that failed", "growth of its peak memory", "joins of env servers")
"""What may be nothing at all."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in benchmark_names()],
)
def test_a_small_version_gives_its_figures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite numbers, above zero; with the rows that the README shows."""
    monkeypatch.delenv("BENCH_PEERS", raising=False)
    outcome = run_benchmark(name, Effort.TINY, limit_s=500)
    assert not outcome.failed
    if outcome.left_out:
        pytest.skip(outcome.left_out)
    assert outcome.figures
    for figure in outcome.figures:
        assert math.isfinite(figure.ours), figure
        assert figure.peer is None or math.isfinite(figure.peer), figure
        if any(words in figure.what for words in COUNTS):
            assert figure.ours >= 0, figure
        elif not any(words in figure.what for words in DIFFERENCES):
            assert figure.ours > 0, figure
    for benchmark, begins in CHOSEN:
        if benchmark == name:
            assert any(says(figure.what, begins) for figure in outcome.figures), begins


def test_every_benchmark_is_explained() -> None:
    """The page has a paragraph for each: how it is measured, and what is unfair about it."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    explained = {line[2:].partition(".**")[0] for line in page.splitlines() if line.startswith("**")}
    assert set(benchmark_names()) <= explained
