"""The log in the run directory: whole lines, bounded in size, and no reason to fail."""

from pathlib import Path

import pytest

from orchestrator.errors import JournalError
from orchestrator.service.log_file import LogFile, open_log


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    """Whoever follows the log, or reads it after a kill, sees every line."""
    log = open_log(tmp_path / "run")
    log.write("one\n")
    log.write("zwei – Ü\n")
    assert Path(log.name) == tmp_path / "run" / "logs" / "orchestrator.log"
    assert Path(log.name).read_text() == "one\nzwei – Ü\n"


def test_only_its_owner_can_read_the_log(tmp_path: Path) -> None:
    """Messages of environments may quote what is private; a directory that exists keeps its permissions."""
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    for run_dir, mode in ((tmp_path / "run", 0o700), (there, 0o755)):
        with open_log(run_dir) as log:
            log.write("one\n")
        modes = [path.stat().st_mode & 0o777 for path in (run_dir, run_dir / "logs", Path(log.name))]
        assert modes == [mode, 0o700, 0o600]


def test_a_continued_run_appends(tmp_path: Path) -> None:
    """What earlier processes of the run said stays."""
    for line in ("one\n", "two\n"):
        with open_log(tmp_path) as log:
            log.write(line)
    assert (tmp_path / "logs" / "orchestrator.log").read_text() == "one\ntwo\n"


def test_the_log_is_bounded(tmp_path: Path) -> None:
    """Two files of the given size at most, with the newest lines, none of them torn."""
    log = LogFile(tmp_path / "log", max_bytes=100)
    for number in range(1000):
        log.write(f"line {number}\n")
    assert {path.name for path in tmp_path.iterdir()} == {"log", "log.1"}
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    lines = ((tmp_path / "log.1").read_text() + (tmp_path / "log").read_text()).splitlines()
    assert lines == [f"line {number}" for number in range(1000 - len(lines), 1000)]
    assert len(lines) > 9


def test_the_size_of_earlier_processes_counts(tmp_path: Path) -> None:
    """A run that is started again and again does not grow its log beyond the bound."""
    for number in range(50):
        with LogFile(tmp_path / "log", max_bytes=100) as log:
            log.write(f"line {number:02}\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200


def test_a_line_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    """A full disk, or a directory that has become unwritable, must not end the run from within its log."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is not there")
    (tmp_path / "log").symlink_to(full)
    assert LogFile(tmp_path / "log", max_bytes=100).write("lost\n") == 5


def test_a_log_that_somebody_took_away_begins_anew_when_it_is_full(tmp_path: Path) -> None:
    """Deleted to make room, or moved by another program: what comes after the next rotation is there again."""
    path = tmp_path / "log"
    log = LogFile(path, max_bytes=100)
    log.write("x" * 60 + "\n")
    path.unlink()
    log.write("y" * 60 + "\n")
    log.write("the last\n")
    assert path.read_text().endswith("the last\n")


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """It is the run directory's fault, which has an exit code of its own."""
    (tmp_path / "run").write_text("a file")
    with pytest.raises(JournalError, match="the run directory cannot be written"):
        open_log(tmp_path / "run")
