"""Log lines: one event a line, with key=value fields and the request they belong to.

    log = logging.getLogger(__name__)
    event(log, "placed", replica="r1", predicted_tokens=1024)

Fields are numbers, names and reasons, never the text of a prompt or an answer.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Literal, TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="")

LONGEST_FIELD = 300  # characters; a line stays a line


def setup(
    level: str,
    format: Literal["auto", "json", "text"],
    process: str,
    stream: TextIO | None = None,
) -> None:
    """Send all log lines of this process to `stream` (stderr), in place of earlier handlers."""
    stream = stream or sys.stderr
    text = format == "text" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter(process) if text else JsonFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def event(
    logger: logging.Logger,
    name: str,
    /,
    severity: int = logging.INFO,
    error: BaseException | None = None,
    **fields: object,
) -> None:
    """Log the event `name` with its fields, and the traceback of `error`."""
    if logger.isEnabledFor(severity):
        # A name of its own: logging refuses `extra` keys such as `name` or `args`.
        logger.log(severity, "%s", name, exc_info=error, extra={"fields": fields}, stacklevel=2)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record) | {
            "time": _utc(record, "%Y-%m-%dT%H:%M:%S") + "Z",
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """`12:00:00.000 info router placed replica=r1 request_id=7f`, with tracebacks below."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        parts = [_utc(record, "%H:%M:%S"), record.levelname.lower(), self.process]
        parts.append(_one_line(record.getMessage()))
        parts += [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {key: _short(value) for key, value in getattr(record, "fields", {}).items()}
    if request := request_id.get():
        fields.setdefault("request_id", request)
    return fields


def _utc(record: logging.LogRecord, pattern: str) -> str:
    return time.strftime(pattern, time.gmtime(record.created)) + f".{int(record.msecs):03d}"


def _short(value: object) -> object:
    if isinstance(value, bool | int | float | None):
        return value
    text = str(value)
    return text if len(text) <= LONGEST_FIELD else text[:LONGEST_FIELD] + "…"


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)
