"""Trackers: what a run tells wandb, TensorBoard or somebody's own class about its steps and evaluations.

A tracker costs numbers at most: whatever it does, the run goes on as fast, ends as soon, and says what was not logged.
"""

from orchestrator.track.feed import SampleRule, Trackers, TrackerSetup, any_left_behind
from orchestrator.track.names import flat_eval, flat_step
from orchestrator.track.tracker import Tracker, build_maker

__all__ = [
    "SampleRule",
    "Tracker",
    "TrackerSetup",
    "Trackers",
    "any_left_behind",
    "build_maker",
    "flat_eval",
    "flat_step",
]
