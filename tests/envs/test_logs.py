"""Logs: one format for everything in the process, JSON lines unless a person watches."""

import errno
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest
import structlog

from envs.logs import MAX_FIELD_CHARS, LogFormat, configure_logging


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    quiet = {name: logging.getLogger(name).level for name in ("asyncio", "aiohttp.access")}
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in quiet.items():
        logging.getLogger(name).setLevel(before)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_events_are_json_lines_with_the_fields_of_the_process() -> None:
    """A file or a pipe gets JSON; what an event says itself wins over what is bound."""
    out = io.StringIO()
    configure_logging("info", stream=out, server="math-0", pid=1)
    log = structlog.get_logger()
    log.info("env.ready", tasks=3)
    log.debug("env.hidden")
    log.info("env.other", pid=2)
    ready, other = lines(out)
    assert (ready["event"], ready["level"], ready["server"], ready["tasks"]) == (
        "env.ready",
        "info",
        "math-0",
        3,
    )
    assert "time" in ready
    assert other["pid"] == 2


def test_the_standard_library_takes_the_same_road() -> None:
    """Lines of aiohttp or an environment's own logger look like ours."""
    out = io.StringIO()
    configure_logging("info", stream=out, server="math-0")
    logging.getLogger("some.library").warning("took %d s", 3)
    logging.getLogger("some.library").debug("hidden")
    (line,) = lines(out)
    assert (line["event"], line["level"], line["server"], line["logger"]) == (
        "took 3 s",
        "warning",
        "math-0",
        "some.library",
    )


def test_exceptions_are_part_of_their_line() -> None:
    """One event, one line, traceback included."""
    out = io.StringIO()
    configure_logging("info", stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("rollout.failed")
    (line,) = lines(out)
    assert "ValueError: broken" in str(line["exception"])


def test_anything_can_be_logged() -> None:
    """A value without a JSON form is shown as text instead of losing the line."""
    out = io.StringIO()
    configure_logging("info", stream=out)
    structlog.get_logger().info("odd", thing=io, number=float("nan"), key={1: object})
    (line,) = lines(out)
    assert "module 'io'" in str(line["thing"])


def test_a_terminal_gets_readable_lines() -> None:
    """And a file can be told to."""
    for stream, form in ((Terminal(), "auto"), (io.StringIO(), "pretty")):
        configure_logging("info", form, stream=stream)  # type: ignore[arg-type]  # both are literals of LogFormat
        structlog.get_logger().info("env.ready", tasks=3)
        assert "env.ready" in stream.getvalue()
        assert not stream.getvalue().startswith("{")


def test_a_file_gets_every_event_too() -> None:
    """As JSON with date and time, whatever is shown; exceptions and foreign records included."""
    shown, kept = Terminal(), io.StringIO()
    configure_logging("info", stream=shown, copy=kept, process="trainer")
    structlog.get_logger().info("env.ready", tasks=3)
    logging.getLogger("some.library").warning("took %d s", 3)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("rollout.failed")
    ready, foreign, failed = lines(kept)
    assert (ready["event"], ready["tasks"], ready["process"]) == ("env.ready", 3, "trainer")
    assert (foreign["event"], foreign["logger"]) == ("took 3 s", "some.library")
    assert "ValueError: broken" in str(failed["exception"])
    assert all(
        datetime.fromisoformat(str(line["time"])).tzinfo is not None for line in (ready, foreign, failed)
    )
    assert "rollout.failed" in shown.getvalue()
    assert "ValueError: broken" in shown.getvalue()


def test_control_characters_are_not_obeyed() -> None:
    """What a server answered cannot clear the screen on which the log is watched."""
    out = io.StringIO()
    configure_logging("info", "pretty", stream=out)
    structlog.get_logger().info("failed\x1b[2J", message="a\x1b]0;title\x07b\x9b2J")
    assert not {"\x1b", "\x07", "\x9b"} & set(out.getvalue())
    assert "failed�[2J" in out.getvalue()


def test_long_fields_are_cut() -> None:
    """What a foreign server says cannot fill a disk; beginning and end stay, and how much is missing is said."""
    out = io.StringIO()
    configure_logging("info", stream=out)
    structlog.get_logger().info("a" * 20_000, message="b" * 9_000 + "end", values=["c" * 9_000], short="d")
    logging.getLogger("some.library").warning("%s", "e" * 9_000)
    try:
        raise ValueError("f" * 9_000)
    except ValueError:
        structlog.get_logger().exception("rollout.failed")
    first, second, third = lines(out)
    assert all(
        len(str(value)) <= MAX_FIELD_CHARS for line in (first, second, third) for value in line.values()
    )
    assert str(first["message"]).startswith("bbb")
    assert str(first["message"]).endswith("end")
    assert "1103 characters are cut" in str(first["message"])
    assert first["short"] == "d"
    assert str(third["exception"]).startswith("Traceback")


def test_unknown_levels_and_formats_are_refused() -> None:
    """With the ones there are."""
    with pytest.raises(ValueError, match="debug, info, warning"):
        configure_logging("loud")
    with pytest.raises(ValueError, match="auto, pretty, json"):
        configure_logging("info", "xml")  # type: ignore[arg-type]  # the mistake under test


def test_importing_the_sdk_stays_light() -> None:
    """An environment's process does not load the service's dependencies, nor HTTP before it needs it."""
    code = "import sys, envs, envs.loader, envs.logs; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    for heavy in ("pydantic", "orchestrator", "aiohttp", "zmq"):
        assert f"'{heavy}'" not in done.stdout


@pytest.mark.parametrize("style", ["json", "pretty"])
def test_a_line_that_cannot_be_written_is_left_out(style: LogFormat) -> None:
    """A full disk, or a terminal that is gone, must not end a server in the middle of a rollout."""

    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    out = Full()
    configure_logging("info", style, stream=out)
    structlog.get_logger().warning("rollout.failed")
    out.full = False
    structlog.get_logger().warning("rollout.failed", again=True)
    assert "again" in out.getvalue()
