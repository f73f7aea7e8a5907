"""The one error of a conversion, and reading JSON with it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class ConvertError(ValueError):
    """A conversion cannot be done; the text names the file, field or flag and what would be right."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a ConvertError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConvertError(f"{path.parent} has no {path.name}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConvertError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names in one line, sorted; a long list is cut and says so."""
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
