"""Where commands of people reach a run: the token that they need, and the desk that takes them.

The desk is there before the run and after it, and says so; while there is a run, a command goes through
`Run.on_control`, and is answered when it is on disk. A flood of them is answered with "too many" beyond a bound, so that
neither the loop nor the journal suffers.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestrator.config import Config
from orchestrator.discovery import is_source
from orchestrator.dispatch.limits import TokenBucket
from orchestrator.errors import JournalError
from orchestrator.journal import Journal, Recovered
from orchestrator.journal.directory import open_private
from orchestrator.run.changes import Changes
from orchestrator.run.commands import TOKEN_FILE, Command, Origin
from orchestrator.run.run import Run
from orchestrator.service import blueprint
from orchestrator.service.driver import Driver
from orchestrator.service.front import Front
from orchestrator.views.control import Answer

RECORD_S = 10.0
"""How long an answer waits for the disk."""

PER_MINUTE, BURST = 600, 50
"""Commands that are taken."""


@contextmanager
def token_file(run_dir: Path) -> Iterator[str]:
    """A new token in a file that only its owner can read, as long as the block lasts."""
    token, path = secrets.token_urlsafe(32), run_dir / TOKEN_FILE
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(open_private(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(f"{token}\n")
    fresh.replace(path)
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)


def changes_of(config: Config, recovered: Recovered, endpoints: Sequence[str]) -> Changes:
    """What an earlier process of the run had changed and still holds; the run itself tells what does not."""
    changes = Changes.load(recovered.state.get("control"))
    changes.against(
        ratios=blueprint.configured_ratios(config),
        max_inflight=config.dispatch.max_inflight,
        endpoints=endpoints,
        sourced=any(map(is_source, config.inference.base_urls)),
    )
    return changes


class ControlDesk:
    """Takes commands, whether or not there is a run."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._driver: Driver[Run] | None = None
        self._journal: Journal | None = None
        self._bucket = TokenBucket(PER_MINUTE, burst=BURST, now=time.monotonic())

    def open(self, driver: Driver[Run], journal: Journal) -> None:
        """There is a run from now on."""
        self._driver, self._journal = driver, journal

    def close(self) -> None:
        """The run is over."""
        self._driver = self._journal = None

    async def tell(self, command: Command, by: str) -> Answer:
        """Have the run follow a command; answered when what has changed is on disk."""
        driver, journal, now = self._driver, self._journal, time.monotonic()
        if driver is None or journal is None:
            status = self._front.status()
            waits = f" (it waits for {status.waiting_for})" if status.waiting_for else ""
            return Answer(503, f"the run is {status.state}{waits}; no command is taken", status)
        if self._bucket.ready_at(1, now) > now:
            return Answer(429, "too many commands; try again in a moment", self._front.status())
        self._bucket.take(1, now)
        reply = driver.ask(driver.run.on_control, command, Origin(by, time.time()))
        text = reply.text
        if reply.changed:
            try:
                async with asyncio.timeout(RECORD_S):
                    await journal.flush()
            except TimeoutError:
                text += "; it is not on disk yet"
            except JournalError as error:
                return Answer(503, f"{text}; but it is not recorded: {error}", self._front.status())
        status = self._front.status()
        if reply.refused:
            taken = driver.run.state.value == "running" and not driver.run.ended
            return Answer(409 if taken else 503, text, status)
        return Answer(200, text, status, changed=reply.changed)
