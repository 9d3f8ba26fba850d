"""Versions that appear as directories: `step_N` with a `STABLE` marker in it is version N, ready to be sampled from.

For trainers that write checkpoints to a shared disk and say nothing. The newest stable one is reported, once; those
that it overtook are not. A shared disk tells nobody of a new file, so this looks again every `poll_s`, from a
thread because listing may be slow. A directory that is not there yet is waited for.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import structlog

log = structlog.get_logger("versions")

MARKER = "STABLE"
POLL_S = 1.0
_NAME = re.compile(r"^step_(\d+)$")


def newest_stable(directory: Path) -> tuple[int, Path] | None:
    """The highest version in a directory that has its marker."""
    try:
        versions = [
            (int(match[1]), path) for path in directory.iterdir() if (match := _NAME.match(path.name))
        ]
    except FileNotFoundError:
        return None
    for version, path in sorted(versions, reverse=True):
        if (path / MARKER).exists():
            return version, path
    return None


class VersionWatcher:
    """Reports versions above `version` as they become stable."""

    def __init__(
        self,
        directory: Path,
        *,
        on_version: Callable[[int, str], object],
        version: int,
        poll_s: float,
    ) -> None:
        self._directory = directory
        self._on_version = on_version
        self._version = version
        self._poll_s = poll_s
        self._failing = False

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """Report what is new, if anything is."""
        try:
            newest = await asyncio.to_thread(newest_stable, self._directory)
        except OSError as error:
            if not self._failing:
                log.warning("versions.directory_unreadable", directory=str(self._directory), error=str(error))
            self._failing = True
            return
        self._failing = False
        if newest is not None and newest[0] > self._version:
            self._version = newest[0]
            self._on_version(newest[0], str(newest[1]))
