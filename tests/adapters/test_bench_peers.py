"""The scripts that drive the peers of the benchmarks still work with the libraries as they are."""

import math

import pytest

from benchmarks.frame import Effort
from benchmarks.runner import run_benchmark
from tests.adapters.venvs import ATROPOS, CLASSIC, RAY, Venv

pytestmark = pytest.mark.adapters


@pytest.mark.parametrize(
    ("benchmark", "venv", "peer"),
    [("atropos", ATROPOS, "atroposlib"), ("schedulers", RAY, "Ray"), ("verifiers", CLASSIC, "verifiers")],
)
def test_a_peer_that_is_asked_for_has_its_figures(
    benchmark: str, venv: Venv, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row that names it; nothing is installed for it here."""
    if absent := venv.missing():
        pytest.skip(absent)
    monkeypatch.setenv("BENCH_PEERS", "1")
    outcome = run_benchmark(benchmark, Effort.TINY, limit_s=500)
    assert not outcome.failed
    named = [figure for figure in outcome.figures if figure.peer_name.startswith(peer)]
    assert named
    for figure in named:
        assert figure.peer is not None, figure.note
        assert math.isfinite(figure.peer)
        assert figure.peer >= 0
        assert not figure.note
