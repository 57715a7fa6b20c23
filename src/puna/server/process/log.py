"""The server's log: lines for people, or with PUNA_LOG_FORMAT=json one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from puna.server.http.request_id import InLog, current
from puna.settings import Settings

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"


class JSONLines(logging.Formatter):
    """Time (UTC), level, logger and message; the request's id where there is a request; what ``extra={"fields": …}`` says;
    the traceback of an exception as one text.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds, fraction = divmod(record.created, 1)
        entry: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(fraction * 1e6):06d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current():
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def log_to_stderr(settings: Settings) -> None:
    handler = logging.StreamHandler()
    handler.addFilter(InLog())
    handler.setFormatter(JSONLines() if settings.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.DEBUG if settings.debug else logging.INFO, handlers=[handler])
    for noisy in ("asyncio", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.INFO if settings.debug else logging.WARNING)
