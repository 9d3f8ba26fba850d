"""Log set-up of the service and of env servers: pretty on a terminal, JSON lines otherwise.

Events are dotted and in the past tense (`env.ready`); everything else is a field. Records of the standard
library's `logging` (aiohttp, an environment's own) take the same road, so that a log has one
format. Everything goes to standard error. Must stay light: env servers of any interpreter import it.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "pretty", "json"]

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_QUIET = ("asyncio", "aiohttp.access")


def configure_logging(
    level: str = "info",
    format: LogFormat = "auto",  # noqa: A002  named as in the configuration
    *,
    stream: TextIO | None = None,
    **bound: Any,
) -> None:
    """Set up structlog and the standard library; `bound` fields are added to every event of the process."""
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
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if pretty else "iso", utc=not pretty, key="time"),
    ]
    ends: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=_plain, timestamp_key="time")]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
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


class _Bound:
    """Adds the fields of the process to every event; what the event says itself wins."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in self._fields.items():
            event.setdefault(key, value)
        return event


def _to_json(event: Any, **options: Any) -> str:
    # Anything can be logged; what has no JSON form is shown as text rather than losing the line.
    return msgspec.json.encode(event, enc_hook=repr).decode()


_plain = structlog.dev.plain_traceback
