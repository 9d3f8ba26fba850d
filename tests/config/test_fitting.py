"""Batches that can or cannot be made of whole groups: what is refused, what is warned about, what is kept."""

import os
from pathlib import Path

import pytest

from orchestrator.config import find_warnings, load_config
from orchestrator.errors import ConfigError
from orchestrator.service import blueprint


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ORCHESTRATOR__"):
            monkeypatch.delenv(name)


def written(tmp_path: Path, batch: str, *envs: str) -> Path:
    """A configuration with these settings of the batch and of each env."""
    tables = "".join(
        f'[[train.env]]\nname = "{name}"\nid = "reverse"\n{settings}\n'
        for name, settings in zip("abcdefgh", envs, strict=False)
    )
    path = tmp_path / "config.toml"
    path.write_text(f"[local]\n[dispatch]\nmax_inflight = 8\n[batch]\n{batch}\n{tables}", encoding="utf-8")
    return path


def env(group_size: int = 8, minimum: float = 0.0, ratio: float = 1.0) -> str:
    return f"ratio = {ratio}\ngroup_size = {group_size}\nmin_batch_allocation = {minimum}"


def warnings(path: Path) -> dict[str, str]:
    return dict(find_warnings(load_config(path).model_dump()))


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


class TestMinimums:
    @pytest.mark.parametrize(
        ("size", "envs", "changes", "kept"),
        [
            (128, [env(8, 0.33)] * 3, '"b" 43 -> 40, "c" 42 -> 40', [43, 40, 40]),
            (24, [env(8, 0.5)] * 2, '"b" 12 -> 8', [12, 8]),
            (64, [env(8, 0.2)] * 5, '"d" 13 -> 8, "e" 12 -> 8', [13, 13, 13, 8, 8]),
            (100, [env(10, 0.25)] * 4, '"c" 25 -> 20, "d" 25 -> 20', [25, 25, 20, 20]),
        ],
    )
    def test_with_wait_they_are_lowered_and_the_numbers_are_told(
        self, tmp_path: Path, size: int, envs: list[str], changes: str, kept: list[int]
    ) -> None:
        """What whole groups cannot keep is lowered, as wanted -> kept."""
        path = written(tmp_path, f'size = {size}\non_stuck = "wait"', *envs)
        words = f"whole groups cannot keep every minimum in a batch of {size}; lowered: {changes} sequences"
        assert warnings(path)["train.env"] == words
        assert list(blueprint.build_minimums(load_config(path)).kept.values()) == kept

    def test_with_split_they_are_kept_and_groups_are_split(self, tmp_path: Path) -> None:
        """The default keeps minimums, and says at which price."""
        path = written(tmp_path, "size = 128", *[env(8, 0.33)] * 3)
        assert warnings(path) == {
            "batch.on_stuck": "an exact batch of whole groups can be out of reach "
            '(for the minimums "a" needs 48, "b" needs 48, "c" needs 48 of 128): groups will be split'
        }
        minimums = blueprint.build_minimums(load_config(path))
        assert (minimums.lowered, minimums.kept) == (False, {"a": 43, "b": 43, "c": 42})

    def test_minimums_that_fit_are_no_news(self, tmp_path: Path) -> None:
        """Neither with split nor with wait."""
        for on_stuck in ("split", "wait"):
            path = written(tmp_path, f'size = 64\non_stuck = "{on_stuck}"', env(8, 0.5), env(4, 0.1), env(2))
            assert warnings(path) == {}
            assert blueprint.build_minimums(load_config(path)).kept == {"a": 32, "b": 7}

    def test_an_env_of_ratio_zero_fills_nothing(self, tmp_path: Path) -> None:
        """Groups that are never made do not help to keep the minimums of others."""
        envs = [env(8, 0.4), env(8, 0.4), env(1, ratio=0)]
        path = written(tmp_path, 'size = 20\non_stuck = "wait"', *envs)
        assert "no number of whole groups of 8 ever sums to 20" in problem(path)

    def test_a_minimum_of_an_env_that_is_never_picked(self, tmp_path: Path) -> None:
        """Known before the start, so it is told by `check`."""
        for batch in ("size = 32", 'size = 3200\nunit = "tokens"'):
            path = written(tmp_path, batch, env(8), env(8, 0.5, ratio=0))
            assert 'env "b": min_batch_allocation is 0.5 but its ratio is 0' in problem(path)

    def test_minimums_that_leave_nothing_for_others(self, tmp_path: Path) -> None:
        """So is this."""
        path = written(tmp_path, "size = 32", env(8, 0.5), env(8, 0.5), env(8))
        assert "the minimums fill the whole batch and leave nothing for c" in problem(path)


class TestSizes:
    def test_a_group_that_is_in_no_exact_batch(self, tmp_path: Path) -> None:
        """Groups of 24 beside groups of 16 never get into a batch of 32; splitting them would."""
        envs = [env(24, 0.5), env(16, 0.25)]
        said = problem(written(tmp_path, 'size = 32\non_stuck = "wait"', *envs))
        assert "train.env[0].group_size: no batch of 32 made of whole groups of 16, 24 has one of 24" in said
        assert warnings(written(tmp_path, "size = 32", *envs)) == {
            "batch.on_stuck": "an exact batch of whole groups can be out of reach "
            "(groups of 16, 24 do not always sum to 32): groups will be split"
        }

    def test_sizes_that_do_not_always_fit(self, tmp_path: Path) -> None:
        """A full queue of sixes and eights may hold no 32: with wait it waits for another size."""
        path = written(tmp_path, 'size = 32\non_stuck = "wait"', env(8), env(6))
        assert warnings(path) == {
            "batch.on_stuck": "a full queue can wait for a group of another size "
            "(groups of 6, 8 do not always sum to 32)"
        }

    def test_sizes_that_never_fit_are_split(self, tmp_path: Path) -> None:
        """No whole groups of 6 and 9 make 32, which is a problem with wait and a warning with split."""
        assert (
            "no whole groups of 6, 9 sum to 32"
            in warnings(written(tmp_path, "size = 32", env(6), env(9)))["batch.on_stuck"]
        )

    def test_groups_that_may_shrink(self, tmp_path: Path) -> None:
        """With min_valid a group can have any size, so that a full queue can be stuck."""
        path = written(tmp_path, 'size = 32\non_stuck = "wait"', env(8))
        path.write_text(path.read_text().replace("[dispatch]", "[dispatch]\nmin_valid = 2"))
        assert "may have down to 2 rollouts" in warnings(path)["batch.on_stuck"]

    def test_a_token_budget_has_no_misfits(self, tmp_path: Path) -> None:
        """It is never filled exactly, and never split."""
        path = written(tmp_path, 'size = 1000\nunit = "tokens"', env(24, 0.5), env(16, 0.25))
        assert warnings(path) == {}
        config = load_config(path)
        assert not config.batch.splits
        assert not blueprint.build_minimums(config).lowered


class TestQuotas:
    def test_quotas_that_no_whole_groups_come_near(self, tmp_path: Path) -> None:
        """Halves of 32 in groups of 8 and 6: the nearest exact batch is a whole group away, so none is made."""
        quotas = 'size = 32\nquotas = true\non_starved = "wait"'
        said = problem(written(tmp_path, f'{quotas}\non_stuck = "wait"', env(8), env(6)))
        assert (
            "batch.quotas: whole groups of 6, 8 never come near enough to the quotas of a batch of 32" in said
        )
        assert load_config(written(tmp_path, quotas, env(8), env(6)))
        redistribute = quotas.replace('on_starved = "wait"', "").strip()
        assert load_config(written(tmp_path, f'{redistribute}\non_stuck = "wait"', env(8), env(6)))

    def test_quotas_that_only_the_first_batch_comes_near(self, tmp_path: Path) -> None:
        """20 and 44 are the only whole groups that make 64; the second batch would have to make up for the first."""
        batch = 'size = 64\nquotas = true\non_starved = "wait"\non_stuck = "wait"'
        said = problem(written(tmp_path, batch, env(5, ratio=0.2), env(11)))
        assert "batch.quotas: whole groups of 5, 11 never come near enough" in said

    def test_quotas_that_whole_groups_can_follow(self, tmp_path: Path) -> None:
        """Groups of 8 make halves of 32."""
        quotas = 'size = 32\nquotas = true\non_starved = "wait"\non_stuck = "wait"'
        assert load_config(written(tmp_path, quotas, env(8), env(8)))


def test_groups_are_split_by_default_and_soon(tmp_path: Path) -> None:
    """Whoever says nothing gets batches."""
    batch = load_config(written(tmp_path, "size = 32", env(8))).batch
    assert (batch.on_stuck, batch.stuck_after_s, batch.splits) == ("split", 10, True)
