"""The rules of a run, pure: events in, instructions out.

`run` has the rules, `build` makes and joins the parts from `settings`, `ports` is what is asked of the shells and told
to them, `minimums` and `patience` are rules of their own, `waits` says what is waited for.
"""

from orchestrator.run.build import build_run
from orchestrator.run.run import Run, RunState

__all__ = ["Run", "RunState", "build_run"]
