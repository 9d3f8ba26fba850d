"""The rules of a run in virtual time."""

from orchestrator.simulate.mix import (
    MixBuilder,
    MixResult,
    Regime,
    Scenario,
    SimBatch,
    SimEnv,
    percentile,
    simulate,
)

__all__ = ["MixBuilder", "MixResult", "Regime", "Scenario", "SimBatch", "SimEnv", "percentile", "simulate"]
