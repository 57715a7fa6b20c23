"""The server's log as machines read it."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import pytest

from puna.server.process.log import JSONLines
from puna.settings import load
from tests.e2e.test_first_light import serving
from tests.patience import wait_until


def written(record: logging.LogRecord) -> dict[str, object]:
    line = JSONLines().format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    return found


def test_a_record_is_an_object() -> None:
    record = logging.LogRecord("puna.x", logging.WARNING, "x.py", 1, "%d\nlines", (2,), None)
    record.fields = {"path": Path("/x"), "status": 200}
    entry = written(record)
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "puna.x", "2\nlines")
    assert (entry["path"], entry["status"]) == ("/x", 200)
    assert "request_id" not in entry
    assert str(entry["time"]).endswith("Z")
    assert str(entry["time"]).startswith(time.strftime("%Y-%m-%dT", time.gmtime(record.created)))


def test_an_exception_is_one_text() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        record = logging.LogRecord("puna.x", logging.ERROR, "x.py", 1, "failed", (), sys.exc_info())
    assert "ValueError: no\nway" in str(written(record)["exception"])


def test_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    assert load({}).log_format == "text"
    assert load({"PUNA_LOG_FORMAT": "JSON"}).log_format == "json"
    assert load({"PUNA_LOG_FORMAT": "xml"}).log_format == "text"
    assert "PUNA_LOG_FORMAT='xml' is not usable" in caplog.text


def test_every_line_of_a_server_is_json_and_names_its_request(tmp_path: Path) -> None:
    with serving(tmp_path, PUNA_LOG_FORMAT="json", OLLAMA_DEBUG="1") as server:
        server.client.post("/api/show", json={"model": "nope"}, headers={"X-Request-Id": "one"})
        server.client.get("/nowhere%0A2026-01-01 INFO all is well", headers={"X-Request-Id": "two"})
        log = tmp_path / "server.log"
        wait_until(lambda: '"two"' in log.read_text())
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    by_id = {entry["request_id"]: entry for entry in entries if "status" in entry}
    assert by_id["one"] | {"method": "POST", "path": "/api/show", "status": 404} == by_id["one"]
    assert by_id["one"]["seconds"] >= 0
    assert by_id["two"]["path"] == "'/nowhere\\n2026-01-01 INFO all is well'"
