"""Prometheus metrics, read off the facts and the ledger at the moment of the scrape. `families` says which there are.

What is written is the text format of Prometheus, version 0.0.4. A scrape is answered in the service's own event loop, so that
writing thousands of series must not take long.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from orchestrator.dispatch.ledger import Ledger
from orchestrator.facts import Status
from orchestrator.views.families import FAMILIES, Family, Labels, Sample

_IN_LABELS = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_IN_HELP = str.maketrans({"\\": "\\\\", "\n": "\\n"})


def render_metrics(status: Callable[[], Status], ledger: Ledger) -> bytes:
    """The exposition text."""
    now = status()
    lines = [
        line
        for families in FAMILIES.values()
        for family in families
        for line in _lines(family, family.read(now, ledger))
    ]
    # An env may be named by anything that Python takes for a text.
    return "".join(lines).encode("utf-8", "replace")


def _lines(family: Family, samples: Iterable[Sample]) -> Iterator[str]:
    name = family.series
    yield f"# HELP {name} {family.meaning.translate(_IN_HELP)}\n# TYPE {name} {family.kind}\n"
    for values, value in samples:
        if value is None:
            continue
        yield f"{_series(name, family.labels, values)} {_number(value)}\n"


@lru_cache(maxsize=65_536)
def _series(name: str, labels: Labels, values: Labels) -> str:
    """The name of a series with its labels; the same ones come with every scrape."""
    if not labels:
        return name
    told = [f'{label}="{text.translate(_IN_LABELS)}"' for label, text in zip(labels, values, strict=True)]
    return f"{name}{{{','.join(told)}}}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
