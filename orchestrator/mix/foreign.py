"""Strategies written by others: what they are asked, what their answers must be, and how their mistakes are told.

`Foreign` stands between the circuit breaker and a strategy that does not come along with this package. Whatever
goes wrong inside ends the run as a `StrategyError` that names the strategy, the file and the line; so does a pick
that could not be used. A strategy whose `pick` takes no `eligible` is asked again until it names an env that may be
picked, at most `REDRAWS` times; then the possible env with the largest target is taken.

`verify_strategy` tries all of it once, before anything is started.
"""

import inspect
import json
import random
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from orchestrator.errors import OrchestratorError
from orchestrator.mix.strategy import EnvMixStrategy, MixError

T = TypeVar("T")

REDRAWS = 100
"""Asked this often, a strategy that draws at random has named an env with a share of 5 % but for 0.6 % of the time."""

CONSTRUCTOR = "__init__(self, env_names, weights, *, rng, **options)"
PICK = "pick(self, eligible=None)"


class StrategyError(OrchestratorError):
    """A strategy raised, or picked what cannot be picked."""


def is_foreign(strategy: EnvMixStrategy) -> bool:
    """Whether the strategy's class is somebody else's."""
    return not type(strategy).__module__.startswith("orchestrator.mix.")


def describe_fault(error: BaseException, source: object) -> str:
    """The error with the last line of `source`'s own file that led to it, else with the last line at all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = _file_of(source)
    frame = next(
        (frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None
    )
    where = f" ({frame.filename}, line {frame.lineno})" if frame is not None else ""
    return f"{type(error).__name__}: {error}{where}"


def _file_of(source: object) -> str | None:
    try:
        return inspect.getsourcefile(source)  # type: ignore[arg-type]  # anything that has none is a TypeError
    except TypeError:
        return None


def takes_eligible(strategy: EnvMixStrategy) -> bool:
    """Whether `pick` can be told what may be picked; MixError if it cannot be called at all."""
    signature = inspect.signature(strategy.pick)
    for arguments in ((None,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return bool(arguments)
    raise MixError(f'mix strategy "{name_of(strategy)}": {PICK} is needed, not pick{signature}')


def name_of(mix: EnvMixStrategy) -> str:
    """Where the strategy is, as a configuration names it; of a circuit breaker, the strategy behind it."""
    strategy = getattr(mix, "strategy", mix)
    return f"{type(strategy).__module__}:{type(strategy).__qualname__}"


class Foreign(EnvMixStrategy):
    """A strategy of somebody else, with its mistakes told."""

    def __init__(self, strategy: EnvMixStrategy) -> None:
        self._strategy = strategy
        self._takes_eligible = takes_eligible(strategy)
        super().__init__(strategy.env_names, strategy.configured, rng=strategy.rng)

    def pick(self, eligible: Collection[str] | None = None) -> str:
        targets = dict(zip(self.env_names, self._strategy.targets, strict=True))
        possible = [
            name for name, target in targets.items() if target > 0 and (eligible is None or name in eligible)
        ]
        if not possible:
            self._nothing_to_pick(eligible)
        if self._takes_eligible:
            everything = eligible is None and len(possible) == len(targets)
            picked = self._call("pick", self._strategy.pick, None if everything else possible)
            if picked not in possible:
                raise StrategyError(
                    f'mix strategy "{name_of(self._strategy)}": pick returned {picked!r}, '
                    f"which is not one of the envs that may be picked now: {', '.join(possible)}"
                )
            return picked
        for _ in range(REDRAWS):
            picked = self._call("pick", self._strategy.pick)
            if picked in possible:
                return picked
            if picked not in targets:
                raise StrategyError(
                    f'mix strategy "{name_of(self._strategy)}": pick returned {picked!r}, '
                    f"which is not an env of the mix: {', '.join(targets)}"
                )
        return max(possible, key=lambda name: targets[name])

    def on_dispatch(self, env: str, n: int, *, now: float) -> None:
        self._call("on_dispatch", self._strategy.on_dispatch, env, n, now=now)

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        self._call("on_finish", self._strategy.on_finish, env, n, accepted, now=now)

    def on_drop(self, env: str, n: int, *, now: float) -> None:
        self._call("on_drop", self._strategy.on_drop, env, n, now=now)

    def on_cancel(self, env: str, n: int, *, now: float) -> None:
        self._call("on_cancel", self._strategy.on_cancel, env, n, now=now)

    def set_active(self, active: Collection[str]) -> None:
        self._call("set_active", self._strategy.set_active, active)

    def set_weights(self, weights: Sequence[float]) -> None:
        self._call("set_weights", self._strategy.set_weights, weights)

    def owed(self, env: str) -> float:
        return self._call("owed", self._strategy.owed, env)

    def forget_inflight(self) -> None:
        self._call("forget_inflight", self._strategy.forget_inflight)

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict", self._strategy.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        return self._call("load_state_dict", self._strategy.load_state_dict, state)

    def _call(self, method: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except OrchestratorError:
            raise
        except Exception as error:
            fault = describe_fault(error, type(self._strategy))
            raise StrategyError(
                f'mix strategy "{name_of(self._strategy)}" failed in {method}: {fault}'
            ) from error


def make(
    found: type[EnvMixStrategy],
    name: str,
    env_names: Sequence[str],
    weights: Sequence[float],
    *,
    rng: random.Random,
    options: Mapping[str, Any],
) -> EnvMixStrategy:
    """Call a strategy's constructor; MixError that says why it cannot be made."""
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise MixError(f'mix strategy "{name}" does not define {missing}; {PICK} is needed')
    try:
        inspect.signature(found).bind(env_names, weights, rng=rng, **options)
    except TypeError as error:
        raise MixError(f'mix strategy "{name}" cannot be made: {error}; {CONSTRUCTOR} is needed') from None
    try:
        made = found(env_names, weights, rng=rng, **options)
    except MixError:
        raise
    except Exception as error:
        raise MixError(f'mix strategy "{name}" cannot be made: {describe_fault(error, found)}') from error
    for attribute in ("env_names", "targets", "configured", "rng", "unknown"):
        if not hasattr(made, attribute):
            raise MixError(
                f'mix strategy "{name}": its constructor does not call super().__init__(env_names, weights, rng=rng)'
            )
    takes_eligible(made)
    return made


def verify_strategy(build: Callable[[], EnvMixStrategy]) -> None:
    """Try once what a run will ask of a mix: picks, and a state that survives JSON; MixError if that fails.

    `build` makes the mix, circuit breaker included, and is called twice.
    """
    mix = build()
    try:
        mix.pick()
        for name, target in zip(mix.env_names, mix.targets, strict=True):
            if target > 0:
                mix.pick([name])
        state = mix.state_dict()
        try:
            text = json.dumps(state)
        except (TypeError, ValueError) as error:
            raise MixError(
                f'mix strategy "{name_of(mix)}": its state_dict is not made of plain JSON values: {error}'
            ) from None
        build().load_state_dict(json.loads(text))
    except StrategyError as error:
        raise MixError(str(error)) from error
