"""Messages on stderr as lines of JSON, for systems that collect logs."""

import json
import os
from datetime import UTC, datetime
from typing import Any


def logs_json() -> bool:
    """Whether messages on stderr are lines of JSON: TRANSFERRY_LOG=json."""
    return os.environ.get("TRANSFERRY_LOG") == "json"


def log_every() -> float:
    """Seconds between two lines of progress: TRANSFERRY_LOG_EVERY, or 30."""
    try:
        return float(os.environ.get("TRANSFERRY_LOG_EVERY", ""))
    except ValueError:
        return 30.0


def log_line(message: str, level: str = "info", **fields: Any) -> str:
    """Returns a message as a line of JSON, with the time in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {"time": now, "level": level, "message": message, **fields}
    return json.dumps(record, ensure_ascii=False)


def as_logged(message: str, level: str = "info", **fields: Any) -> str:
    """Returns a message as it is printed on stderr."""
    return log_line(message, level, **fields) if logs_json() else message
