"""The page about metrics, the dashboard and the alerts name only what the code exports, with labels that it has."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.dispatch.waits import WaitKind
from orchestrator.facts import ReportStatus, TrackerStatus
from orchestrator.views.families import FAMILIES, STATES
from orchestrator.views.metrics import render_metrics
from orchestrator.views.metrics_reference import render_metrics_reference
from tests.support.promql import OF_PROMETHEUS, grouped_by, matched_values, metrics_and_labels
from tests.support.sample_status import env_status, sample_status
from tests.support.sample_steps import sample_env_step, sample_step

ROOT = Path(__file__).parents[2]
ALERTS = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads(
    (ROOT / "deploy" / "grafana" / "orchestrator.json").read_text(encoding="utf-8")
)
LABELS = {family.series: set(family.labels) for families in FAMILIES.values() for family in families}
VALUES = {
    "kind": {kind.value for kind in WaitKind},
    "outcome": {outcome.value for outcome in Outcome},
    "lane": {lane.value for lane in Lane},
    "state": set(STATES),
}
WANTED = {
    "Stalled",
    "EnvQuarantined",
    "EndpointLost",
    "StalenessAtLimit",
    "JournalBacklog",
    "DiskNearlyFull",
    "LoopLag",
}


def rules() -> dict[str, str]:
    """Each alert's expression, one that goes over several lines included."""
    found = re.findall(r"- alert: (\w+)\n\s+expr: (?:>-\n)?((?:.+\n)(?:\s{10}\S.*\n)*)", ALERTS)
    return {name: " ".join(expression.split()) for name, expression in found}


def queries() -> list[Any]:
    """The expressions of every panel, with what stands for a variable filled in."""
    return [
        pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}-{target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


def check_expression(expression: str) -> None:
    found = metrics_and_labels(expression)
    assert found
    for name, labels in found.items():
        assert name in LABELS, f"there is no metric {name}"
        assert labels <= LABELS[name] | OF_PROMETHEUS, f"{name} has no label {labels - LABELS[name]}"
    known = set().union(*(LABELS[name] for name in found)) | OF_PROMETHEUS
    assert grouped_by(expression) <= known
    for label, values in matched_values(expression):
        assert values <= VALUES.get(label, values), f"{label} is never one of {values}"


@pytest.mark.parametrize("name", rules())
def test_an_alert_asks_for_what_there_is(name: str) -> None:
    """Its metrics are exported, their labels and the values of those exist, and it says what it means and what to do."""
    check_expression(rules()[name])
    rule = ALERTS.partition(f"- alert: {name}\n")[2].partition("- alert:")[0]
    assert "severity:" in rule
    assert "summary:" in rule
    assert "remedy:" in rule
    labels = set().union(*(LABELS[metric] for metric in metrics_and_labels(rules()[name])))
    assert set(re.findall(r"\$labels\.(\w+)", rule)) <= labels


def test_there_is_an_alert_for_everything_that_should_wake_somebody() -> None:
    """And every rule is read by these tests."""
    assert {f"Orchestrator{name}" for name in WANTED} <= set(rules())
    assert len(rules()) == ALERTS.count("- alert:")


@pytest.mark.parametrize(("expression", "legend"), queries())
def test_a_panel_shows_what_there_is(expression: str, legend: str) -> None:
    """Its metrics are exported, with the labels that it selects, groups and names lines by."""
    check_expression(expression)
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    lists = grouped_by(expression)
    labels = lists or set().union(*(LABELS[name] for name in metrics_and_labels(expression)))
    assert shown <= labels


def test_panels_do_not_overlap_and_have_their_own_numbers() -> None:
    """So that Grafana shows all of them where they were put."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_metric_is_on_the_page_that_is_made_from_the_code() -> None:
    """docs/metrics.md is what the table of families says now."""
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == render_metrics_reference(), "run `make docs`"
    assert all(f"| `{name}` |" in written for name in LABELS)


def test_a_parser_of_prometheus_reads_what_the_table_declares() -> None:
    """Every family arrives with its type, its meaning and its labels, no more and no less, and none is left out."""
    ledger = Ledger()
    ledger.start(Lane.TRAIN, "math", 2)
    ledger.end(Lane.TRAIN, "math", 1, Outcome.FAILED, "overloaded")
    told = ReportStatus(step=4, value=0.25, low=0.1, median=0.2, high=0.3, recent=[(4, 0.25)])
    evaluated = {"env": "eval-math", "step": 20, "failures": 1, "avg@2": 0.5}
    status = sample_status(
        reports={"loss": told},
        evals=[evaluated],
        disk_free_bytes=10**9,
        eta_s=60.0,
        envs={"math": env_status(last=sample_env_step())},
        last=sample_step(),
        trackers=[TrackerStatus("wandb", logged=5, lost=2, error="offline")],
    )
    text = render_metrics(lambda: status, ledger).decode()
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    for families in FAMILIES.values():
        for family in families:
            found = parsed.pop(f"orchestrator_{family.name}")
            assert (found.type, found.documentation) == (family.kind, family.meaning)
            assert found.samples, family.name
            assert all(set(sample.labels) == set(family.labels) for sample in found.samples)
            assert {sample.name for sample in found.samples} == {family.series}
    assert not parsed


def test_every_kind_of_wait_is_a_series_whether_it_is_there_or_not() -> None:
    """An alert can rely on a 0, and kinds are those of the code."""
    text = render_metrics(lambda: sample_status(), Ledger()).decode()
    waits = {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "orchestrator_waiting"
        for sample in family.samples
    }
    assert set(waits) == VALUES["kind"]
    assert {kind for kind, value in waits.items() if value} == {"slot", "groups"}
