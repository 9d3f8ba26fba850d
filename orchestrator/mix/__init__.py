"""Which environment next: mix strategies, the circuit breaker in front of them, and their targets.

`build_mix` is the way in. A strategy of your own is named "module:Class" and subclasses `EnvMixStrategy`.
"""

import difflib
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

from envs.importing import ImportReferenceError, import_attribute
from orchestrator.mix.adaptive import Adaptive
from orchestrator.mix.breaker import Change, CircuitBreaker, EnvNumbers, Transition
from orchestrator.mix.delivered import DeliveredMix
from orchestrator.mix.flow import Flow
from orchestrator.mix.foreign import StrategyError, describe_fault, make, verify_strategy
from orchestrator.mix.strategy import EnvMixStrategy, MixError
from orchestrator.mix.targets import EnvShare, mix_targets
from orchestrator.mix.weighted import WeightedRandom, WeightedRoundRobin

__all__ = [
    "ALIASES",
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
    "StrategyError",
    "Transition",
    "WeightedRandom",
    "WeightedRoundRobin",
    "build_mix",
    "mix_targets",
    "verify_strategy",
]

STRATEGIES: Mapping[str, str] = {
    "flow": "orchestrator.mix.flow:Flow",
    "adaptive": "orchestrator.mix.adaptive:Adaptive",
    "weighted_random": "orchestrator.mix.weighted:WeightedRandom",
    "weighted_round_robin": "orchestrator.mix.weighted:WeightedRoundRobin",
}
ALIASES: Mapping[str, str] = {"weighted": "weighted_random"}
"""Other names. "weighted" is the draw at random that some systems call a weighted round robin, which here takes turns."""

_BREAKER_OPTIONS = ("trip", "restore", "probe", "window")


def build_mix(
    strategy: str,
    env_names: Sequence[str],
    weights: Sequence[float],
    *,
    rng: random.Random,
    breaker: bool | Mapping[str, Any] = True,
    group_sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> CircuitBreaker:
    """The named strategy (or "module:Class") behind its circuit breaker.

    `breaker` takes the breaker's options, or False to never quarantine. The other options are the strategy's.
    `group_sizes` is left out where all groups have the same size, because then it changes nothing, and where the
    strategy does not take it.
    """
    found = _strategy_class(strategy)
    known, any_option = _options(found)
    for name in options if not any_option else ():
        if name not in known:
            offered = f"it has: {', '.join(known)}" if known else "it has none"
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise MixError(f'mix strategy "{strategy}" has no option "{name}"; {offered}{hint}')
    if group_sizes and len(set(group_sizes.values())) > 1 and (any_option or "group_sizes" in known):
        options["group_sizes"] = group_sizes
    made = make(found, strategy, env_names, weights, rng=rng, options=options)
    return CircuitBreaker(made, **_breaker_settings(breaker))


def _breaker_settings(breaker: bool | Mapping[str, Any]) -> dict[str, Any]:
    if breaker is False:
        return {"trip": 0.0}
    if breaker is True:
        return {}
    if not isinstance(breaker, Mapping):
        raise MixError(f"the breaker takes a table of options, true or false, not {breaker!r}")
    for name, value in breaker.items():
        if name not in _BREAKER_OPTIONS:
            raise MixError(f'the breaker has no option "{name}"; it has: {", ".join(_BREAKER_OPTIONS)}')
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise MixError(f"the breaker's {name} is a number, not {value!r}")
    return dict(breaker)


def _strategy_class(strategy: str) -> type[EnvMixStrategy]:
    known = STRATEGIES.get(ALIASES.get(strategy, strategy), strategy)
    if ":" not in known:
        names = ", ".join([*STRATEGIES, *ALIASES])
        close = difflib.get_close_matches(strategy, [*STRATEGIES, *ALIASES], n=1, cutoff=0.5)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        raise MixError(f'no mix strategy is named "{strategy}"; use one of {names}, or "module:Class"{hint}')
    try:
        found = import_attribute(known, what="mix strategy")
    except ImportReferenceError as error:
        raise MixError(f'mix strategy "{strategy}" cannot be loaded: {error}') from error
    except Exception as error:
        told = describe_fault(error, None)
        raise MixError(f'mix strategy "{strategy}" cannot be loaded: {told}') from error
    if not (isinstance(found, type) and issubclass(found, EnvMixStrategy)):
        raise MixError(f'mix strategy "{strategy}" is not a subclass of EnvMixStrategy')
    return found


def _options(found: type[EnvMixStrategy]) -> tuple[list[str], bool]:
    """The options that a strategy's constructor names, and whether it takes any other."""
    parameters = list(inspect.signature(found).parameters.values())[2:]
    named = [
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "rng"
    ]
    return named, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
