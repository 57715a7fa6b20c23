from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.live import Live

TOOLED = "{{ range .Messages }}[{{ .Role }}:{{ .Content }}]{{ end }}{{ range .Tools }}<{{ .Function.Name }}>{{ end }}"
INFILL = "{{ if .Suffix }}<pre>{{ .Prompt }}<suf>{{ .Suffix }}<mid>{{ else }}{{ .Prompt }}{{ end }}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for a whole module, for tests that leave nothing behind in it.

    ``hello`` answers ``Hello world`` in three pieces; ``tooled`` and ``infill`` have templates for tools and suffixes.
    """
    server = Live(tmp_path_factory.mktemp("shared"))
    server.add("hello")
    server.add(
        "tooled",
        template="{{ range .Messages }}[{{ .Role }}:{{ .Content }}]{{ end }}{{ range .Tools }}<{{ .Function.Name }}>{{ end }}",
    )
    server.add("infill", template="{{ if .Suffix }}<pre>{{ .Prompt }}<suf>{{ .Suffix }}<mid>{{ else }}{{ .Prompt }}{{ end }}")
    with server.running():
        yield server


@pytest.fixture
def empty(tmp_path: Path) -> Live:
    """A server that is not running yet and has no models."""
    return Live(tmp_path)
