"""`orchestrator simulate` as people type it: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from orchestrator.cli import main

CONFIG = """
[local]
[batch]
size = 16
[train]
group_size = 4
[dispatch]
max_inflight = 16
ramp_s = 0.0
[[train.env]]
name = "math"
id = "builtin::reverse"
ratio = 0.5
[[train.env]]
name = "code"
id = "builtin::agree"
ratio = 0.5
"""
BRIEF = ("--steps", "4", "--seeds", "2")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return str(path)


def test_it_says_what_the_run_does_and_what_was_assumed(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Speed, use, time, staleness, mix and waste, with the spread over seeds."""
    assert main(["simulate", config, *BRIEF, "--latency", "math=3"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "steps per hour",
        "trainer busy",
        "engines busy",
        "staleness, mean",
        "thrown away",
        "time: rollouts",
    ):
        assert words in printed
    for words in (
        "of age 0",
        "delivered share",
        "queued at most",
        "deviation of 2 seeds",
        "* assumed",
        "mean 3",
    ):
        assert words in printed


def test_a_sweep_marks_the_best_points_and_draws_them(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every combination has a line; the page loads nothing and shows each point."""
    page = tmp_path / "sweep.html"
    sweep = ["--sweep", "dispatch.max_inflight=4,16", "--sweep", "staleness.max_versions=0,2"]
    assert main(["simulate", config, *BRIEF, *sweep, "--html", str(page)]) == 0
    assert "●" in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert html.count("<circle") == 4
    assert "dispatch.max_inflight=16 staleness.max_versions=2" in html
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", "")


def test_machines_get_json_of_all_that_is_compared(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the surroundings and where each value comes from."""
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("max_inflight = 16", "max_inflight = 4"), encoding="utf-8")
    behaviour = tmp_path / "behaviour.toml"
    behaviour.write_text("[env.math]\nlatency_s = 2.0\n[trainer]\nstep_s = 0.5\n", encoding="utf-8")
    words = ["--compare", str(other), "--behaviour", str(behaviour), "--json"]
    assert main(["simulate", config, *BRIEF, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = told["points"]
    assert (first["name"], second["name"]) == ("config.toml", "other.toml")
    assert first["sequences_per_s"]["mean"] > second["sequences_per_s"]["mean"]
    assert len(first["seeds"]) == 2
    assert first["shares"]["math"]["sd"] >= 0
    envs = told["configs"][0]["surroundings"]["envs"]
    assert envs["math"]["latency_s"] == {"value": "2", "origin": "stated"}
    assert envs["code"]["latency_s"]["origin"] == "assumed"


def test_files_of_one_name_are_told_apart_by_their_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As much of the path as that takes; each has a column of its own, and no other configuration is needed beside them."""
    paths = [tmp_path / name / "config.toml" for name in ("few", "many")]
    for path, limit in zip(paths, (4, 16), strict=True):
        path.parent.mkdir()
        text = CONFIG.replace("max_inflight = 16", f"max_inflight = {limit}")
        path.write_text(text, encoding="utf-8")
    words = ["simulate", "--compare", *map(str, paths), *BRIEF]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["name"] for point in told["points"]] == ["few/config.toml", "many/config.toml"]
    few, many = (point["sequences_per_s"]["mean"] for point in told["points"])
    assert few < many
    assert main(words) == 0
    (heading,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.count("config.toml") == 2 and "env" not in line and ":" not in line
    )
    assert heading.index("few/") < heading.index("many/")


def test_a_file_that_is_named_twice_is_simulated_once(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether --compare has all configurations or the others is for the user to say."""
    other = tmp_path / "other.toml"
    other.write_text(CONFIG, encoding="utf-8")
    assert main(["simulate", config, "--compare", config, str(other), *BRIEF, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["name"] for point in told["points"]] == ["config.toml", "other.toml"]


def test_configurations_with_other_envs_are_compared_as_what_they_are(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Envs of all, targets and surroundings of each; a file and flags may name the env of any."""
    other = tmp_path / "other.toml"
    text = CONFIG.replace('"code"', '"chess"').replace("ratio = 0.5", "ratio = 0.25", 1)
    other.write_text(text + '[curriculum]\nstrategy = "frontier"\n', encoding="utf-8")
    behaviour = tmp_path / "behaviour.toml"
    behaviour.write_text("[env.chess]\ntokens = 70\n[env.code]\ntokens = 30\n", encoding="utf-8")
    words = [config, "--compare", str(other), "--behaviour", str(behaviour), "--latency", "chess=4"]
    assert main(["simulate", *words, *BRIEF]) == 0
    printed = capsys.readouterr().out
    assert "how rollouts go: config.toml" in printed
    assert "how rollouts go: other.toml" in printed
    assert 'note: other.toml: curriculum "frontier" (math, chess)' in " ".join(printed.split())
    shares = {
        cells[0]: cells[1:]
        for line in printed.partition("delivered share")[2].splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 5
    }
    assert (shares["math"][0], shares["math"][2]) == ("0.500", "0.333")
    assert (shares["code"][0], shares["code"][2:]) == ("0.500", ["–", "–"])
    assert (shares["chess"][:2], shares["chess"][2]) == (["–", "–"], "0.667")
    assert shares["chess"][3] > "0.4"
    assert " ± " in shares["chess"][3]


def test_a_point_that_fails_leaves_the_others_their_answers(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named with its reason, in every form of the answer."""
    page = tmp_path / "sweep.html"
    words = ["simulate", config, *BRIEF, "--sweep", "batch.size=16,0,7", "--sweep", "batch.on_stuck=wait"]
    assert main([*words, "--html", str(page)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not simulated: batch.size=0 batch.on_stuck=wait: " in printed
    assert "no number of whole groups of 4 ever sums to 7" in printed
    assert "not simulated: batch.size=0" in page.read_text(encoding="utf-8")
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["values"]["batch.size"] for point in told["points"]] == ["16"]
    assert [one["values"]["batch.size"] for one in told["refused"]] == ["0", "7"]


def test_the_spread_over_seeds_stands_beside_every_share(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of time, ages and mix, in the tables and on the page."""
    page = tmp_path / "page.html"
    assert main(["simulate", config, *BRIEF, "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    for start in ("time: rollouts", "of age 0", "math"):
        (line,) = (line for line in printed.splitlines() if f"│ {start} " in line and "mean" not in line)
        assert " ± " in line
    html = page.read_text(encoding="utf-8")
    assert html.count(" ± ") > 12


@pytest.mark.parametrize(
    ("words", "text", "note"),
    [
        (["--behaviour", "pausing.toml"], CONFIG, "note: weights.pauses: without effect"),
        (
            [],
            CONFIG + '[curriculum]\nstrategy = "difficulty"\n',
            'note: curriculum "difficulty" (math, code)',
        ),
    ],
)
def test_what_is_set_and_changes_nothing_here_is_said(
    words: list[str],
    text: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rather than left for the user to wonder about."""
    monkeypatch.chdir(tmp_path)
    Path("pausing.toml").write_text("[weights]\nupdate_s = 1.0\npauses = true\n", encoding="utf-8")
    Path("config.toml").write_text(text, encoding="utf-8")
    assert main(["simulate", "config.toml", *BRIEF, *words]) == 0
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "complaint", "code"),
    [
        (["--behaviour", "nowhere.toml"], "nowhere.toml: there is no such file", 2),
        (["--behaviour", "bad.toml"], 'bad.toml: env.maths: no env of the configuration is named "maths"', 2),
        (["--from", "nowhere"], "nowhere: there is neither rollouts.sqlite nor a journal here", 2),
        (["--sweep", "dispatch.max_inflights=1"], "dispatch.max_inflights=1: ", 2),
        (["--sweep", "batch.size=0"], "batch.size=0: ", 2),
        (["--spread", "nan"], "--spread nan: a number from 0 on is needed", 2),
        (["--spread", "inf"], "--spread inf: a number from 0 on is needed", 2),
        (["--tasks", "math=nan"], "--tasks math=nan: at least 1 is needed", 2),
        (["--latency", "math=nan"], 'env "math": a latency of nan s is not a positive number', 2),
        (["--sweep", "batch.size"], "write KEY=VALUE,VALUE", 2),
        (["--sweep", "seed=1,2", "--sweep", "seed=3"], "seed: it is named twice", 2),
        (["--seeds", "0"], "--seeds 0: a number above 0 is needed", 2),
        (["--latency", "maths=1"], 'no train env is named "maths"; there are: math, code', 2),
        (["--loss", "math=2"], "a loss of 2.0 is not between 0 and 1", 2),
        (["--mix-only", "--sweep", "seed=1,2"], "--sweep is not for --mix-only", 2),
        (["--loss", "math=1", "--loss", "code=1"], "rollouts could be trained on", 7),
        (
            ["--sweep", "batch.on_stuck=wait", "--sweep", "batch.size=7"],
            "batch.size: no number of whole groups of 4 ever sums to 7",
            2,
        ),
    ],
)
def test_what_cannot_be_simulated_is_one_line_that_says_why(
    config: str,
    words: list[str],
    complaint: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The point of a sweep is named; a run that forms no batch has the exit code of the live one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[env.maths]\nfailure = 0.1\n", encoding="utf-8")
    assert main(["simulate", config, *BRIEF, *words]) == code
    said = capsys.readouterr()
    assert complaint in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("words", "complaint", "code"),
    [
        (["--minutes", "inf"], "--minutes inf: a number above 0 is needed", 2),
        (["--minutes", "nan"], "--minutes nan: a number above 0 is needed", 2),
        (["--minutes", "0.001"], "no batch is formed in the first 0.06 s of virtual time", 7),
    ],
)
def test_a_time_in_which_nothing_can_come_is_told(
    config: str, words: list[str], complaint: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is too short is not taken for a run that stalls."""
    assert main(["simulate", config, *words]) == code
    said = capsys.readouterr().err
    assert complaint in said
    assert "at all" not in said


def test_without_any_configuration_it_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone or to compare."""
    assert main(["simulate"]) == 2
    assert "write `orchestrator simulate CONFIG`, or several after --compare" in capsys.readouterr().err
