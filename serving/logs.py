"""Log lines: text for people, or one JSON object a line for machines. A record may carry ``fields``, names and values
that both forms show (``log.info("answered", extra=fields(status=200))``)."""

import functools
import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

FORMATS = ("text", "json")


def fields(**values: Any) -> dict[str, Mapping[str, Any]]:
    """Logging's ``extra``; values that are None are left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def install(form: str) -> None:
    """Log to stderr in one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Neither form shows these, and every record would look them up (Python's own advice: logging, "Optimization").
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # the line of code
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_clock(int(record.created)), record.getMessage()]
        line = " ".join([*parts, *[f"{name}={_shown(value)}" for name, value in _fields(record).items()]])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{record.msecs:03.0f}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


@functools.lru_cache(1)
def _clock(second: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(second))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text, ensure_ascii=False)
