"""The inference servers of a run: placement, health, weight updates, and how much each is given at a time."""

from orchestrator.errors import InferenceError
from orchestrator.inference.broadcast import UpdateReport
from orchestrator.inference.concurrency import AdaptiveConcurrency, FixedConcurrency
from orchestrator.inference.endpoint import Endpoint, EndpointState
from orchestrator.inference.engine import EngineApi, EngineError, EngineRefusedError, EngineUnfitError
from orchestrator.inference.metrics import EngineMetrics, parse_metrics
from orchestrator.inference.pool import InferencePool
from orchestrator.inference.recipe import UpdateRequest, WeightUpdate, WeightUpdateError
from orchestrator.inference.sampling import NEUTRAL, SamplingCheck
from orchestrator.inference.sync import Beginning, Weights
from orchestrator.inference.watch import HealthPolicy
from orchestrator.inference.weights import build_weight_update

__all__ = [
    "NEUTRAL",
    "AdaptiveConcurrency",
    "Beginning",
    "Endpoint",
    "EndpointState",
    "EngineApi",
    "EngineError",
    "EngineMetrics",
    "EngineRefusedError",
    "EngineUnfitError",
    "FixedConcurrency",
    "HealthPolicy",
    "InferenceError",
    "InferencePool",
    "SamplingCheck",
    "UpdateReport",
    "UpdateRequest",
    "WeightUpdate",
    "WeightUpdateError",
    "Weights",
    "build_weight_update",
    "parse_metrics",
]
