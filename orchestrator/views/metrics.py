"""Prometheus metrics, read off the facts and the ledger at the moment of the scrape. `families` says which there are."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator.dispatch.ledger import Ledger
from orchestrator.facts import Status
from orchestrator.views.families import FAMILIES


class StatusCollector(Collector):
    """Turns a status into metric families."""

    def __init__(self, status: Callable[[], Status], ledger: Ledger) -> None:
        self._status = status
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for families in FAMILIES.values():
            for family in families:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                metric = kind(f"orchestrator_{family.name}", family.meaning, labels=family.labels)
                for labels, value in family.read(status, self._ledger):
                    if value is not None:
                        metric.add_metric(labels, value)
                yield metric


def render_metrics(status: Callable[[], Status], ledger: Ledger) -> bytes:
    """The exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, ledger))
    return generate_latest(registry)
