"""A problem names where it came from: the file, a variable or a flag; and says what was probably meant."""

import os
from pathlib import Path

import pytest

from orchestrator.config import load_config
from orchestrator.errors import ConfigError

BASE = """
[local]
[[train.env]]
name = "math"
id = "builtin::reverse"
ratio = 0.5
[[train.env]]
name = "code"
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
    made = tmp_path / "config.toml"
    made.write_text(BASE)
    return made


def refusal(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_a_problem_of_the_file_names_nothing_else(path: Path) -> None:
    """Its TOML path is enough."""
    path.write_text(BASE + "[batch]\nsise = 1\n")
    assert refusal(path) == ['batch.sise: unknown key; did you mean "size"?']


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ORCHESTRATOR__BATCH__SIZE", "many", "batch.size: input should be a valid integer"),
        ("ORCHESTRATOR__BATCH", '{"size": 0}', "batch.size: input should be greater than or equal to 1"),
        ("orchestrator__batch__sise", "1", "batch.sise: unknown key"),
        ("ORCHESTRATOR__HTTP__HOST", "0.0.0.0", 'http.host: "0.0.0.0" is reachable from other machines'),
    ],
)  # fmt: skip
def test_a_problem_of_a_variable_names_the_variable(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    """Also where it only shows when settings are seen together."""
    monkeypatch.setenv(name, value)
    (line,) = refusal(path)
    assert line.startswith(words)
    assert line.endswith(f"(set by {name})")


def test_a_variable_for_one_setting_wins_over_one_for_its_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of their names."""
    monkeypatch.setenv("ORCHESTRATOR__BATCH__SIZE", "64")
    monkeypatch.setenv("ORCHESTRATOR__BATCH", '{"size": 32, "quotas": true}')
    batch = load_config(path).batch
    assert (batch.size, batch.quotas) == (64, True)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--train.env.code.ratio=x", "train.env[1].ratio: input should be a valid number"),
        ("--train.env.1.group-size=0", "train.env[1].group_size: input should be greater than or equal to 1"),
        ("--train.env.maths.ratio=1", 'train.env.maths.ratio: there is no item "maths"; did you mean "math"?'),
        ("--train.env.words.ratio=1", 'train.env.words.ratio: there is no item "words"; there are: code, math'),
    ],
)  # fmt: skip
def test_a_problem_of_a_flag_names_the_flag(path: Path, flag: str, words: str) -> None:
    """As it was typed; an env by its name, where the path has its position."""
    (line,) = refusal(path, flag)
    assert line.startswith(words)
    assert line.endswith(f"(set by {flag.partition('=')[0]})")


def test_a_flag_wins_over_a_variable_in_the_message_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose value was used is the one to mend."""
    monkeypatch.setenv("ORCHESTRATOR__BATCH__SIZE", "64")
    (line,) = refusal(path, "--batch.size=none")
    assert line.endswith("(set by --batch.size)")


def test_an_empty_path_is_not_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a shell variable that is not set is refused, wherever it stands; "." is taken."""
    path.write_text(f'run_dir = ""\n{BASE}')
    (line,) = refusal(path)
    assert line.startswith("run_dir: is empty")
    path.write_text(BASE)
    for flag in ("run_dir", "trainer.directory"):
        (line,) = refusal(path, f"--{flag}", "")
        assert line.startswith(f"{flag}: is empty")
        assert line.endswith(f"(set by --{flag})")
    monkeypatch.setenv("ORCHESTRATOR__RUN_DIR", "")
    (line,) = refusal(path)
    assert line.endswith("(set by ORCHESTRATOR__RUN_DIR)")
    monkeypatch.setenv("ORCHESTRATOR__RUN_DIR", ".")
    assert load_config(path).run_dir == Path()


@pytest.mark.parametrize("table", ["train", "eval"])
def test_one_bracket_where_two_are_meant(path: Path, table: str) -> None:
    """A single table is not a list of them."""
    text = BASE if table == "eval" else "[local]\n"
    path.write_text(f'{text}[{table}.env]\nname = "x"\nid = "builtin::reverse"\n')
    assert refusal(path)[0] == (
        f"{table}.env: is one table where a list of them is meant; write [[{table}.env]], with two brackets"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[trainer]\nbind = "127.0.0.1:5555"', 'trainer.bind: "127.0.0.1:5555" does not begin with tcp:// or ipc://'),
        ('[trainer]\nbind = "/run/x"', 'did you mean "ipc:///run/x"?'),
        ('[[eval.env]]\nid = "reverse"\naddresses = ["10.0.0.7:7000"]', 'did you mean "tcp://10.0.0.7:7000"?'),
    ],
)  # fmt: skip
def test_an_address_that_does_not_say_how_it_is_reached(path: Path, text: str, words: str) -> None:
    """The scheme is guessed."""
    path.write_text(BASE + text)
    (line,) = refusal(path)
    assert words in line


@pytest.mark.parametrize(
    "address",
    ["tcp://*:7000", "tcp://foo/bar:70", "tcp://127.0.0.1:99999", "tcp://[zz]:7", "ipc:///" + "a" * 107],
)
def test_a_server_that_nobody_could_connect_to(path: Path, address: str) -> None:
    """Refused before anything is started."""
    path.write_text(f'{BASE}[[eval.env]]\nid = "reverse"\naddresses = ["{address}"]\ninsecure = true\n')
    (line,) = refusal(path)
    assert line.startswith(f'eval.env[0].addresses: "{address}"')


@pytest.mark.parametrize("url", ["http://h:99999/v1", "http://[zz]:1/v1", "http://*:1/v1"])
def test_an_inference_server_that_nobody_could_connect_to(path: Path, url: str) -> None:
    """Refused before anything is started."""
    path.write_text(BASE.replace("[local]", f'[inference]\nbase_urls = ["{url}"]'))
    (line,) = refusal(path)
    assert line.startswith(f'inference.base_urls[0]: "{url}"')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ('launcher = "rya"', "eval.env[0].launcher: input should be 'process' or 'ray'"),
        ('launcher = "ray"\nresources = {CPU = "two"}', "eval.env[0].resources.CPU: input should be a valid number"),
        ('launcher = "ray"\nresources = {CPU = -1}', "eval.env[0].resources.CPU: input should be greater than or equal to 0"),
        ('launcher = "ray"\naddresses = ["ipc:///x"]', "eval.env[0].launcher: servers at addresses run already"),
        ("resources = {CPU = 2}", 'eval.env[0].resources: only launcher = "ray" reserves them'),
    ],
)  # fmt: skip
def test_a_launcher_that_cannot_be_meant(path: Path, fields: str, words: str) -> None:
    """Unknown ones, resources that are no numbers or nobody reserves, and servers that run already."""
    path.write_text(f'{BASE}[[eval.env]]\nid = "reverse"\n{fields}\n')
    (line,) = refusal(path)
    assert words in line


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7:8000", "http://10.0.0.7:8000/", "https://inference.example"]
)
def test_an_inference_server_without_its_path(path: Path, url: str) -> None:
    """Where the API begins is part of the address."""
    path.write_text(BASE.replace("[local]", f'[inference]\nbase_urls = ["{url}"]'))
    assert refusal(path) == [
        f'inference.base_urls[0]: "{url}" ends before its path; did you mean "{url.rstrip("/")}/v1"?'
    ]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("{ temprature = 1.0 }", 'no such sampling parameter is known; did you mean "temperature"?'),
        ("{ best_of_all = 3 }", "what only your engine knows goes into train.sampling.extra_body"),
        ("{ n = 4 }", "train.sampling.n: is not a sampling parameter"),
        ("{ extra_body = { stream = true } }", "train.sampling.stream: is not a sampling parameter"),
    ],
)
def test_a_sampling_parameter_that_nobody_knows(path: Path, sampling: str, words: str) -> None:
    """It would be sent, and most engines would ignore it."""
    path.write_text(f"[train]\nsampling = {sampling}\n{BASE}")
    assert words in refusal(path)[0]


def test_other_sampling_parameters_are_let_through_explicitly(path: Path) -> None:
    """Known ones as they are, those of one engine only in a table of their own."""
    path.write_text(
        f"[train]\nsampling = {{ top_k = 20, min_p = 0.1, extra_body = {{ mirostat = 2 }} }}\n{BASE}"
    )
    assert load_config(path).train.sampling["extra_body"] == {"mirostat": 2}
