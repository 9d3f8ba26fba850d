"""`--compare REV`: the benchmarks of two trees in turns, and which figures moved."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.compare import Compared, in_turns, match
from benchmarks.report import Measured, Outcome
from tests.benchmarks.conftest import Write, commit, figure_of


def compared(base: tuple[float, ...], here: tuple[float, ...]) -> Compared:
    return Compared("one", "speed", "µs", base, here)


@pytest.mark.parametrize(
    ("base", "here", "verdict"),
    [
        ((10.0, 11.0, 10.5), (12.0, 13.0, 12.5), "up"),
        ((10.0, 11.0, 10.5), (8.0, 9.0, 8.5), "down"),
        ((10.0, 12.1, 10.5), (12.0, 13.0, 12.5), "noise"),  # the ranges overlap
        ((10.0, 10.1, 10.2), (10.3, 10.4, 10.5), "noise"),  # apart, but by 3 %
        ((10.0, 10.0), (10.0, 10.0), "noise"),
        ((0.0, 0.0), (1.0, 2.0), "up"),  # no per cent of nothing
        ((0.0, 0.0), (0.0, 0.0), "noise"),
        ((10.0,), (), "only in BASE"),
        ((), (10.0,), "only here"),
    ],
)
def test_a_figure_moved_if_ranges_and_medians_are_apart(
    base: tuple[float, ...], here: tuple[float, ...], verdict: str
) -> None:
    """Both, and only if both trees have it."""
    assert compared(base, here).verdict == verdict


def test_the_change_is_that_of_the_medians() -> None:
    """In parts of the base's."""
    assert compared((9.0, 10.0, 30.0), (12.0, 15.0, 15.0)).change == pytest.approx(0.5)
    assert compared((0.0,), (1.0,)).change is None
    assert compared((), (1.0,)).change is None


def test_the_trees_take_turns() -> None:
    """A B B A, so that a machine that slows down slows both."""
    assert list(in_turns(4)) == ["BASE", "here", "here", "BASE", "BASE", "here", "here", "BASE"]


def test_figures_are_matched_by_benchmark_words_and_peer() -> None:
    """One figure beside two peers is two rows; one that a tree lacks has rounds of the other only."""
    first, second = (Measured("speed", 1.0, "µs", "one", peer_name=peer) for peer in ("a", "b"))
    found = match([Outcome((first, second)), Outcome((first,))], [Outcome((second,))])
    assert [(one.base, one.here) for one in found] == [((1.0, 1.0), ()), ((1.0,), (1.0,))]


def test_a_revision_is_compared_with_the_working_tree(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each measures its own code; the worktree of the revision is gone afterwards."""
    tree = write_tree(one=figure_of("2.0"), gone=figure_of("1.0"), same=figure_of("5.0"))
    commit(tree)
    write_tree(one=figure_of("3.0"), fresh=figure_of("1.0"))
    (tree / "benchmarks" / "gone.py").unlink()
    assert main(["--compare", "HEAD", "--rounds", "2"], tree=tree) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines() if "speed" in line]
    assert [row[-1] for row in rows] == ["here", "BASE", "up", "noise"]
    assert rows[2] == ["speed", "2", "µs", "3", "µs", "+50.0", "%", "up"]
    assert "1 of 4 figures moved" in shown.out
    assert "one: here, round 2 of 2" in shown.err
    assert only_worktree(tree)


def test_a_comparison_is_written_for_machines_too(
    write_tree: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row with its rounds and what became of it; with -, nothing else is on standard output."""
    tree = write_tree(one=figure_of("2.0"), same=figure_of("5.0"))
    commit(tree)
    write_tree(one=figure_of("3.0"))
    written = tmp_path / "compared.json"
    words = ["--compare", "HEAD", "--rounds", "2"]
    assert main([*words, "--json", str(written)], tree=tree) == 0
    found = json.loads(written.read_text(encoding="utf-8"))
    [one, same] = found["compared"]
    assert (one["benchmark"], one["base"], one["here"]) == ("one", [2.0, 2.0], [3.0, 3.0])
    assert (one["change"], one["moved"], one["verdict"]) == (0.5, True, "up")
    assert (same["verdict"], found["failed"], found["effort"]) == ("noise", {}, "quick")
    assert found["base"].startswith("HEAD (")
    capsys.readouterr()
    assert main([*words, "--json", "-"], tree=tree) == 0
    assert json.loads(capsys.readouterr().out)["compared"] == found["compared"]


def test_a_comparison_that_could_not_be_written_is_not_begun(
    write_tree: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes long, so the mistake is said before."""
    tree = write_tree(one=figure_of("2.0"))
    commit(tree)
    missing = tmp_path / "nowhere"
    assert main(["--compare", "HEAD", "--json", str(missing / "x.json")], tree=tree) == 2
    assert capsys.readouterr().err == f"--json: there is no directory {missing}\n"


def test_a_benchmark_that_fails_in_one_tree_is_said(
    write_tree: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of the other tree stay, and the exit code is 1."""
    tree = write_tree(one=figure_of("2.0"))
    commit(tree)
    write_tree(one="def figures(effort):\n    raise ValueError('broken')\n")
    assert main(["one", "--compare", "HEAD", "--rounds", "2"], tree=tree) == 1
    shown = capsys.readouterr().out
    assert "one (here): ValueError: broken" in shown
    assert "only in BASE" in " ".join(shown.split())


@pytest.mark.parametrize("revision", ["nothing", "", "--help"])
def test_a_bad_revision_is_one_sentence(
    write_tree: Write, capsys: pytest.CaptureFixture[str], revision: str
) -> None:
    """Nothing is run, and no worktree is left."""
    tree = write_tree(one=figure_of("2.0"))
    commit(tree)
    assert main([f"--compare={revision}"], tree=tree) == 2
    assert capsys.readouterr().err == (f'BASE: "{revision}" is no commit, branch or tag of this repository\n')
    assert only_worktree(tree)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["two", "--compare", "HEAD"], 'no benchmark is named "two"; there are: one'),
        (["--compare", "HEAD", "--rounds", "1"], "--rounds: at least 2, since one round has no range"),
    ],
)
def test_a_mistake_is_one_sentence(
    write_tree: Write, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """As without a comparison."""
    tree = write_tree(one=figure_of("2.0"))
    commit(tree)
    assert main(words, tree=tree) == 2
    assert capsys.readouterr().err == said + "\n"
    assert only_worktree(tree)


def only_worktree(tree: Path) -> bool:
    """Whether git knows of no other."""
    listed = subprocess.run(["git", "worktree", "list"], cwd=tree, capture_output=True, text=True, check=True)
    return listed.stdout.count("\n") == 1
