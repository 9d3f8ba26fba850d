"""Runs in virtual time, where an hour takes a second and every failure can be repeated from its seed.

`world` drives the real rules of a whole run (`orchestrator.run`) against imagined environments, inference servers and
trainers, with `journal` as its record; tests play thousands of them. `rehearsal` is one whose surroundings behave as stated
(`behaviour`) or recorded (`recorded`), `answers` says what came out, `sweep` and `plot` put several beside each other. `mix` tries a
mix strategy and the batch buffer alone. Nothing here waits, starts a process or looks at a clock.
"""

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
