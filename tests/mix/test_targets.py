"""From the configuration's ratios, task counts and minimums to the targets of the mix; and what was delivered."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.mix import DeliveredMix, EnvShare, mix_targets
from orchestrator.mix.delivered import largest_deviation


def by_ratio(**ratios: float) -> list[EnvShare]:
    return [EnvShare(name, ratio=ratio) for name, ratio in ratios.items()]


def test_ratios_are_normalised() -> None:
    """Ratios need not sum to 1."""
    assert mix_targets(by_ratio(a=2, b=1, c=1)) == [0.5, 0.25, 0.25]


def test_without_ratios_the_number_of_tasks_counts() -> None:
    """An env with three times the tasks gets three times the share."""
    assert mix_targets([EnvShare("a", num_tasks=300), EnvShare("b", num_tasks=100)]) == [0.75, 0.25]


def test_an_env_that_is_alone_needs_no_ratio() -> None:
    """Also where its tasks have no end."""
    assert mix_targets([EnvShare("a")]) == [1.0]


@pytest.mark.parametrize(
    ("envs", "complaint"),
    [
        (
            [EnvShare("a", ratio=1), EnvShare("b")],
            'all train envs set a ratio or none does, but "b" has none',
        ),
        ([EnvShare("a", num_tasks=5), EnvShare("b")], 'env "b": it generates tasks without end'),
        ([EnvShare("a", num_tasks=5), EnvShare("b", num_tasks=0)], 'env "b": it has no tasks'),
        ([EnvShare("a", ratio=-1)], 'env "a": weight -1'),
        ([EnvShare("a", ratio=math.nan)], 'env "a": weight nan'),
        ([EnvShare("a", ratio=0)], "every weight is 0"),
        (
            [EnvShare("a", 1, None, 0.5), EnvShare("b", 1, None, 0.5), EnvShare("c", 1)],
            "minimums fill the whole batch and leave nothing for c",
        ),
        ([EnvShare("a", ratio=1, min_batch_allocation=1.5)], "min_batch_allocation 1.5"),
        (
            [EnvShare("a", ratio=1), EnvShare("b", ratio=0, min_batch_allocation=0.1)],
            'env "b": min_batch_allocation is 0.1 but its ratio is 0',
        ),
    ],
)
def test_a_configuration_that_gives_no_targets_says_why(envs: list[EnvShare], complaint: str) -> None:
    """The message names the env and what to do."""
    with pytest.raises(ConfigError, match=complaint):
        mix_targets(envs)


def test_a_minimum_above_the_share_raises_the_target() -> None:
    """The env gets its minimum and the others keep their proportions in the rest."""
    envs = [EnvShare("a", 0.6), EnvShare("b", 0.3), EnvShare("c", 0.1, min_batch_allocation=0.25)]
    assert mix_targets(envs) == pytest.approx([0.5, 0.25, 0.25])


def test_raising_one_target_may_raise_another() -> None:
    """An env that falls below its minimum because another was raised is raised too."""
    envs = [EnvShare("a", 0.5), EnvShare("b", 0.3, min_batch_allocation=0.29), EnvShare("c", 0.2, None, 0.4)]
    assert mix_targets(envs) == pytest.approx([0.31, 0.29, 0.4])


def test_a_minimum_counts_whole_sequences_of_a_batch() -> None:
    """A quarter of 10 sequences is 3 of them; 0.29 of 100 is exactly 29."""
    envs = [EnvShare("a", 0.9), EnvShare("b", 0.1, min_batch_allocation=0.25)]
    assert mix_targets(envs, batch_size=10) == pytest.approx([0.7, 0.3])
    envs = [EnvShare("a", 0.9), EnvShare("b", 0.1, min_batch_allocation=0.29)]
    assert mix_targets(envs, batch_size=100)[1] == 0.29


def test_minimums_above_the_whole_batch_are_scaled_down() -> None:
    """Minimums of 80 % and 40 % are two thirds and one third."""
    envs = [EnvShare("a", 1, None, 0.8), EnvShare("b", 1, None, 0.4)]
    assert mix_targets(envs) == pytest.approx([2 / 3, 1 / 3])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 10), st.one_of(st.just(0.0), st.floats(0, 0.19))), min_size=1, max_size=5
    )
)
def test_targets_sum_to_one_and_satisfy_every_minimum(pairs: list[tuple[float, float]]) -> None:
    """For any ratios and minimums that fit; and an env without a minimum is never raised."""
    envs = [EnvShare(f"e{i}", ratio, None, minimum) for i, (ratio, minimum) in enumerate(pairs)]
    total = sum(ratio for ratio, _ in pairs)
    targets = mix_targets(envs)
    assert sum(targets) == pytest.approx(1)
    for target, (ratio, minimum) in zip(targets, pairs, strict=True):
        assert target >= minimum - 1e-12
        assert minimum or target <= ratio / total + 1e-12


@pytest.mark.parametrize(
    ("batches", "whole", "recent"),
    [
        ([], {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}),
        ([{"a": 4}], {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}),
        ([{"a": 4}, {"b": 4}, {"a": 2, "b": 2}], {"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}),
    ],
)
def test_delivered_shares_over_the_run_and_lately(
    batches: list[dict[str, int]], whole: Mapping[str, float], recent: Mapping[str, float]
) -> None:
    """Shares of emitted batches, over the whole run and over the last two, also after a restart."""
    mix = DeliveredMix(["a", "b"], window=2)
    for batch in batches:
        mix.add(batch)
    again = DeliveredMix(["a", "b"], window=2)
    again.load_state_dict(mix.state_dict())
    for record in (mix, again):
        assert record.shares() == whole
        assert record.recent_shares() == recent


def test_deviation_is_the_largest_in_percentage_points() -> None:
    """The env that is furthest from its target counts, missing ones included."""
    assert largest_deviation({"a": 0.5}, {"a": 0.4, "b": 0.3, "c": 0.3}) == pytest.approx(30)


def test_a_minimum_counts_as_the_whole_groups_that_keep_it() -> None:
    """A tenth of 64 is 7 sequences, which groups of 4 give as 8: aiming lower would pile up what others deliver."""
    envs = [
        EnvShare("words", ratio=0.5, min_batch_allocation=0.5, group_size=2),
        EnvShare("lookup", ratio=0.4, group_size=8),
        EnvShare("agree", ratio=0.1, min_batch_allocation=0.1, group_size=4),
    ]
    assert mix_targets(envs, batch_size=64) == pytest.approx([0.5, 0.375, 0.125])


def test_whole_groups_that_do_not_fit_leave_the_minimums_as_they_are() -> None:
    """Groups are split then, so that a target is the number of sequences that was asked for."""
    envs = [EnvShare(name, ratio=1.0, min_batch_allocation=0.3, group_size=16) for name in "abc"]
    envs.append(EnvShare("d", ratio=0.1))
    targets = mix_targets(envs, batch_size=40)
    assert targets[3] > 0
    assert min(targets[:3]) >= 12 / 40 - 1e-9


def domains(*envs: tuple[str, str, float | None], **targets: float) -> dict[str, float]:
    """The targets of envs given as (name, domain, ratio)."""
    shares = [EnvShare(name, ratio, None, domain=domain) for name, domain, ratio in envs]
    return dict(zip([env.name for env in shares], mix_targets(shares, domains=targets), strict=True))


def test_a_ratio_is_a_share_within_the_domain_where_domains_have_targets() -> None:
    """Domains get theirs, whatever the ratios of their envs sum to; an env alone in its domain has all of it."""
    found = domains(("gsm", "math", 30), ("aime", "math", 10), ("code", "code", None), math=0.6, code=0.4)
    assert found == pytest.approx({"gsm": 0.45, "aime": 0.15, "code": 0.4})


def test_within_a_domain_the_number_of_tasks_counts_where_there_are_no_ratios() -> None:
    """As it does among all envs where domains have no targets; targets of domains need not sum to 1."""
    envs = [
        EnvShare("gsm", num_tasks=300, domain="math"),
        EnvShare("aime", num_tasks=100, domain="math"),
        EnvShare("code", ratio=0.1, domain="code"),
    ]
    assert mix_targets(envs, domains={"math": 2, "code": 2}) == pytest.approx([0.375, 0.125, 0.5])


def test_a_minimum_raises_an_env_above_its_share_of_its_domain() -> None:
    """Minimums are of the batch, and hold after the domains have been divided."""
    envs = [
        EnvShare("gsm", 0.9, domain="math"),
        EnvShare("aime", 0.1, domain="math", min_batch_allocation=0.2),
        EnvShare("code", domain="code"),
    ]
    found = mix_targets(envs, domains={"math": 0.5, "code": 0.5})
    assert found[1] == 0.2
    assert sum(found) == pytest.approx(1)
    assert found[0] / found[2] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("envs", "complaint"),
    [
        ([("a", "math", 1), ("b", "code", 1)], 'env "b": its domain "code" has no target'),
        ([("a", "math", 0), ("b", "math", 0)], 'domain "math": every weight is 0'),
        (
            [("a", "math", None), ("b", "math", None)],
            'domain "math": env "a": it generates tasks without end',
        ),
    ],
)
def test_targets_by_domain_that_give_no_mix_say_why(
    envs: list[tuple[str, str, float | None]], complaint: str
) -> None:
    """The message names the domain."""
    with pytest.raises(ConfigError, match=complaint):
        domains(*envs, math=1.0)


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.floats(0.01, 100, allow_subnormal=False)), min_size=1, max_size=8
    ),
    st.dictionaries(st.sampled_from("xyz"), st.floats(0.01, 100), min_size=3, max_size=3),
)
def test_every_domain_gets_its_share(envs: list[tuple[str, float]], targets: dict[str, float]) -> None:
    """The shares of a domain's envs sum to the domain's, of those that are there."""
    shares = [EnvShare(f"e{number}", ratio, domain=domain) for number, (domain, ratio) in enumerate(envs)]
    found = mix_targets(shares, domains=targets)
    there = {domain for domain, _ in envs}
    for domain in there:
        total = sum(share for env, share in zip(shares, found, strict=True) if env.domain == domain)
        assert total == pytest.approx(targets[domain] / sum(targets[name] for name in there))
