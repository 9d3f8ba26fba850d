"""Configuration: what is accepted, who wins, and what every mistake is told, with its TOML path."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.addresses import is_loopback
from orchestrator.buffer.minimums import reachable_sums
from orchestrator.config import Config, find_warnings, load_config
from orchestrator.config.reference import describe_type, render_reference
from orchestrator.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))

BASE = """
[local]

[batch]
size = 32

[[train.env]]
name = "a"
id = "builtin::reverse"
ratio = 0.5

[[train.env]]
name = "b"
id = "builtin::agree"
ratio = 0.5
"""


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ORCHESTRATOR__"):
            monkeypatch.delenv(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that can be run."""
    return written(tmp_path, BASE)


DOMAINS = """
[local]

[domains.math]
rollout = "tests.adapters.test_domains:solve"
dataset = "tests.adapters.test_domains:problems"

[mix.domains]
math = 0.6
reverse = 0.4

[[train.env]]
id = "math::gsm"
ratio = 3

[[train.env]]
id = ["math::aime@2024", "math::aime@2025"]
ratio = 1

[[train.env]]
name = "reverse"
id = "builtin::reverse"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """What is wrong, by TOML path."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"{path}: {len(lines)} problem")
    return dict(line.strip().partition(" (set by ")[0].split(": ", 1) for line in lines)


class TestAccepted:
    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
    def test_every_shipped_file_loads_and_says_what_it_is_for(self, path: Path) -> None:
        """A configuration in configs/ can be used as it is, and its first line is a comment about it."""
        config = load_config(path)
        assert find_warnings(config.model_dump()) == []
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("# ")
        assert first.endswith(".")

    def test_the_name_of_an_env_defaults_to_its_id(self, tmp_path: Path) -> None:
        """An env without a name is known by its id."""
        config = load_config(written(tmp_path, '[local]\n[[train.env]]\nid = "builtin::reverse"\n'))
        assert [env.label for env in config.train.env] == ["builtin::reverse"]

    def test_a_config_never_changes(self, path: Path) -> None:
        """What was validated is what runs."""
        config = load_config(path)
        with pytest.raises(ValueError, match="frozen"):
            config.seed = 1  # type: ignore[misc]  # that it cannot be set is the point
        with pytest.raises(ValueError, match="frozen"):
            config.batch.size = 1  # type: ignore[misc]  # same

    def test_the_same_env_may_train_and_evaluate(self, path: Path) -> None:
        """Names are unique within a table, not over both."""
        text = path.read_text() + '[[eval.env]]\nname = "a"\nid = "builtin::reverse@eval"\n'
        path.write_text(text)
        assert load_config(path).eval.env[0].label == "a"


class TestWhoWins:
    def test_a_variable_wins_over_the_file(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """ORCHESTRATOR__BATCH__SIZE replaces batch.size and leaves the rest of the table alone."""
        path.write_text(BASE.replace("size = 32", 'size = 32\non_stuck = "split"'))
        monkeypatch.setenv("ORCHESTRATOR__BATCH__SIZE", "64")
        batch = load_config(path).batch
        assert (batch.size, batch.on_stuck) == (64, "split")

    def test_the_command_line_wins_over_a_variable(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """--batch.size has the last word."""
        monkeypatch.setenv("ORCHESTRATOR__BATCH__SIZE", "64")
        assert load_config(path, ["--batch.size", "128"]).batch.size == 128

    def test_a_variable_may_hold_a_whole_table(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A table is given as JSON."""
        monkeypatch.setenv("ORCHESTRATOR__TRAIN__SAMPLING", '{"temperature": 0.5}')
        assert load_config(path).train.sampling == {"temperature": 0.5}

    @pytest.mark.parametrize(
        ("words", "found"),
        [
            (["--seed", "7"], lambda config: config.seed == 7),
            (["--seed=7"], lambda config: config.seed == 7),
            (["--max-steps", "3"], lambda config: config.max_steps == 3),
            (["--run_dir", "runs/other"], lambda config: config.run_dir == Path("runs/other")),
            (["--log.level", "debug"], lambda config: config.log.level == "debug"),
            (["--http.enabled", "false"], lambda config: config.http.enabled is False),
            (["--train.env.b.ratio", "0.25"], lambda config: config.train.env[1].ratio == 0.25),
            (["--train.env.0.ratio", "0.75"], lambda config: config.train.env[0].ratio == 0.75),
            (
                ["--train.env.a.sampling.max_tokens", "9"],
                lambda config: config.train.env[0].sampling == {"max_tokens": 9},
            ),
            (
                ["--train.sampling", "{ temperature = 0.2 }"],
                lambda config: config.train.sampling == {"temperature": 0.2},
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_anything_can_be_overridden(
        self, path: Path, words: list[str], found: Callable[[Config], bool]
    ) -> None:
        """An override names a key by its path, an env by its name or position, and a value as TOML or as text."""
        assert found(load_config(path, words))

    def test_the_last_override_wins(self, path: Path) -> None:
        """Repeating one is no mistake."""
        assert load_config(path, ["--seed", "1", "--seed", "2"]).seed == 2


class TestMistakes:
    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        """A file that is not there is an error, not an empty configuration."""
        with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file"):
            load_config(tmp_path / "nowhere.toml")

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        """Whatever cannot be read is reported in one line."""
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path)

    def test_bad_toml_is_located(self, tmp_path: Path) -> None:
        """The line and column of a syntax error are told."""
        with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1, column"):
            load_config(written(tmp_path, "seed = = 1"))

    @pytest.mark.parametrize(
        ("text", "where", "what"),
        [
            ("sede = 1\n", "sede", 'unknown key; did you mean "seed"?'),
            ("[batch]\nsise = 3\n", "batch.sise", 'unknown key; did you mean "size"?'),
            ("[jurnal]\n", "jurnal", 'unknown key; did you mean "journal"?'),
            ("[model]\nxyz = 3\n", "model.xyz", "unknown key; known here: name"),
        ],
    )
    def test_an_unknown_key_is_told_the_nearest(
        self, tmp_path: Path, text: str, where: str, what: str
    ) -> None:
        """A misspelt key, at any depth, is an error that names the valid one."""
        base = BASE.replace("[batch]\nsize = 32\n", "") if "[batch]" in text else BASE
        assert problems(written(tmp_path, text + base)) == {where: what}

    def test_an_unknown_key_of_an_env_is_told_with_its_position(self, tmp_path: Path) -> None:
        """The path of a key in a list of tables has the table's index."""
        text = BASE.replace('name = "b"', 'name = "b"\nratoi = 1')
        assert problems(written(tmp_path, text)) == {
            "train.env[1].ratoi": 'unknown key; did you mean "ratio"?'
        }

    @pytest.mark.parametrize(
        ("override", "where", "what"),
        [
            ("--batch.size=many", "batch.size", "should be a valid integer"),
            ("--batch.size=0", "batch.size", "greater than or equal to 1"),
            ("--seed=[1]", "seed", "should be a valid integer"),
            ("--train.env.a.ratio=-1", "train.env[0].ratio", "greater than or equal to 0"),
            ("--train.env.a.ratio=nan", "train.env[0].ratio", "finite"),
            ("--train.env.a.min_batch_allocation=1.5", "train.env[0].min_batch_allocation", "less than or equal to 1"),
            ("--staleness.mode=hope", "staleness.mode", "'pace' or 'drop'"),
            ("--http.port=70000", "http.port", "less than or equal to 65535"),
            ("--train.env=[]", "train.env", "at least 1 item"),
            ("--train=3", "train", "should be a table (got 3)"),
            ("--local=3", "local", "should be a table (got 3)"),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_told_with_what_was_given(
        self, path: Path, override: str, where: str, what: str
    ) -> None:
        """Type and range are checked, and the message shows the value."""
        found = problems(path, override)[where]
        assert what in found
        assert "(got " in found

    def test_a_required_key_is_missed(self, tmp_path: Path) -> None:
        """What has no default must be there."""
        assert problems(written(tmp_path, "[local]\n")) == {"train": "is required"}
        assert problems(written(tmp_path, "[local]\n[[train.env]]\nratio = 1\n")) == {
            "train.env[0].id": "is required"
        }

    def test_duplicate_names_are_told_apart(self, path: Path) -> None:
        """Two envs of one table cannot share a name."""
        assert problems(path, "--train.env.b.name=a") == {
            "train.env[1].name": '"a" is already the name of train.env[0]; give one of them another name'
        }

    def test_an_id_that_is_a_name_already_counts_as_one(self, tmp_path: Path) -> None:
        """An unnamed env's id is its name."""
        env = '[[train.env]]\nid = "builtin::reverse"\n'
        assert list(problems(written(tmp_path, f"[local]\n{env}{env}"))) == ["train.env[1].name"]

    def test_some_but_not_all_envs_with_a_ratio(self, tmp_path: Path) -> None:
        """Ratios are set for every env or for none, and those without one are named."""
        text = BASE.replace('id = "builtin::agree"\nratio = 0.5', 'id = "builtin::agree"')
        assert problems(written(tmp_path, text)) == {
            "train.env": "either every env sets a ratio or none does; missing in train.env[1]"
        }

    def test_ratios_that_are_all_zero(self, path: Path) -> None:
        """One env at least must be picked."""
        found = problems(path, "--train.env.a.ratio=0", "--train.env.b.ratio=0.0")
        assert found == {"train.env": "every ratio is 0, so no env could ever be picked"}

    def test_targets_by_domain_are_for_the_domains_of_the_envs(self, tmp_path: Path) -> None:
        """For every one of them, and for no other; an env without a domain is one of its own."""
        text = DOMAINS.replace("reverse = 0.4", "maths = 0.4")
        assert problems(written(tmp_path, text)) == {
            "mix.domains.maths": 'no train env is of this domain; did you mean "math"?',
            "mix.domains": 'there is no target for domain "reverse" (train.env[2]); give every domain one, or none',
        }

    @pytest.mark.parametrize("value", ["0", "-1", "true", "inf", '"much"'])
    def test_a_target_of_a_domain_is_a_positive_number(self, tmp_path: Path, value: str) -> None:
        """Whoever wants nothing of a domain leaves its envs out."""
        text = DOMAINS.replace("math = 0.6", f"math = {value}")
        assert "mix.domains.math" in problems(written(tmp_path, text))

    def test_ratios_are_compared_within_a_domain(self, tmp_path: Path) -> None:
        """Every env of a domain has one or none does, and one of them is above 0."""
        path = written(tmp_path, DOMAINS)
        assert problems(written(tmp_path, DOMAINS.replace("ratio = 1\n", "")))["train.env"] == (
            'either every env of domain "math" sets a ratio or none does; missing in train.env[1]'
        )
        path = written(tmp_path, DOMAINS)
        found = problems(path, "--train.env.0.ratio=0", "--train.env.1.ratio=0")
        assert found == {
            "train.env": 'every ratio of domain "math" is 0, so no env of domain "math" could ever be picked'
        }

    def test_a_group_that_does_not_fit_into_the_batch(self, path: Path) -> None:
        """The setting that is too large is named: the table's for all envs, or an env's own."""
        assert problems(path, "--train.group_size=64") == {
            "train.group_size": "a group of 64 does not fit into a batch of 32"
        }
        assert problems(path, "--train.env.b.group_size=33") == {
            "train.env[1].group_size": "a group of 33 does not fit into a batch of 32"
        }

    def test_group_sizes_that_never_sum_to_the_batch(self, path: Path) -> None:
        """A batch that no number of whole groups can fill would be waited for without end."""
        sizes = ["--train.env.a.group_size=6", "--train.env.b.group_size=9", "--batch.size=32"]
        found = problems(path, *sizes, "--batch.on_stuck=wait")
        assert found == {
            "batch.size": "no number of whole groups of 6, 9 ever sums to 32; change batch.size or group_size"
        }

    def test_groups_that_may_shrink_or_be_split_fill_any_batch(self, path: Path) -> None:
        """With min_valid or on_stuck = "split" sizes are not fixed, so there is nothing to complain about."""
        assert load_config(path, ["--batch.size=33", "--dispatch.min_valid=2", "--batch.on_stuck=wait"])
        assert load_config(path, ["--batch.size=33", "--batch.on_stuck=split"])

    def test_values_from_variables_are_seen_together_with_the_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A batch size from a variable, which is text at first, is held against the file's group sizes."""
        monkeypatch.setenv("ORCHESTRATOR__BATCH__SIZE", "4")
        assert problems(path) == {"train.group_size": "a group of 8 does not fit into a batch of 4"}

    def test_min_valid_beyond_the_smallest_group(self, path: Path) -> None:
        """No group could ever be kept."""
        assert problems(path, "--dispatch.min_valid=9") == {
            "dispatch.min_valid": "9 is more than the smallest group has (8)"
        }

    def test_no_inference_server(self, tmp_path: Path) -> None:
        """Something has to answer: an address or the built-in server."""
        found = problems(written(tmp_path, BASE.replace("[local]", "")))
        assert "no inference server is named" in found["inference.base_urls"]

    def test_two_kinds_of_inference_server(self, path: Path) -> None:
        """[local] starts its own server, so no other can be named."""
        found = problems(path, '--inference.base_urls=["http://127.0.0.1:8000/v1"]')
        assert "remove one of the two" in found["inference.base_urls"]

    def test_a_source_may_stand_alone_or_among_addresses(self, tmp_path: Path) -> None:
        """A text is a list of one; listed servers and sources go together."""
        text = BASE.replace("[local]", '[inference]\nbase_urls = "dns+http://vllm:8000/v1"')
        assert load_config(written(tmp_path, text)).inference.base_urls == ["dns+http://vllm:8000/v1"]
        mixed = '["tcp://127.0.0.1:7000", "file:servers.txt", "dns+tcp://localhost:7000"]'
        text = BASE.replace('id = "builtin::reverse"', f'id = "builtin::reverse"\naddresses = {mixed}')
        assert text != BASE
        assert len(load_config(written(tmp_path, text)).train.env[0].addresses) == 3

    def test_a_source_that_cannot_be_meant(self, tmp_path: Path) -> None:
        """Each is told at its place: another kind of server, no port, the same one twice, a wire that anybody can read."""
        sources = '["dns+tcp://a:7000", "dns+http://a/v1", "dns+https://a:8/v1", "file:x", "file:x"]'
        text = BASE.replace("[local]", f"[inference]\nbase_urls = {sources}")
        found = problems(written(tmp_path, text))
        assert list(found) == [f"inference.base_urls[{number}]" for number in (0, 1, 2, 4)]
        assert "dns+http://" in found["inference.base_urls[0]"]
        assert "named twice" in found["inference.base_urls[4]"]
        text = BASE.replace(
            'id = "builtin::reverse"', 'id = "builtin::reverse"\naddresses = "dns+tcp://envs:7000"'
        )
        assert "insecure = true" in problems(written(tmp_path, text))["train.env[0].addresses"]
        assert load_config(written(tmp_path, text), ["--train.env.0.insecure", "true"])

    def test_an_inference_address_without_its_scheme(self, tmp_path: Path) -> None:
        """An address must say http:// or https://, and the list item is named."""
        text = BASE.replace("[local]", '[inference]\nbase_urls = ["http://a/v1", "b:8000/v1"]')
        assert list(problems(written(tmp_path, text))) == ["inference.base_urls[1]"]

    def test_ranks_that_cannot_share_a_batch(self, path: Path) -> None:
        """Each rank gets the same number of sequences."""
        assert problems(path, "--trainer.world_size=3") == {
            "trainer.world_size": "a batch of 32 cannot be shared equally by 3 ranks"
        }

    def test_a_run_that_restarts_by_itself_must_be_found_again(self, path: Path) -> None:
        """A trainer that may have it set back knows one address."""
        allowed = "--trainer.allow_rewind=true"
        assert (
            "name a port other than 0"
            in problems(path, allowed, "--trainer.bind=tcp://127.0.0.1:0")["trainer.bind"]
        )
        assert load_config(path, [allowed, "--trainer.bind=tcp://127.0.0.1:5600"]).trainer.allow_rewind

    @pytest.mark.parametrize(
        ("overrides", "where", "remedy"),
        [
            (["--http.host=0.0.0.0"], "http.host", ["--http.token_env=TOKEN"]),
            (["--http.host=::"], "http.host", ["--http.token_env=TOKEN"]),
            (["--trainer.bind=tcp://*:5555"], "trainer.bind", ["--trainer.insecure=true"]),
            (["--trainer.bind=tcp://10.0.0.7:5555"], "trainer.bind", ["--trainer.insecure=true"]),
            (
                ['--train.env.a.addresses=["tcp://10.0.0.7:7000"]'],
                "train.env[0].addresses",
                ["--train.env.a.insecure=true"],
            ),
        ],
    )
    def test_reaching_beyond_this_machine_must_be_meant(
        self, path: Path, overrides: list[str], where: str, remedy: list[str]
    ) -> None:
        """Off loopback, HTTP needs a token and links need keys or an explicit word."""
        assert list(problems(path, *overrides)) == [where]
        assert load_config(path, [*overrides, *remedy])

    def test_everything_is_reported_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mistakes of the file, of variables and of the command line come in one list."""
        monkeypatch.setenv("ORCHESTRATOR__JOURNAL__COMMIT_BYTES", "lots")
        text = BASE.replace('name = "b"', 'name = "a"\nworkers = 0').replace("size = 32", "sise = 32")
        found = problems(written(tmp_path, text), "--train.group_size", "300", "--trainer.wrold_size=2")
        assert found.keys() == {
            "batch.sise",
            "journal.commit_bytes",
            "train.env[1].name",
            "train.env[1].workers",
            "train.group_size",
            "trainer.wrold_size",
        }

    @pytest.mark.parametrize(
        ("words", "where", "what"),
        [
            (["--batch.size"], "--batch.size", "has no value"),
            (["batch.size=3"], "batch.size=3", "expected an override such as --batch.size 64"),
            (["--train.env.c.ratio=1"], "train.env.c.ratio", 'there is no item "c"; there are: a, b'),
            (["--run_dir.x=1"], "run_dir.x", "cannot be set: it is not inside a table"),
            (["--run_dir.x.y=1"], "run_dir.x.y", "cannot be set: it is not inside a table"),
            (["--train.env.0=1"], "train.env.0", "cannot be set: it is not inside a table"),
        ],
    )
    def test_an_override_that_makes_no_sense(
        self, path: Path, words: list[str], where: str, what: str
    ) -> None:
        """A slip on the command line is one of the problems, never a traceback."""
        path.write_text('run_dir = "runs/x"\n' + BASE)
        assert problems(path, *words) == {where: what}

    @pytest.mark.parametrize(
        ("name", "value", "where", "what"),
        [
            ("ORCHESTRATOR__BTCH__SIZE", "1", "ORCHESTRATOR__BTCH__SIZE", 'did you mean "batch"?'),
            ("ORCHESTRATOR__BATCH__SISE", "1", "batch.sise", 'did you mean "size"?'),
            ("ORCHESTRATOR__BATCH__SIZE", "x", "batch.size", "valid integer"),
            ("ORCHESTRATOR__TRAIN", "{", "ORCHESTRATOR__TRAIN", "train is a table, given as JSON"),
        ],
    )
    def test_a_variable_that_makes_no_sense(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, where: str, what: str
    ) -> None:
        """A slip in a variable is one of the problems too, and is not ignored."""
        monkeypatch.setenv(name, value)
        assert what in problems(path)[where]


class TestBreaker:
    def test_its_settings_are_a_table_or_false(self, path: Path) -> None:
        """[mix.breaker] is what the mix is built with; false turns it off."""
        arguments = load_config(
            path, ["--mix.breaker.trip=0.05", "--mix.options={ gain = 0.5 }"]
        ).mix.arguments()
        assert arguments == {
            "gain": 0.5,
            "breaker": {"trip": 0.05, "restore": 0.25, "probe": 0.05, "window": 64},
        }
        assert load_config(path, ["--mix.breaker=false"]).mix.arguments() == {"breaker": False}
        assert load_config(path, ["--mix.breaker=true"]).mix == load_config(path).mix

    def test_they_are_still_taken_from_the_options(self, path: Path) -> None:
        """Where they stood before they had a table, but not in both places."""
        options = "--mix.options={ breaker = { window = 9 } }"
        assert load_config(path, [options]).mix.arguments() == {"breaker": {"window": 9}}
        assert problems(path, options, "--mix.breaker.trip=0.05") == {
            "mix.options.breaker": "is set in [mix.breaker] too; remove one of the two"
        }

    @pytest.mark.parametrize(
        ("override", "where", "what"),
        [
            ("--mix.breaker.tripp=1", "mix.breaker.tripp", 'did you mean "trip"?'),
            ("--mix.breaker.probe=0", "mix.breaker.probe", "greater than 0"),
            ("--mix.breaker.trip=0.5", "mix.breaker.trip", "0.5 is above restore (0.25)"),
            ("--mix.breaker=3", "mix.breaker", "should be a table (got 3)"),
            ("--mix.breaker.window=true", "mix.breaker.window", "should be a number (got True)"),
        ],
    )
    def test_mistakes_have_their_path(self, path: Path, override: str, where: str, what: str) -> None:
        """Like in every other table."""
        assert what in problems(path, override)[where]


def test_an_env_may_have_its_own_limits_and_its_own_word_on_its_minimum(tmp_path: Path) -> None:
    """Attempts and timeouts of training and evaluation envs; unset, those of [dispatch] hold."""
    own = "max_attempts = 1\nrollout_timeout_s = 5\ngroup_timeout_s = 9\n"
    text = f'{BASE}{own}on_unmet_minimum = "wait"\n[[eval.env]]\nid = "reverse"\n{own}'
    config = load_config(written(tmp_path, text))
    first, second = config.train.env
    for env in (second, config.eval.env[0]):
        assert (env.max_attempts, env.rollout_timeout_s, env.group_timeout_s) == (1, 5, 9)
    assert (first.max_attempts, first.rollout_timeout_s, first.group_timeout_s) == (None, None, None)
    assert (first.on_unmet_minimum, second.on_unmet_minimum) == ("waive", "wait")


class TestWarnings:
    def test_minimums_over_the_whole_are_scaled(self, path: Path) -> None:
        """They can still be run, so it is a warning, with the sum."""
        overrides = ["--train.env.a.min_batch_allocation=0.9", "--train.env.b.min_batch_allocation=0.6"]
        config = load_config(path, ["--dispatch.max_inflight=32", "--train.group_size=1", *overrides])
        assert find_warnings(config.model_dump()) == [
            ("train.env", "minimums sum to 150%; they are scaled down to 100 %")
        ]

    def test_minimums_of_exactly_the_whole_are_fine(self, path: Path) -> None:
        """The sum is exact: ten times 0.1 is not more than 1."""
        tenths = "".join(
            f'[[train.env]]\nname = "e{i}"\nid = "builtin::agree"\nmin_batch_allocation = 0.1\n'
            for i in range(10)
        )
        path.write_text(f"[local]\n[train]\ngroup_size = 1\n{tenths}")
        assert find_warnings(load_config(path).model_dump()) == []

    def test_a_limit_that_pacing_never_reaches(self, path: Path) -> None:
        """More in flight than may be under way at all is worth a word."""
        found = find_warnings(load_config(path, ["--dispatch.max_inflight=97"]).model_dump())
        assert [where for where, _ in found] == ["dispatch.max_inflight"]
        assert find_warnings(load_config(path, ["--dispatch.max_inflight=96"]).model_dump()) == []

    def test_warnings_come_together(self, path: Path) -> None:
        """One does not hide another."""
        overrides = ["--train.env.a.min_batch_allocation=0.9", "--train.env.b.min_batch_allocation=0.6"]
        config = load_config(path, ["--dispatch.max_inflight=97", "--train.group_size=1", *overrides])
        assert [where for where, _ in find_warnings(config.model_dump())] == [
            "train.env",
            "dispatch.max_inflight",
        ]


@pytest.mark.parametrize(
    ("sizes", "total", "expected"),
    [({8}, 32, True), ({6, 9}, 32, False), ({6, 9}, 33, True), ({7}, 8, False), ({3, 5}, 7, False), ({1}, 1, True)],
)  # fmt: skip
def test_reachable_sums(sizes: set[int], total: int, expected: bool) -> None:
    """A total is reachable if and only if some multiset of the sizes sums to it."""
    named = {str(size): size for size in sizes}
    assert bool(reachable_sums(named, total) >> total & 1) is expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("tcp://127.0.0.2:7000", True),
        ("file:///tmp/x", True),
        ("tcp://[::ffff:10.0.0.7]:7000", False),
        ("localhost", True),
        ("::1", True),
        ("tcp://[::1]:5555", True),
        ("tcp://127.0.0.1:0", True),
        ("ipc:///tmp/x", True),
        ("0.0.0.0", False),
        ("tcp://*:5555", False),
        ("tcp://[::]:5555", False),
        ("127.example.org", False),
        ("localhost.example.org", False),
        ("[", False),
        ("", False),
    ],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    """Only what cannot leave this machine counts as loopback; a name that merely looks like it does not."""
    assert is_loopback(address) is expected


class TestReference:
    def test_the_written_reference_is_up_to_date(self) -> None:
        """docs/configuration.md is what the docstrings say now."""
        written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
        assert written == render_reference(), "run `make docs`"

    def test_every_field_says_what_it_is_for(self) -> None:
        """A field without a docstring would be an empty cell."""
        rows = [line for line in render_reference().splitlines() if line.startswith("| `")]
        assert len(rows) > 80
        assert all(cell.strip() for row in rows for cell in row.replace("\\|", "").strip("|").split("|"))

    def test_types_are_given_in_words_with_their_bounds(self) -> None:
        """Nobody needs to read Python to write a configuration."""
        field = Config.model_fields["max_steps"]
        assert describe_type(field.annotation, field.metadata) == "integer ≥ 1"
