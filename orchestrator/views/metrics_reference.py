"""The page about metrics, docs/metrics.md, made from the table of families.

`python -m orchestrator.views.metrics_reference PATH` writes it; a test holds the written file to what this module says.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from orchestrator.views.families import FAMILIES, Family

INTRODUCTION = """\
# Metrics

Made by `make docs` from the table in `orchestrator/views/families.py`; change it there.

While a run goes on, `/metrics` of its HTTP side (`http.host`, `http.port`) answers in the text format of Prometheus. Off loopback a
scrape needs the bearer token of `http.token_env`. Everything is read at the moment of the scrape; a number that is not known
yet has no series, which is not a 0.

The number of series is bounded: envs and domains are those of the configuration, endpoints those that there are (at most 1,024; where a source names
them, they change), and whatever an environment or a trainer may name freely (kinds of failures, reported numbers, metrics) is counted under so many names at most.

[deploy/prometheus/alerts.yml](../deploy/prometheus/alerts.yml) has rules for what somebody should look at, and
[deploy/grafana/orchestrator.json](../deploy/grafana/orchestrator.json) is a dashboard: import it and choose the Prometheus that scrapes the
run. A job for it:

```
scrape_configs:
  - job_name: orchestrator
    static_configs: [{ targets: ["127.0.0.1:8600"] }]
    # off loopback: authorization: { credentials_file: /etc/prometheus/orchestrator.token }
rule_files: [alerts.yml]
```

What is recorded per step, for trackers and notebooks, is in [tracking.md](tracking.md).
"""


def render_metrics_reference() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_chapters()])


def _chapters() -> Iterator[str]:
    for title, families in FAMILIES.items():
        yield f"## {title}\n"
        yield "| metric | type | labels | meaning |\n|---|---|---|---|"
        yield from map(_row, families)
        yield ""


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
    return f"| `{family.series}` | {family.kind} | {labels} | {family.meaning} |"


def main() -> None:
    """Write the page to the path on the command line."""
    parser = argparse.ArgumentParser(description="Write the page about metrics.")
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(render_metrics_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
