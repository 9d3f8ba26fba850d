"""Which environment next: mix strategies, the circuit breaker in front of them, and their targets.

`build_mix` is the way in. A strategy of your own is named "module:Class" and subclasses `EnvMixStrategy`.
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.importing import ImportReferenceError, import_attribute
from orchestrator.mix.adaptive import Adaptive
from orchestrator.mix.breaker import Change, CircuitBreaker, EnvNumbers, Transition
from orchestrator.mix.delivered import DeliveredMix
from orchestrator.mix.flow import Flow
from orchestrator.mix.strategy import EnvMixStrategy, MixError
from orchestrator.mix.targets import EnvShare, mix_targets
from orchestrator.mix.weighted import WeightedRandom, WeightedRoundRobin

__all__ = [
    "STRATEGIES",
    "Adaptive",
    "Change",
    "CircuitBreaker",
    "DeliveredMix",
    "EnvMixStrategy",
    "EnvNumbers",
    "EnvShare",
    "Flow",
    "MixError",
    "Transition",
    "WeightedRandom",
    "WeightedRoundRobin",
    "build_mix",
    "mix_targets",
]

STRATEGIES: Mapping[str, str] = {
    "flow": "orchestrator.mix.flow:Flow",
    "adaptive": "orchestrator.mix.adaptive:Adaptive",
    "weighted_random": "orchestrator.mix.weighted:WeightedRandom",
    "weighted_round_robin": "orchestrator.mix.weighted:WeightedRoundRobin",
}
_BREAKER_OPTIONS = ("trip", "restore", "probe", "window")


def build_mix(
    strategy: str,
    env_names: Sequence[str],
    weights: Sequence[float],
    *,
    rng: random.Random,
    breaker: bool | Mapping[str, Any] = True,
    **options: Any,
) -> CircuitBreaker:
    """The named strategy (or "module:Class") behind its circuit breaker.

    `breaker` takes the breaker's options, or False to never quarantine. The other options are the strategy's.
    `group_sizes` is left out where all groups have the same size, because then it changes nothing.
    """
    if len(set((options.get("group_sizes") or {}).values())) <= 1:
        options.pop("group_sizes", None)
    made = _strategy_class(strategy, options)(env_names, weights, rng=rng, **options)
    if breaker is False:
        return CircuitBreaker(made, trip=0.0)
    settings = {} if breaker is True else dict(breaker)
    for name in settings:
        if name not in _BREAKER_OPTIONS:
            raise MixError(f'the breaker has no option "{name}"; it has: {", ".join(_BREAKER_OPTIONS)}')
    return CircuitBreaker(made, **settings)


def _strategy_class(strategy: str, options: Mapping[str, Any]) -> type[EnvMixStrategy]:
    reference = STRATEGIES.get(strategy, strategy)
    if ":" not in reference:
        names = ", ".join(STRATEGIES)
        raise MixError(f'no mix strategy is named "{strategy}"; use one of {names}, or "module:Class"')
    try:
        found = import_attribute(reference, what="mix strategy")
    except ImportReferenceError as error:
        raise MixError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, EnvMixStrategy)):
        raise MixError(f'mix strategy "{strategy}" is not a subclass of EnvMixStrategy')
    parameters = inspect.signature(found).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return found
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "rng"]
    for name in options:
        if name not in known:
            offered = f"it has: {', '.join(known)}" if known else "it has none"
            raise MixError(f'mix strategy "{strategy}" has no option "{name}"; {offered}')
    return found
