"""Strategies written by others: the founding signature, mistakes, and what is tried before a run starts."""

import inspect
import random
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.sections import MixConfig
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.mix import (
    ALIASES,
    STRATEGIES,
    CircuitBreaker,
    EnvMixStrategy,
    MixError,
    StrategyError,
    WeightedRandom,
    build_mix,
    verify_strategy,
)

NAMES = ["a", "b", "c"]


class Draws(EnvMixStrategy):
    """Takes no `eligible`: draws by weight and knows nothing else."""

    def pick(self) -> str:  # type: ignore[override]  # that it takes nothing is the point
        return self.rng.choices(self.env_names, weights=self.configured)[0]


class Stubborn(EnvMixStrategy):
    """Takes no `eligible` and always names the same env."""

    def pick(self) -> str:  # type: ignore[override]  # same
        return self.env_names[0]


class Breaks(EnvMixStrategy):
    """Raises in the method that its option names."""

    def __init__(
        self, env_names: Sequence[str], weights: Sequence[float], *, rng: random.Random, at: str
    ) -> None:
        if at == "__init__":
            raise KeyError("nothing here")
        super().__init__(env_names, weights, rng=rng)
        self.at = at

    def pick(self, eligible: Collection[str] | None = None) -> str:
        if self.at == "pick":
            raise ZeroDivisionError("of my own")
        return next(name for name in self.env_names if eligible is None or name in eligible)

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        if self.at == "on_finish":
            raise ZeroDivisionError("of my own")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": {1} if self.at == "json" else 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        return [state["forgotten"]] if self.at == "load_state_dict" else super().load_state_dict(state)


class Stranger(EnvMixStrategy):
    """Picks what its option says."""

    def __init__(
        self, env_names: Sequence[str], weights: Sequence[float], rng: random.Random, says: str = "x"
    ) -> None:
        super().__init__(env_names, weights, rng=rng)
        self.says = says

    def pick(self, eligible: Collection[str] | None = None) -> str:
        return self.says


class Forgetful(EnvMixStrategy):
    """Does not call the constructor that it inherits."""

    def __init__(self, env_names: Sequence[str], weights: Sequence[float], *, rng: random.Random) -> None:
        self.mine = env_names

    def pick(self, eligible: Collection[str] | None = None) -> str:
        return self.mine[0]


class Demanding(EnvMixStrategy):
    """Wants to be told more than it is."""

    def pick(self, now: float, eligible: Collection[str]) -> str:  # type: ignore[override]  # the point
        return self.env_names[0]


class Selfmade(EnvMixStrategy):
    """Its constructor takes no generator."""

    def __init__(self, env_names: Sequence[str], weights: Sequence[float]) -> None:
        super().__init__(env_names, weights, rng=random.Random(0))

    def pick(self, eligible: Collection[str] | None = None) -> str:
        return self.env_names[0]


def mix_of(
    strategy: type[EnvMixStrategy], weights: Sequence[float] = (1, 1, 1), **options: Any
) -> CircuitBreaker:
    return build_mix(f"{__name__}:{strategy.__name__}", NAMES, weights, rng=random.Random(0), **options)


class TestFoundingSignature:
    def test_a_pick_without_eligible_is_asked_again(self) -> None:
        """Every pick is one of the eligible, in proportion to the weights."""
        mix = mix_of(Draws, (2, 1, 5))
        counts = Counter(mix.pick({"a", "b"}) for _ in range(3_000))
        assert set(counts) == {"a", "b"}
        assert counts["a"] / counts["b"] == pytest.approx(2, rel=0.15)

    def test_one_that_never_names_an_eligible_env_is_overruled(self) -> None:
        """After a bounded number of questions the eligible env with the largest target is taken."""
        mix = mix_of(Stubborn, (5, 1, 2))
        assert mix.pick() == "a"
        assert mix.pick({"b", "c"}) == "c"
        assert mix.try_pick({"b"}) == "b"

    def test_it_is_verified_like_any_other(self) -> None:
        """A configuration may name it."""
        verify_strategy(lambda: mix_of(Draws))


class TestMistakes:
    @pytest.mark.parametrize("method", ["pick", "on_finish"])
    def test_an_exception_names_the_strategy_the_file_and_the_line(self, method: str) -> None:
        """It ends a run as an error with a message for the user, not as a bare traceback."""
        mix = mix_of(Breaks, at=method)
        line = next(
            number
            for number, text in enumerate(inspect.getsource(sys.modules[__name__]).splitlines(), start=1)
            if "of my own" in text and (number > inspect.getsourcelines(getattr(Breaks, method))[1])
        )

        def ask() -> None:
            mix.on_dispatch(mix.pick(), 1, now=0.0)
            mix.on_finish("a", 1, 1, now=0.0)

        with pytest.raises(StrategyError) as caught:
            ask()
        assert isinstance(caught.value, OrchestratorError)
        assert caught.value.exit_code == 1
        assert str(caught.value) == (
            f'mix strategy "{__name__}:Breaks" failed in {method}: '
            f"ZeroDivisionError: of my own ({Path(__file__)}, line {line})"
        )

    def test_a_pick_that_is_not_eligible_or_not_known_is_such_an_error(self) -> None:
        """The run would otherwise start what must not run, or nothing that exists."""
        with pytest.raises(StrategyError, match="pick returned 'x', which is not one of the envs"):
            mix_of(Stranger).pick()
        with pytest.raises(StrategyError, match=r"pick returned 'a', which is not one of .* now: b, c"):
            mix_of(Stranger, says="a").pick({"b", "c"})
        mix = mix_of(Stubborn)
        assert isinstance(mix.strategy, Stubborn)
        mix.strategy.env_names = ("x", "b", "c")
        with pytest.raises(StrategyError, match="not an env of the mix: a, b, c"):
            mix.pick()

    @pytest.mark.parametrize(
        ("strategy", "options", "words"),
        [
            (Breaks, {"at": "__init__"}, r"cannot be made: KeyError: 'nothing here' \(.*test_foreign.py, line \d+\)"),
            (Breaks, {}, r"cannot be made: missing a required.* argument: 'at'"),
            (Breaks, {"at": "pick"}, r"failed in pick: ZeroDivisionError: of my own"),
            (Breaks, {"at": "json"}, r"Breaks\": its state_dict is not made of plain JSON values"),
            (Breaks, {"at": "load_state_dict"}, r"failed in load_state_dict: KeyError: 'forgotten'"),
            (Stranger, {}, r"pick returned 'x'"),
            (Stranger, {"say": "a"}, r'has no option "say"; it has: says; did you mean "says"\?'),
            (Forgetful, {}, r"does not call super\(\).__init__"),
            (Demanding, {}, r"pick\(self, eligible=None\) is needed, not pick\(now"),
            (Selfmade, {}, r"__init__\(self, env_names, weights, \*, rng, \*\*options\) is needed"),
            (EnvMixStrategy, {}, r"does not define pick"),
        ],
    )  # fmt: skip
    def test_what_cannot_work_is_refused_before_the_run(
        self, strategy: type[EnvMixStrategy], options: dict[str, Any], words: str
    ) -> None:
        """Constructor, picks and state are tried once; a configuration error says what is wrong or needed."""
        with pytest.raises(ConfigError, match=words):
            verify_strategy(lambda: mix_of(strategy, **options))

    def test_a_module_that_fails_when_it_is_imported_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any exception of somebody's module is one line; the module is found where the command is started."""
        (tmp_path / "broken_strategy.py").write_text("x = 1\nraise RuntimeError('not today')\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("")  # undone at the end, with what the import adds
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
        with pytest.raises(MixError, match=r"cannot be loaded: RuntimeError: not today \(.*line 2\)"):
            build_mix("broken_strategy:Mine", NAMES, [1, 1, 1], rng=random.Random(0))

    def test_group_sizes_are_kept_from_a_strategy_that_does_not_take_them(self) -> None:
        """They are a help, not an option that a constructor must have."""
        sizes = {"a": 1, "b": 2, "c": 4}
        assert mix_of(Breaks, at="", group_sizes=sizes).pick() == "a"


class TestNothingToPick:
    @pytest.mark.parametrize("strategy", [*STRATEGIES, f"{__name__}:Draws", f"{__name__}:Breaks"])
    def test_only_envs_of_ratio_zero_are_eligible(self, strategy: str) -> None:
        """With every env that has a ratio at its limit there is nothing to pick now, which is no error."""
        options: dict[str, Any] = {"at": ""} if strategy.endswith("Breaks") else {}
        mix = build_mix(strategy, NAMES, [1, 0, 0], rng=random.Random(0), **options)
        assert mix.try_pick({"b", "c"}) is None
        assert mix.try_pick(set()) is None
        assert mix.try_pick({"a", "b"}) == "a"
        assert mix.try_pick() == "a"

    @settings(deadline=None, max_examples=60, derandomize=True, database=None)
    @given(
        strategy=st.sampled_from([*STRATEGIES, f"{__name__}:Draws"]),
        weights=st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0]), min_size=3, max_size=3).filter(any),
        window=st.sampled_from([1, 300]),
        data=st.data(),
    )
    def test_asking_for_any_known_names_never_raises(
        self, strategy: str, weights: list[float], window: int, data: st.DataObject
    ) -> None:
        """Whatever was reported before, quarantines included, the answer is an eligible env or None."""
        options: dict[str, Any] = {"window": window} if strategy == "flow" else {}
        mix = build_mix(strategy, NAMES, weights, rng=random.Random(0), breaker={"window": 4}, **options)
        flying: list[str] = []
        for _ in range(30):
            eligible: set[str] | None = data.draw(st.none() | st.sets(st.sampled_from(NAMES)))
            env = mix.try_pick(eligible)
            if env is not None:
                assert weights[NAMES.index(env)] > 0
                assert eligible is None or env in eligible
                mix.on_dispatch(env, 1, now=0.0)
                flying.append(env)
            one_ends: bool = data.draw(st.booleans())
            if flying and one_ends:
                mix.on_finish(flying.pop(), 1, data.draw(st.integers(0, 1)), now=0.0)

    def test_an_env_that_had_no_ratio_before_a_restart_is_picked_with_one(self) -> None:
        """A saved target of 0 means quarantine only for an env that had a weight."""
        before = build_mix("flow", NAMES, [1, 1, 0], rng=random.Random(0))
        after = build_mix("flow", NAMES, [0, 0, 1], rng=random.Random(0))
        after.load_state_dict(before.state_dict())
        assert after.try_pick() == "c"

    def test_a_share_that_is_lost_in_rounding_is_refused(self) -> None:
        """It would never be picked, and sums could forget it."""
        with pytest.raises(MixError, match='"b": a share of 1e-200 of the mix is too small'):
            build_mix("flow", ["a", "b"], [1, 1e-200], rng=random.Random(0))


def test_weighted_is_the_draw_at_random() -> None:
    """The alias is told apart from the round robin, which takes turns."""
    assert ALIASES == {"weighted": "weighted_random"}
    mix = build_mix("weighted", NAMES, [1, 2, 3], rng=random.Random(0))
    assert type(mix.strategy) is WeightedRandom
    told = " ".join((MixConfig.model_fields["strategy"].description or "").split())
    assert "weighted_random, or weighted: draws at random" in told
    assert "weighted_round_robin: takes turns" in told


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_every_option_of_a_strategy_is_in_the_reference(strategy: str) -> None:
    """`mix.options` tells each strategy's options with their defaults."""
    made = build_mix(strategy, NAMES, [1, 1, 1], rng=random.Random(0)).strategy
    told = " ".join((MixConfig.model_fields["options"].description or "").split())
    part = next(sentence for sentence in told.split(". ") if strategy in sentence)
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(type(made)).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in ("rng", "group_sizes")
    }
    assert all(f"{name} ({default}:" in part for name, default in options.items())
    assert options or "none" in part


class Fixed(EnvMixStrategy):
    """Has made up its mind."""

    def pick(self, eligible: Collection[str] | None = None) -> str:
        return next(name for name in self.env_names if eligible is None or name in eligible)

    def set_weights(self, weights: Sequence[float]) -> None:
        raise MixError("my plan was made at the start")


def test_a_strategy_may_refuse_other_weights() -> None:
    """One that looks at its weights at every pick follows them without a line of its own."""
    rng = random.Random(0)
    with pytest.raises(MixError, match="my plan was made at the start"):
        CircuitBreaker(Fixed(NAMES, [1, 1, 1], rng=rng)).set_weights([1, 2, 3])
    mix = CircuitBreaker(Draws(NAMES, [1, 1, 1], rng=rng))
    mix.set_weights([0, 0, 1])
    assert {mix.pick() for _ in range(50)} == {"c"}
