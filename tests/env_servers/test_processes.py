"""Child processes: their line, their words, their end, and the end of whatever they started."""

import os
import signal
import sys
from pathlib import Path

import pytest

from orchestrator.env_servers.processes import ChildProcess, describe_exit
from tests.integration.env_servers import alive, until


def child(tmp_path: Path, code: str, *, line: bytes = b"\n") -> ChildProcess:
    return ChildProcess(
        [sys.executable, "-u", "-c", code], first_line=line, log_path=tmp_path / "logs" / "c.log"
    )


async def test_a_child_gets_its_line_and_its_output_is_kept(tmp_path: Path) -> None:
    """Instructions in, words out, exit code seen; a large line does not block."""
    line = b"x" * 200_000 + b"\n"
    process = child(
        tmp_path, "import sys; print(len(sys.stdin.readline())); print('b'); sys.exit(7)", line=line
    )
    assert await process.exited == 7
    assert process.log_tail() == "200001\nb"
    assert process.log_tail(lines=1) == "b"
    assert await process.stop(grace_s=1) == 7


async def test_the_tail_is_that_of_the_last_child_only(tmp_path: Path) -> None:
    """A restarted server's error does not quote its predecessor."""
    await child(tmp_path, "print('first')").exited
    second = child(tmp_path, "print('second')")
    await second.exited
    assert second.log_tail() == "second"
    assert (tmp_path / "logs" / "c.log").read_text() == "first\nsecond\n"


async def test_a_log_is_kept_within_a_bound_while_the_child_writes(tmp_path: Path) -> None:
    """A full file becomes the old one and begins anew, under a child that goes on writing to it."""
    code = "import itertools, time\nfor number in itertools.count(): print(number, 'x' * 1000); time.sleep(0.002)"
    process = ChildProcess(
        [sys.executable, "-u", "-c", code],
        first_line=b"\n",
        log_path=tmp_path / "c.log",
        log_bytes=20_000,
        look_at_log_s=0.02,
    )
    old = tmp_path / "c.old.log"

    def numbers() -> list[int]:
        """Of the whole lines at the end of what the child wrote."""
        return [int(line.split()[0]) for line in process.log_tail().splitlines()[1:] if line.endswith("xxx")]

    await until(lambda: old.exists() and old.read_text().startswith("0 xxx"))
    await until(lambda: not old.read_text().startswith("0 xxx"))
    await until(lambda: any(number > 20 for number in numbers()))
    await process.stop(grace_s=0)
    assert (tmp_path / "c.log").stat().st_size < 10 * 20_000


async def test_stopping_a_child_that_obeys_needs_no_force(tmp_path: Path) -> None:
    """SIGTERM comes first."""
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('up'); signal.pause()"
    process = child(tmp_path, code)
    await until(lambda: "up" in process.log_tail())
    assert await process.stop(grace_s=30) == 5


async def test_stopping_a_child_that_does_not_obey_ends_in_sigkill(tmp_path: Path) -> None:
    """And takes its whole group along, a stopped process too."""
    # One write for each line: two processes that print would get theirs mixed up.
    code = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'%d\\n' % os.fork()); signal.pause()"
    process = child(tmp_path, code)
    await until(lambda: len(process.log_tail().splitlines()) == 2)
    grandchild = max(int(pid) for pid in process.log_tail().split())
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.stop(grace_s=0.05) == -signal.SIGKILL
    await until(lambda: not alive(grandchild))


async def test_what_a_child_leaves_in_its_group_ends_with_it(tmp_path: Path) -> None:
    """A crash does not leave sandboxes behind."""
    process = child(tmp_path, "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    assert await process.exited == 0
    await until(lambda: not alive(int(process.log_tail())))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "still runs"),
        (3, "exited with code 3"),
        (-9, "was ended by SIGKILL"),
        (-99, "was ended by signal 99"),
    ],
)
def test_an_exit_is_put_into_words(code: int | None, words: str) -> None:
    """Signals by name."""
    assert describe_exit(code) == words
