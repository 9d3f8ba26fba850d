"""From configuration to the parts' own arguments."""

import re
from pathlib import Path
from typing import Any

import pytest

from envs.curve import generate_pair, write_pair
from orchestrator.config import Config
from orchestrator.env_servers.env import Env
from orchestrator.errors import ConfigError
from orchestrator.groups.group import Group
from orchestrator.inference import NEUTRAL
from orchestrator.journal import EnvIdentity, digest_of
from orchestrator.run.build import build_buffer
from orchestrator.run.settings import RunSettings
from orchestrator.service import blueprint, env_blueprint, inference_blueprint, secrets, track_blueprint
from orchestrator.simulate.neighbours import Behaviour
from orchestrator.simulate.world import World


def config(**changes: Any) -> Config:
    env = {"id": "reverse", "name": "r", "ratio": 1.0}
    data: dict[str, Any] = {"local": {}, "train": {"env": [env]}}
    return Config(**(data | changes))


def test_settings_of_an_env_override_those_of_its_table() -> None:
    """Sampling is merged key by key; group size and the rest are replaced."""
    made = config(
        train={
            "group_size": 8,
            "sampling": {"temperature": 1.0, "max_tokens": 16},
            "env": [{"id": "reverse", "ratio": 1.0, "group_size": 4, "sampling": {"max_tokens": 99}}],
        }
    )
    env = env_blueprint.build_train_envs(made)["reverse"]
    assert env.spec.sampling == {**NEUTRAL, "temperature": 1.0, "max_tokens": 99}
    assert env.settings.group_size == 4


def test_a_table_in_the_sampling_is_merged_into_the_shared_one() -> None:
    """An env that adds to `extra_body` keeps what all envs have there; what is no table is replaced."""
    shared = {"extra_body": {"a": 1, "deep": {"x": 1, "y": 2}}, "stop": ["a"]}
    own = {"extra_body": {"b": 2, "deep": {"y": 3}}, "stop": ["b"]}
    made = config(
        train={"sampling": shared, "env": [{"id": "reverse", "ratio": 1.0, "sampling": own}]},
        eval={"sampling": shared, "env": [{"id": "reverse", "sampling": {"extra_body": 5}}]},
    )
    assert env_blueprint.build_train_envs(made)["reverse"].spec.sampling == {
        **NEUTRAL,
        "extra_body": {"a": 1, "b": 2, "deep": {"x": 1, "y": 3}},
        "stop": ["b"],
    }
    assert env_blueprint.build_eval_envs(made)["eval-reverse"].spec.sampling == {
        "extra_body": 5,
        "stop": ["a"],
    }
    assert made.train.sampling == shared


def test_training_samples_neutrally_unless_told_otherwise() -> None:
    """An engine fills in what a request does not set from the model's folder; evaluations want just that."""
    tables: dict[str, Any] = {
        "sampling": {"top_k": 20, "max_tokens": 5},
        "env": [{"id": "reverse", "sampling": {"min_p": 0.1}}],
    }
    made = config(train=tables, eval=tables)
    expected = {**NEUTRAL, "top_k": 20, "max_tokens": 5, "min_p": 0.1}
    assert env_blueprint.build_train_envs(made)["reverse"].spec.sampling == expected
    assert expected["temperature"] == expected["top_p"] == expected["repetition_penalty"] == 1.0
    own = {"top_k": 20, "max_tokens": 5, "min_p": 0.1}
    assert env_blueprint.build_eval_envs(made)["eval-reverse"].spec.sampling == own
    made = config(train={**tables, "neutral_sampling": False})
    assert env_blueprint.build_train_envs(made)["reverse"].spec.sampling == own


def test_the_split_of_an_id_is_used_and_evals_default_to_their_own() -> None:
    """`@hard` names the split; without one training reads "train" and evaluation "eval"."""
    made = config(
        train={"env": [{"id": "reverse@hard", "ratio": 1.0}]},
        eval={"env": [{"id": "reverse"}]},
    )
    assert env_blueprint.build_train_envs(made)["reverse@hard"].spec.split == "hard"
    assert env_blueprint.build_eval_envs(made)["eval-reverse"].spec.split == "eval"


def test_env_servers_do_not_get_the_secrets_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens and keys given as variables are withheld; the API key of the inference servers is not."""
    pair = generate_pair()
    for name, key in (("LINK_KEY", pair.secret), ("SERVER_KEY", pair.public)):
        monkeypatch.setenv(name, key)
    keys = {"server_key_file": "env:SERVER_KEY", "secret_key_file": "env:LINK_KEY"}
    made = config(
        http={"token_env": "HTTP_TOKEN"},
        inference={"api_key_env": "API_KEY"},
        trainer={
            "secret_key_file": "env:TRAINER_KEY",
            "trainer_key_files": ["env:RANK_KEY", "rank.public"],
            "token_env": "TRAINER_TOKEN",
        },
        train={"env": [{"id": "reverse", "ratio": 1.0}]},
        eval={"env": [{"id": "reverse", "addresses": ["tcp://10.0.0.7:7000"], **keys}]},
    )
    expected = {"HTTP_TOKEN", "TRAINER_TOKEN", "TRAINER_KEY", "RANK_KEY", "SERVER_KEY", "LINK_KEY"}
    assert env_blueprint.build_train_envs(made)["reverse"].spec.withheld == expected
    assert secrets.own_secrets(config(http={"token_env": "K"}, inference={"api_key_env": "K"})) == set()


@pytest.mark.parametrize(("silence_s", "lease_s"), [(30.0, 15.0), (8.0, 8.0), (0.5, 3.0)])
def test_a_server_gives_up_on_us_no_later_than_we_on_it(silence_s: float, lease_s: float) -> None:
    """What it runs would be asked again elsewhere; but a late ping or two must not end its lease."""
    made = config(train={"env": [{"id": "reverse", "ratio": 1.0, "silence_timeout_s": silence_s}]})
    assert env_blueprint.build_train_envs(made)["reverse"].spec.lease_s == lease_s


def test_a_server_has_room_for_a_whole_group() -> None:
    """Else a group-scored env could never start one."""
    made = config(train={"group_size": 64, "env": [{"id": "agree", "ratio": 1.0, "capacity": 8}]})
    assert env_blueprint.build_train_envs(made)["agree"].spec.capacity == 64


def test_a_domain_is_an_environment_without_a_class() -> None:
    """The id is routed to its functions, and the domain's system prompt holds unless the env has one."""
    domains = {"math": {"rollout": "pkg:solve", "dataset": "pkg:load", "system_prompt": "Think."}}
    made = config(
        domains=domains,
        train={
            "env": [
                {"id": "math::gsm8k@hard", "name": "a", "ratio": 1.0, "args": {"limit": 3}},
                {"id": "math::gsm8k", "name": "b", "ratio": 1.0, "system_prompt": "Short."},
            ]
        },
    )
    envs = env_blueprint.build_train_envs(made)
    assert envs["a"].spec.id.endswith("::math::gsm8k@hard")
    assert envs["a"].spec.args == {"rollout": "pkg:solve", "dataset": "pkg:load", "args": {"limit": 3}}
    assert (envs["a"].spec.split, envs["b"].spec.split) == ("hard", "train")
    assert (envs["a"].spec.system_prompt, envs["b"].spec.system_prompt) == ("Think.", "Short.")


def test_an_unknown_domain_is_an_error_that_names_the_nearest() -> None:
    """Before anything is spawned."""
    domains = {"math": {"rollout": "pkg:solve", "dataset": "pkg:load"}}
    made = config(domains=domains, train={"env": [{"id": "maths::gsm8k", "ratio": 1.0}]})
    with pytest.raises(ConfigError, match=r'no domain or loader "maths".*math'):
        env_blueprint.build_train_envs(made)


def test_the_trainer_finds_its_batches_where_the_configuration_says(tmp_path: Path) -> None:
    """A ZMQ address, or a directory: the run's own unless one is named."""
    assert blueprint.trainer_address(config(trainer={"bind": "tcp://127.0.0.1:7"})) == "tcp://127.0.0.1:7"
    here = config(run_dir=tmp_path, trainer={"transport": "filesystem"})
    assert blueprint.trainer_address(here) == f"file://{tmp_path}/trainer"
    there = config(trainer={"transport": "filesystem", "directory": tmp_path / "shared"})
    assert blueprint.trainer_address(there) == f"file://{tmp_path}/shared"


def test_keys_are_read_from_files_and_their_absence_is_named(tmp_path: Path) -> None:
    """The secret never shows in the message."""
    public, secret = write_pair(tmp_path, "service")
    made = config(trainer={"secret_key_file": str(secret), "trainer_key_files": [str(public)]})
    keys = secrets.trainer_keys(made)
    assert keys is not None
    assert keys.clients == (public.read_text().strip(),)
    assert secrets.trainer_keys(config()) is None
    with pytest.raises(ConfigError, match=r"trainer: cannot read the CURVE key .*nowhere"):
        secrets.trainer_keys(config(trainer={"secret_key_file": str(tmp_path / "nowhere")}))
    lonely = config(
        train={
            "env": [
                {
                    "id": "reverse",
                    "ratio": 1.0,
                    "server_key_file": str(public),
                    "addresses": ["tcp://10.0.0.1:1"],
                }
            ]
        }
    )
    with pytest.raises(ConfigError, match="needs secret_key_file"):
        env_blueprint.build_train_envs(lonely)


def test_envs_on_ray_share_one_way_to_their_cluster_and_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and evaluation go to the same one, others to none; without Ray that is found before anything is started."""
    table = {"id": "reverse", "ratio": 1.0, "launcher": "ray", "resources": {"CPU": 0.5, "sandbox": 1}}
    made = config(
        train={"env": [table, {"id": "larger", "ratio": 1.0}]},
        eval={"env": [{"id": "reverse", "launcher": "ray"}]},
    )
    train, evals = env_blueprint.build_envs(made)
    assert train["reverse"].spec.ray is not None
    assert train["reverse"].spec.ray is evals["eval-reverse"].spec.ray
    assert train["larger"].spec.ray is None
    assert train["reverse"].spec.resources == {"CPU": 0.5, "sandbox": 1.0}
    assert evals["eval-reverse"].spec.resources == {"CPU": 1.0}
    assert 'train env "reverse" (reverse): 1 server(s) on Ray' in blueprint.describe_start(made)
    monkeypatch.setattr(env_blueprint, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r'env "reverse": launcher = "ray" needs Ray, which is not installed'
    ):
        blueprint.verify(made)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments count as connected, with 100 tasks each."""
    monkeypatch.setattr(Env, "num_tasks", 100)
    monkeypatch.setattr(Env, "samples", {0: 5})


def settings_of(made: Config) -> RunSettings:
    return blueprint.build_settings(
        made, env_blueprint.build_train_envs(made), env_blueprint.build_eval_envs(made), endpoints=[]
    )


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("on_stuck", ["wait", "split"])
@pytest.mark.parametrize(
    ("sizes", "batch", "slack"), [((8, 8), 64, 0), ((8, 4), 64, 4), ((4, 3), 12, 3), ((12, 2), 12, 6)]
)
def test_slack_is_what_whole_groups_may_leave_of_a_batch(
    sizes: tuple[int, int], batch: int, slack: int, on_stuck: str
) -> None:
    """None where every group has the same size or is split; never more than half a batch."""
    envs = [
        {"id": "reverse", "name": f"e{i}", "ratio": 1.0, "group_size": size} for i, size in enumerate(sizes)
    ]
    made = config(
        train={"env": envs}, batch={"size": batch, "on_stuck": on_stuck}, staleness={"max_versions": 0}
    )
    world = World(settings_of(made), {"e0": Behaviour(), "e1": Behaviour()})
    room = world.run.parts.pace.room({}, {}, lambda batches: {})
    left = slack if on_stuck == "wait" else 0
    assert [n for n in range(1, batch + 1) if room.admits("e0", n)] == list(range(1, batch - left + 1))


@pytest.mark.usefixtures("connected")
def test_paced_queues_are_walked_by_age_of_the_policy() -> None:
    """So that older work goes first; with drop, what came first goes first."""

    def refuse(group: Group, n: int) -> tuple[Group, Group]:
        raise AssertionError("nothing is split here")

    for mode, first in (("pace", "new arrival, old version"), ("drop", "old arrival, new version")):
        made = config(staleness={"mode": mode}, batch={"size": 1})
        buffer: Any = build_buffer(settings_of(made), refuse)
        buffer.add("old arrival, new version", env="r", size=1, version=2)
        buffer.add("new arrival, old version", env="r", size=1, version=1)
        assert buffer.take() == [first]


@pytest.mark.usefixtures("connected")
def test_the_identity_of_a_run_is_what_decides_its_tasks() -> None:
    """The seed, and of each env id, split, number of tasks, arguments and curriculum; a split in the id is told once."""
    made = config(
        seed=7,
        train={
            "env": [
                {"id": "reverse@hard", "name": "a", "ratio": 1.0, "args": {"length": 3}},
                {"id": ["reverse", "agree"], "name": "b", "ratio": 1.0},
            ]
        },
    )
    identity = blueprint.build_identity(made, env_blueprint.build_train_envs(made))
    assert identity.seed == 7
    curriculum = {"strategy": "uniform", "options": {}, "explore": 0.05, "reward_range": [0.0, 1.0]}
    assert identity.envs["a"] == EnvIdentity(
        "reverse", "hard", 100, digest_of({"length": 3}), {"0": 5}, curriculum
    )
    assert identity.envs["b"].id == "reverse, agree"


def test_trackers_see_the_configuration_without_what_is_secret() -> None:
    """Names of variables stay, since they are only names; arguments that are called a secret and credentials do not."""
    made = config(
        local=None,
        inference={"base_urls": ["http://user:sesame@10.0.0.7:8000/v1"], "api_key_env": "MY_KEY"},
        http={"token_env": "HTTP_TOKEN"},
        train={
            "sampling": {"max_tokens": 16},
            "env": [
                {
                    "id": "reverse",
                    "args": {"judge": {"api_key": "sesame", "OPENAI_API_KEY": "sesame"}, "length": 4},
                }
            ],
        },
        track={"use": ["m:T"], "options": {"m:T": {"token": "sesame", "url": "https://a:sesame@b/c"}}},
    )
    shown = track_blueprint.shown_config(made)
    assert "sesame" not in str(shown)
    assert shown["inference"]["base_urls"] == ["http://10.0.0.7:8000/v1"]
    assert shown["inference"]["api_key_env"] == "MY_KEY"
    assert shown["http"]["token_env"] == "HTTP_TOKEN"
    assert shown["train"]["sampling"] == {"max_tokens": 16}
    assert shown["train"]["env"][0]["args"]["length"] == 4
    assert shown["track"]["options"]["m:T"]["url"] == "https://b/c"


def test_what_trackers_are_made_with_is_below_the_run_directory() -> None:
    """Unless the configuration says otherwise; unset settings are left to the library."""
    made = config(run_dir="runs/one", track={"use": [], "wandb": {"project": "p", "tags": ["a"]}})
    options = track_blueprint.tracker_options(made, "wandb")
    directory = str(Path("runs/one").resolve())
    assert options == {"name": "one", "project": "p", "tags": ["a"], "directory": directory}
    assert track_blueprint.tracker_options(made, "tensorboard") == {"directory": f"{directory}/tensorboard"}


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    ("tables", "sections", "ratios", "why"),
    [
        ([{"ratio": 1.0}, {"ratio": 1.0}], {}, {"e0": 0.0, "e1": 0.0}, "every ratio is 0"),
        ([{}, {}], {}, {"e0": 1.0}, "either every env sets a ratio or none does"),
        ([{"ratio": 1.0, "min_batch_allocation": 0.2}, {"ratio": 1.0}], {}, {"e0": 0.0}, "its ratio is 0"),
        (
            [{"ratio": 1.0, "group_size": 12}, {"ratio": 1.0, "group_size": 4}],
            {"batch": {"size": 16, "quotas": True, "on_starved": "wait", "on_stuck": "wait"}},
            {"e1": 0.0},
            "batch.size: no number of whole groups of 12 ever sums to 16",
        ),
    ],
)
def test_ratios_of_a_running_run_are_checked_like_those_of_a_configuration(
    tables: list[dict[str, Any]], sections: dict[str, Any], ratios: dict[str, float], why: str
) -> None:
    """With minimums, quotas and sizes; the ones that hold are not touched."""
    envs = [{"id": "reverse", "name": f"e{i}", **table} for i, table in enumerate(tables)]
    made = config(train={"env": envs}, **sections)
    changeable = settings_of(made).changeable
    with pytest.raises(ConfigError, match=why):
        changeable.targets(ratios)
    assert changeable.ratios == {
        name: table.get("ratio") for name, table in zip(["e0", "e1"], tables, strict=True)
    }


@pytest.mark.usefixtures("connected")
def test_a_ratio_counts_within_its_domain() -> None:
    """As it does in a configuration that gives targets by domain."""
    envs = [{"id": "reverse", "name": f"e{i}", "ratio": 1.0} for i in range(3)]
    domains = {"e0": 0.5, "e1": 0.25, "e2": 0.25}
    made = config(train={"env": envs}, mix={"domains": domains})
    assert settings_of(made).changeable.targets({"e0": 7.0}) == pytest.approx(domains)


@pytest.mark.parametrize(
    ("inference", "version", "path", "said"),
    [
        (
            {"weight_update": "vllm"},
            0,
            None,
            "started with, and nobody can load that .* name inference.initial_weights",
        ),
        ({"weight_update": "vllm"}, 3, None, "published without a path; choose a later step"),
        ({}, 3, "/nowhere", "is not a folder"),
        ({"check_weights": False}, 3, "/nowhere", ""),
        ({"weight_update": "vllm", "initial_weights": "trainer"}, 0, None, ""),
        ({"weight_update": "vllm_lora"}, 0, None, ""),
        ({"weight_update": "none"}, 3, None, ""),
    ],
)
def test_why_a_run_cannot_be_set_back_to_a_version(
    inference: dict[str, Any], version: int, path: str | None, said: str
) -> None:
    """Said before anything is given up: what no engine can be brought back to, and what is not there any more."""
    made = config(local=None, inference={"base_urls": ["http://127.0.0.1:1/v1"], **inference})
    found = inference_blueprint.flaw_finder(made)(version, path)
    assert re.search(said, found) if said else not found


def test_later_versions_in_the_watched_directory_stand_in_the_way_of_a_rewind(tmp_path: Path) -> None:
    """They would count again at once, though they come from what is to be given up."""
    made = config(trainer={"versions_dir": str(tmp_path)})
    for version in (2, 5):
        (tmp_path / f"step_{version}").mkdir()
        (tmp_path / f"step_{version}" / "STABLE").touch()
    assert "step_5 would count again" in inference_blueprint.flaw_finder(made)(2, None)
    assert inference_blueprint.flaw_finder(made)(5, None) == ""
