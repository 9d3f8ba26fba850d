"""Whatever a file, a variable or the command line says: a configuration, or one error that lists the problems."""

import copy
import json
import math
import os
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.cli import main
from orchestrator.config import find_warnings, load_config
from orchestrator.errors import ConfigError

ROOT = Path(__file__).parents[2]
BASES = [
    tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "configs").glob("*.toml"))
]
SMALL: dict[str, Any] = {
    "local": {},
    "batch": {"size": 32},
    "train": {
        "env": [{"name": "a", "id": "reverse", "ratio": 0.5}, {"name": "b", "id": "agree", "ratio": 1}]
    },
}

# A loaded machine takes several times as long for these as an idle one.
pytestmark = pytest.mark.timeout(600)

bounded = settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ORCHESTRATOR__"):
            monkeypatch.delenv(name)


def to_toml(value: Any) -> str:
    """A value as TOML writes it inside a line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{text(key)} = {to_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return repr(value)
    return hex(value) if isinstance(value, int) and abs(value) > 2**63 else str(value)


def text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_or_refuse(path: Path, overrides: list[str]) -> None:
    """Load as `check` does; only a ConfigError may come out."""
    try:
        config = load_config(path, overrides)
    except ConfigError:
        return
    find_warnings(config.model_dump())
    json.dumps(config.model_dump(mode="json"))


junk = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(),
        st.sampled_from([0, 1, 7, 10**6, 10**11, 2**63 - 1, 16**900, -(10**40)]),
        st.floats(),
        st.sampled_from([0.1, 0.33, 1e11, math.inf, math.nan]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
        st.sampled_from(["", "reverse", "math::gsm", "a", "::", "wait", "split", "tokens", "\0", date(2024, 1, 1)]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "env", "size", "é"]), inner),
    max_leaves=5,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every table or list inside, with each of its keys or positions."""
    if isinstance(value, dict):
        return [(value, key) for key in value] + [p for inner in value.values() for p in places(inner)]
    if isinstance(value, list):
        return [(value, at) for at in range(len(value))] + [p for inner in value for p in places(inner)]
    return []


KEYS = [
    "size", "unit", "quotas", "on_starved", "on_stuck", "max_buffered", "group_size", "min_batch_allocation",
    "ratio", "name", "id", "sampling", "args", "addresses", "server_key_file", "breaker", "options", "strategy",
    "min_valid", "world_size", "base_urls", "host", "bind", "run_dir", "seed", "_env_file", "_cli_parse_args",
    "self", "local", "domains", "env", "rollout", "trip", "max_versions", "mode",
]  # fmt: skip


@bounded
@given(st.sampled_from([SMALL, SMALL, *BASES]), st.data())
def test_a_changed_configuration_loads_or_is_refused_in_one_error(
    tmp_path: Path, base: dict[str, Any], data: st.DataObject
) -> None:
    """Values replaced, removed and added at random, of any type, never end in anything else."""
    changed = copy.deepcopy(base)
    for _ in range(data.draw(st.integers(1, 4))):
        found = places(changed)
        if not found:
            break
        container, key = data.draw(st.sampled_from(found))
        what = data.draw(st.sampled_from(["replace", "remove", "add", "add", "repeat"]))
        if what == "remove":
            del container[key]
        elif what == "replace":
            container[key] = data.draw(junk)
        elif isinstance(container, dict):
            container[data.draw(st.sampled_from(KEYS))] = data.draw(junk)
        else:
            container.append(copy.deepcopy(container[key]) if what == "repeat" else data.draw(junk))
    path = tmp_path / "config.toml"
    lines = [f"{text(key)} = {to_toml(value)}" for key, value in changed.items()]
    path.write_text("\n".join(lines), encoding="utf-8")
    load_or_refuse(path, [])


@settings(bounded, max_examples=400)
@given(st.data())
def test_any_text_is_a_configuration_or_an_error(tmp_path: Path, data: st.DataObject) -> None:
    """A file with characters lost, repeated or replaced is refused in words."""
    source = (ROOT / "configs" / "quickstart.toml").read_text(encoding="utf-8")
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(source)))
        end = data.draw(st.integers(start, min(len(source), start + 30)))
        source = source[:start] + data.draw(st.text(max_size=5)).replace("\ud800", "") + source[end:]
    path = tmp_path / "config.toml"
    path.write_text(source, encoding="utf-8", errors="replace")
    load_or_refuse(path, [])


paths = st.sampled_from(
    ["batch.size", "batch", "train", "train.env", "train.env.0", "train.env.a.name", "seed", "mix.breaker", "local", "", "."]
)  # fmt: skip


@settings(bounded, max_examples=400)
@given(paths, junk.map(to_toml) | st.text(max_size=8))
def test_an_override_of_any_shape_is_taken_or_refused(tmp_path: Path, key: str, value: str) -> None:
    """The command line can hold anything as well."""
    path = tmp_path / "config.toml"
    path.write_text("\n".join(f"{key} = {to_toml(value)}" for key, value in SMALL.items()), encoding="utf-8")
    load_or_refuse(path, [f"--{key}", value])


@settings(bounded, max_examples=400)
@given(
    st.sampled_from(["BATCH", "BATCH__SIZE", "TRAIN", "TRAIN__ENV", "TRAIN__ENV__0", "MIX__BREAKER", "SEED", "", "A"]),
    junk.map(lambda value: json.dumps(value, default=str)) | st.text(st.characters(min_codepoint=1), max_size=8),
)  # fmt: skip
def test_a_variable_of_any_shape_is_taken_or_refused(tmp_path: Path, name: str, value: str) -> None:
    """So can variables."""
    path = tmp_path / "config.toml"
    path.write_text("\n".join(f"{key} = {to_toml(value)}" for key, value in SMALL.items()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        try:
            patch.setenv(f"ORCHESTRATOR__{name}", value)
        except (ValueError, UnicodeEncodeError):  # no such variable can exist
            return
        load_or_refuse(path, [])


BASE = '[local]\n[batch]\nsize = 32\n[[train.env]]\nname = "a"\nid = "reverse"\nratio = 1\n'


@pytest.mark.parametrize(
    ("found", "replacement", "words"),
    [
        ('id = "reverse"', 'id = [["reverse"]]', "train.env[0].id: input should be a valid string"),
        ('id = "reverse"', "id = []", "train.env[0].id: input should be a valid string"),
        ('id = "reverse"', "id = { a = 1 }", "train.env[0].id: input should be a valid string"),
        ('name = "a"', "name = {}", "train.env[0].name: input should be a valid string"),
        ('name = "a"', 'name = ["a"]', "train.env[0].name: input should be a valid string"),
        ("size = 32", f"size = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
        ("size = 32", f"size = 0x{'f' * 5000}", "batch.size: is an integer beyond 64 bits"),
        ("[local]", f"x = {'[' * 5000}{']' * 5000}\n[local]", "nested too deep"),
        ("[local]", f"[model.{'.'.join(['x'] * 5000)}]\n[local]", "nested more than 32 deep"),
        ("size = 32", "size = 1e11", "batch.size: input should be less than or equal to 1000000000"),
        ("size = 32", "size = 1_000_001", "batch.size: a batch has at most 1000000 sequences, not 1000001"),
        ("size = 32", "size = nan", "batch.size: input should be a finite number"),
        ("size = 32", "size = true", "batch.size: input should be a number (got True)"),
        ("ratio = 1", "ratio = inf", "train.env[0].ratio: input should be a finite number"),
        ("ratio = 1", "ratio = true", "train.env[0].ratio: input should be a number (got True)"),
        ("size = 32", "size = 32\nmax_buffered = inf", "batch.max_buffered: input should be a finite number"),
        ("ratio = 1", "ratio = 1\nsampling = { temperature = nan }", "train.env[0].sampling.temperature: input should"),
        ("ratio = 1", "ratio = 1\nsampling = { stop = [2024-01-01] }", "sampling.stop[0]: a date cannot be sent"),
        ("[local]", '[local]\n[inference]\ninitial_weights = "trainer"', "inference.initial_weights: the reference trainer"),
        (
            "[local]",
            '[inference]\nbase_urls = ["http://h/v1"]\nweight_update = "trainer"\ninitial_weights = "/w"',
            'inference.initial_weights: with weight_update = "trainer" nothing is loaded from a folder',
        ),
        (
            "[local]",
            '[inference]\nbase_urls = ["http://h/v1"]\nweight_update = "trainer"\n[trainer]\nversions_dir = "v"',
            'trainer.versions_dir: with weight_update = "trainer" versions are sent by the trainer',
        ),
        (
            "[local]",
            '[inference]\nbase_urls = ["http://h/v1"]\ninitial_weights = "/w"',
            'inference.initial_weights: weight_update = "none" loads no weights',
        ),
        ("ratio = 1", "ratio = 1\naddresses = 5", "train.env[0].addresses: input should be a valid list"),
        ("[local]", '_env_file = "x"\n[local]', "_env_file: unknown key"),
        ("[local]", 'run_dir = "a\\u0000b"\n[local]', "run_dir: holds characters that cannot be encoded"),
    ],
)  # fmt: skip
def test_what_no_setting_can_hold_is_told_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: str, replacement: str, words: str
) -> None:
    """`check` ends with 2 and the path of the value, not with a traceback."""
    path = tmp_path / "config.toml"
    path.write_text(BASE.replace(found, replacement), encoding="utf-8")
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert max(map(len, said.err.splitlines())) < 1000 or "deep" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{ gain = "x" }', 'mix strategy "flow" cannot be made'),
        ("{ breaker = 3 }", "the breaker takes a table"),
        ("{ rng = 1 }", "mix.options.rng: is not an option"),
        ("{ group_sizes = 3 }", "mix.options.group_sizes: is not an option"),
        ("{ strategy = 3 }", "mix.options.strategy: is not an option"),
        ("{ windoww = 3 }", 'did you mean "window"?'),
    ],
)
def test_options_of_a_wrong_shape_are_told_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    """What only the strategy can judge is judged by it, in one line."""
    path = tmp_path / "config.toml"
    path.write_text(BASE, encoding="utf-8")
    assert main(["check", str(path), "--mix.options", options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('strategy = "frontieer"', 'env "a": no curriculum is named "frontieer"'),
        ('strategy = "frontieer"', 'did you mean "frontier"?'),
        ('strategy = "difficulty"\noptions = { easy = 0.5 }', "easy, medium and hard sum to 1.45"),
        (
            'strategy = "difficulty"\noptions = { hard_below = 0.9, easy_above = 0.1 }',
            "must rise in this order",
        ),
        ('strategy = "difficulty"\noptions = { esay = 0.5 }', 'did you mean "easy"?'),
        ("options = { easy = 0.5 }", 'curriculum "uniform" has no options'),
        ('strategy = "frontier"\noptions = { tasks = 3 }', "curriculum.options.tasks: is not an option"),
        ("reward_range = [1, 0]", "curriculum.reward_range: 1.0 is not below 0.0"),
        ("reward_range = [1]", "curriculum.reward_range: list should have at least 2 items"),
        ("explore = 0", "curriculum.explore: input should be greater than 0"),
        ('strategy = "no_such_module:Mine"', "cannot be loaded"),
        ("stratgy = 1", 'curriculum.stratgy: unknown key; did you mean "strategy"?'),
    ],
)
@pytest.mark.parametrize("where", ["[curriculum]", "[train.env.curriculum]"])
def test_a_curriculum_that_cannot_be_is_told_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, table: str, words: str
) -> None:
    """For all envs, and in the table of one."""
    path = tmp_path / "config.toml"
    path.write_text(f"{BASE}{where}\n{table}\n", encoding="utf-8")
    assert main(["check", str(path)]) == 2
    assert words in capsys.readouterr().err
