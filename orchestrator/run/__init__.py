"""The rules that join dispatch, sinks, versions, weights, evaluations and the end of a run. Pure."""

from orchestrator.run.run import Run

__all__ = ["Run"]
