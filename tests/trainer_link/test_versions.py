"""Versions that appear as directories: the newest stable one is reported, once."""

import asyncio
from pathlib import Path

from structlog.testing import capture_logs

from orchestrator.trainer_link.versions import VersionWatcher, newest_stable


def make_version(directory: Path, number: int, *, stable: bool = True) -> None:
    (directory / f"step_{number}").mkdir(parents=True)
    if stable:
        (directory / f"step_{number}" / "STABLE").touch()


def test_only_marked_directories_count_and_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    """A checkpoint that is still being written has no marker."""
    assert newest_stable(tmp_path / "not there yet") is None
    for number in (2, 9, 10):
        make_version(tmp_path, number)
    make_version(tmp_path, 11, stable=False)
    (tmp_path / "step_x").mkdir()
    (tmp_path / "step_99").write_text("a file")
    assert newest_stable(tmp_path) == (10, tmp_path / "step_10")


async def test_each_new_version_is_reported_once_and_older_ones_never(tmp_path: Path) -> None:
    """What a newer one overtook is skipped."""
    reported: list[tuple[int, str]] = []
    watcher = VersionWatcher(
        tmp_path, on_version=lambda version, path: reported.append((version, path)), version=3, poll_s=1.0
    )
    make_version(tmp_path, 3)
    await watcher.look()
    assert reported == []
    make_version(tmp_path, 4)
    make_version(tmp_path, 5)
    await watcher.look()
    await watcher.look()
    make_version(tmp_path, 1)
    await watcher.look()
    assert reported == [(5, str(tmp_path / "step_5"))]


async def test_it_looks_until_cancelled(tmp_path: Path) -> None:
    """A directory that comes later is found."""
    found = asyncio.Event()
    watcher = VersionWatcher(
        tmp_path / "later", on_version=lambda version, path: found.set(), version=0, poll_s=0.01
    )
    looking = asyncio.create_task(watcher.run())
    make_version(tmp_path / "later", 1)
    await found.wait()
    looking.cancel()
    await asyncio.wait([looking])
    assert looking.cancelled()


async def test_a_directory_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    """A shared disk that is away for a while does not end the run."""
    (tmp_path / "versions").write_text("a file")
    reported: list[int] = []
    watcher = VersionWatcher(
        tmp_path / "versions",
        on_version=lambda version, path: reported.append(version),
        version=0,
        poll_s=1.0,
    )
    with capture_logs() as logs:
        await watcher.look()
        await watcher.look()
    assert [entry["event"] for entry in logs] == ["versions.directory_unreadable"]
    (tmp_path / "versions").unlink()
    make_version(tmp_path / "versions", 1)
    await watcher.look()
    assert reported == [1]
