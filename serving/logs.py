"""Log lines: text for people, or one JSON object a line for machines. A record may carry ``fields``, names and values
that both forms show (``log.info("answered", extra=fields(status=200))``)."""

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
    handler.setFormatter(_Json() if form == "json" else _Text("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # Neither form shows these, and every record would look them up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return getattr(record, "fields", {})


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={_shown(value)}" for name, value in _fields(record).items())])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{record.msecs:03.0f}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **_fields(record)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _shown(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.3f}" if isinstance(value, float) else str(value)
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text, ensure_ascii=False)
