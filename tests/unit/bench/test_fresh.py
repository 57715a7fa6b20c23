"""The machine without anything that `python -m bench.fresh` makes of this one: what it knows of this one's network."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from bench import fresh

NETWORK = {
    "PIP_RETRIES": "2",
    "SSL_CERT_FILE": "/etc/own certificates.crt",
    "NODE_EXTRA_CA_CERTS": "/etc/own certificates.crt",
    "NPM_CONFIG_REGISTRY": "https://registry.test",
    "npm_config_cafile": "/etc/own.crt",
    "https_proxy": "http://proxy.test:3128",
    "NO_PROXY": "127.0.0.1",
}
ITS_OWN = {"PUNA_LIBRARY": "compiled", "XDG_CACHE_HOME": "/cache", "CXX": "g++", "PIPELINE": "1"}


def test_it_reaches_what_this_machine_reaches_and_knows_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*fresh.network_settings()]:
        monkeypatch.delenv(name)
    for name, value in (NETWORK | ITS_OWN).items():
        monkeypatch.setenv(name, value)
    last = fresh.script(tmp_path, "test", keeps_compiler=False, library=None).splitlines()[-1]
    words = shlex.split(last)
    given = dict(word.split("=", 1) for word in words[words.index("-i") + 1 : words.index("timeout")])
    assert {name: value for name, value in given.items() if name in NETWORK | ITS_OWN} == NETWORK
