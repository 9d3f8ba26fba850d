"""Log set-up of the service and of env servers: pretty on a terminal, JSON lines otherwise.

Events are dotted and in the past tense (`env.ready`); everything else is a field. Records of the standard
library's `logging` (aiohttp, an environment's own) take the same road, so that a log has one
format. Everything goes to standard error, and to a file as well where there is one. A field that is too long is cut, so
that one message of a foreign server cannot fill a disk; on a terminal, control characters are not obeyed. Must stay light: env servers of any interpreter import it.
"""

import logging
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, cast

import msgspec
import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "pretty", "json"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_QUIET = ("asyncio", "aiohttp.access")
MAX_FIELD_CHARS = 8000
"""Of each field; what is cut is the middle, for the end of a traceback says what was wrong."""


def configure_logging(
    level: str = "info",
    format: LogFormat = "auto",  # noqa: A002  named as in the configuration
    *,
    stream: TextIO | None = None,
    copy: TextIO | None = None,
    **bound: Any,
) -> None:
    """Set up structlog and the standard library; `bound` fields are added to every event of the process.

    `copy` gets every event too, always as JSON.
    """
    number = _LEVELS.get(level.lower())
    if number is None:
        raise ValueError(f'there is no log level "{level}"; there are: {", ".join(_LEVELS)}')
    if format not in ("auto", "pretty", "json"):
        raise ValueError(f'there is no log format "{format}"; there are: auto, pretty, json')
    out = stream if stream is not None else sys.stderr
    pretty = format == "pretty" or (format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        _Bound(bound),
        cut_fields,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if pretty else "iso", utc=not pretty, key="time"),
    ]
    ends: list[Processor] = (
        [
            _tame,
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=_plain, timestamp_key="time"
            ),
        ]
        if pretty
        else list(_AS_JSON)
    )
    if copy is not None:
        ends.insert(0, _Copy(copy))
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lenient(out))),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ends],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO) if number > logging.DEBUG else number)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


@contextmanager
def log_to(file: TextIO, level: str) -> Iterator[None]:
    """Write the events of a block to a file, in a program whose logging is its own affair.

    Where the program has set structlog up, events go its way too; else warnings go to standard error. The standard
    library's logging is left alone.
    """
    before, was_set_up = structlog.get_config(), structlog.is_configured()
    if was_set_up:
        structlog.configure(processors=[_Copy(file), *before["processors"]])
    else:
        pretty = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_plain)
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                cut_fields,
                _Copy(file),
                _drop_below_warning,
                structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
                _tame,
                pretty,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level.lower()]),
            logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lenient(sys.stderr))),
            cache_logger_on_first_use=False,
        )
    try:
        yield
    finally:
        if was_set_up:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


def _drop_below_warning(
    logger: Any, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if _LEVELS.get(str(event.get("level")), 0) < _LEVELS["warning"]:
        raise structlog.DropEvent
    return event


class _Lenient:
    """Leaves out a line that cannot be written (a full disk, a terminal that is gone): whoever logs must not fail for it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the latter of a file that was closed
            self._out.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._out.flush()


class _Bound:
    """Adds the fields of the process to every event; what the event says itself wins."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in self._fields.items():
            event.setdefault(key, value)
        return event


class _Copy:
    """Writes every event to a second place, as JSON, and passes it on as it was."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # In a log that is read later a time has its date.
        line: Any = {"level": method, **event, "time": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        for processor in _AS_JSON:
            line = processor(logger, method, line)
        self._out.write(f"{line}\n")
        return event


def cut_fields(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut every field that is too long; one that is no text, as the text that it would be shown as."""
    for key, value in event.items():
        if isinstance(value, bool | int | float | None) or key in ("exc_info", "_record"):
            continue
        text = value if isinstance(value, str) else _to_json(value)
        if len(text) > MAX_FIELD_CHARS:
            kept = MAX_FIELD_CHARS // 2 - 50  # with the words between them no longer than what is not cut
            event[key] = f"{text[:kept]} … {len(text) - 2 * kept} characters are cut here … {text[-kept:]}"
    return event


def _tame(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace what a terminal would obey in text that may come from elsewhere."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _CONTROL.sub("�", value)
    return event


def _to_json(event: Any, **options: Any) -> str:
    # Anything can be logged; what has no JSON form is shown as text rather than losing the line.
    return msgspec.json.encode(event, enc_hook=repr).decode()


_plain = structlog.dev.plain_traceback
_AS_JSON: tuple[Processor, ...] = (
    structlog.processors.format_exc_info,
    cut_fields,
    structlog.processors.JSONRenderer(serializer=_to_json),
)
