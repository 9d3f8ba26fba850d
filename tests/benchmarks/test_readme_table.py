"""The README's table is written from a report, by a command."""

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.readme import BEGIN, CHOSEN, END, MissingRowError, chosen, markdown, says, write_readme
from benchmarks.report import Measured, encode
from benchmarks.runner import ROOT
from tests.benchmarks.test_runs import report_of

ALL = [
    Measured(f"{begins} and more", 2.5, "µs", benchmark, peer=5.0, peer_name="a peer", goal="< 3", met=True)
    for benchmark, begins in CHOSEN
]


def test_the_table_stands_between_the_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    """Written twice it is the same page."""
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n", encoding="utf-8")
    write_readme(report_of(*ALL), page)
    first = page.read_text(encoding="utf-8")
    assert first.startswith(f"# Title\n\n{BEGIN}\n| benchmark | what | ours |")
    assert first.endswith(f"{END}\n\nThe end.\n")
    assert "old" not in first
    write_readme(report_of(*ALL), page)
    assert page.read_text(encoding="utf-8") == first


def test_figures_of_one_kind_that_differ_inside_their_words_are_all_chosen() -> None:
    """A star stands for what differs; without it, the words are taken as they are."""
    assert says("runs, max_versions 2: batches from 5 on", "runs, max_versions *: batches")
    assert not says("runs, max_versions 2: throughput", "runs, max_versions *: batches")
    assert says("0/10/40 %: first (10,000)", "0/10/40 %: first (")
    assert not says("of runs: batches", "runs")


def test_a_row_has_all_that_the_table_of_the_terminal_has() -> None:
    """With the date, the commit and the machine below it."""
    lines = markdown(report_of(*ALL)).splitlines()
    assert lines[2] == f"| {ALL[0].benchmark} | {ALL[0].what} | 2.5 µs | 5 a peer | 0.5× | < 3 | yes |"
    assert lines[-1].startswith("Measured on 2026-01-01 12:00 UTC at abc: 2 cores (a processor)")


def test_a_chosen_row_that_is_lacking_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A renamed figure must not vanish from the page; the page stays as it is."""
    (tmp_path / "README.md").write_text(f"{BEGIN}\nold\n{END}\n", encoding="utf-8")
    source = tmp_path / "report.json"
    source.write_text(encode(report_of(*ALL[1:])), encoding="utf-8")
    assert main(["--readme", str(source)], tree=tmp_path) == 2
    assert f'"{CHOSEN[0][1]}" of {CHOSEN[0][0]}' in capsys.readouterr().err
    assert "old" in (tmp_path / "README.md").read_text(encoding="utf-8")
    with pytest.raises(MissingRowError):
        chosen(report_of(*ALL[1:]))


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), ("{}", "is no report")])
def test_a_file_that_is_no_report_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    """In one sentence that names the file."""
    source = tmp_path / "report.json"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert main(["--readme", str(source)], tree=tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{source} {words}")
    assert said.count("\n") == 1


def test_the_readme_has_the_chosen_rows() -> None:
    """In the order of the choice, as the command writes them."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    for benchmark, begins in CHOSEN:
        assert any(row[0] == f"| {benchmark}" and says(row[1], begins) for row in rows), begins
    kinds = [
        next((n for n, one in enumerate(CHOSEN) if row[0] == f"| {one[0]}" and says(row[1], one[1])), -1)
        for row in rows[1:]
    ]
    assert kinds == sorted(kinds)
    assert -1 not in kinds
