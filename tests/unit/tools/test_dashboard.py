"""The dashboard asks for what a server counts."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tools import dashboard

from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live


def test_the_file_is_up_to_date() -> None:
    """`make docs` writes it."""
    assert dashboard.FILE.read_text() == dashboard.text()


def test_every_metric_is_one_that_a_server_has(tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("hello")
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI})
        text = live.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    known = {sample.name for family in families for sample in family.samples} | {family.name for family in families}
    # A counter that nothing was counted for yet has a family, but no sample.
    known |= {f"{family.name}_total" for family in families if family.type == "counter"}
    queries = [query for panel in dashboard.PANELS for query in panel.queries.values()]
    asked = {name for query in queries for name in re.findall(r"\b((?:puna|process)_[a-z_]+)", query)}
    assert len(asked) > 15
    assert asked <= known
    labelled = {sample.name for family in families for sample in family.samples if "model" in sample.labels}
    for query in queries:
        for name in re.findall(r"\b(puna_[a-z_]+)\{model", query):
            assert name in labelled or name not in {sample.name for family in families for sample in family.samples}
