"""Every variable that Ollama's users know either does what it says or is listed as one that does not."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from puna import settings
from puna.settings import Settings, without_effect

# All that Ollama documents or reads, in two of its states.
SUPPORTED = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OLLAMA_MAX_TRANSFER_STREAMS",
    "OLLAMA_CLOUD_BASE_URL",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_TOKEN",
    "OLLAMA_HOST",
    "OLLAMA_MODELS",
    "OLLAMA_KEEP_ALIVE",
    "OLLAMA_LOAD_TIMEOUT",
    "OLLAMA_MAX_LOADED_MODELS",
    "OLLAMA_NUM_PARALLEL",
    "OLLAMA_MAX_QUEUE",
    "OLLAMA_CONTEXT_LENGTH",
    "OLLAMA_FLASH_ATTENTION",
    "OLLAMA_KV_CACHE_TYPE",
    "OLLAMA_GPU_OVERHEAD",
    "OLLAMA_SCHED_SPREAD",
    "OLLAMA_NEW_ENGINE",
    "OLLAMA_ORIGINS",
    "OLLAMA_NOPRUNE",
    "OLLAMA_DEBUG",
    "OLLAMA_NOHISTORY",
]
ELSEWHERE = [
    "OLLAMA_EDITOR",
    "VISUAL",
    "EDITOR",
    "TERM",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GGML_VK_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION",
    "RAY_ADDRESS",
    "RAY_USAGE_STATS_ENABLED",
]
UNSUPPORTED = [
    "OLLAMA_MULTIUSER_CACHE",
    "OLLAMA_VULKAN",
    "OLLAMA_IGPU_ENABLE",
    "OLLAMA_GO_TEMPLATE",
    "LLAMA_ARG_FIT",
    "LLAMA_ARG_FIT_TARGET",
    "OLLAMA_LLM_LIBRARY",
    "OLLAMA_NO_CLOUD",
    "OLLAMA_REMOTES",
    "OLLAMA_DEBUG_LOG_REQUESTS",
    "OLLAMA_AUTH",
    "OLLAMA_API_KEY",
    "OLLAMA_EXPERIMENT",
    "OLLAMA_LIBRARY_PATH",
    "OLLAMA_TMPDIR",
]


def test_every_variable_stands_in_one_table() -> None:
    read = {item.metadata["env"] for item in fields(Settings)}
    assert {name for name in read if not name.startswith("PUNA_")} == set(SUPPORTED)
    assert set(settings.ELSEWHERE) == set(ELSEWHERE)
    assert set(settings.UNSUPPORTED) == set(UNSUPPORTED)


def test_every_setting_is_used() -> None:
    """By code outside its table."""
    folder = Path(settings.__file__).parent
    code = "\n".join(path.read_text() for path in folder.rglob("*.py") if path.name != "settings.py")
    names = [item.name for item in fields(Settings)]
    assert [name for name in names if not re.search(rf"(settings|load)(\(\))?\.{name}\b", code)] == []


def test_the_help_lists_them_all() -> None:
    done = subprocess.run([sys.executable, "-m", "puna", "serve", "--help"], capture_output=True, text=True, check=True)
    own, _, rest = done.stdout.partition("Passed on to what reads them:")
    passed_on, _, unsupported = rest.partition("Ollama's, not supported:")
    for expected, text in ((SUPPORTED, own), (ELSEWHERE, passed_on), (UNSUPPORTED, unsupported)):
        assert set(expected) <= set(re.findall(r"[A-Z_]{4,}", text))


@pytest.mark.parametrize(
    ("text", "is_usable"),
    [
        ("https://mirror.example/", True),
        ("http://localhost:8080", True),
        ("http://127.0.0.1:8080", True),
        ("http://mirror.example", False),
        ("mirror.example", False),
        ("file:///etc/passwd", False),
    ],
)
def test_addresses_that_get_credentials_are_protected(text: str, is_usable: bool, caplog: pytest.LogCaptureFixture) -> None:
    found = settings.load({"HF_ENDPOINT": text, "OLLAMA_CLOUD_BASE_URL": text, "OLLAMA_MAX_TRANSFER_STREAMS": "0"})
    assert (found.hub_endpoint == text.rstrip("/"), found.cloud_base_url == text.rstrip("/")) == (is_usable, is_usable)
    assert found.max_transfer_streams == 4
    assert ("HF_ENDPOINT" in caplog.text) is not is_usable


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_effect_is_said(name: str) -> None:
    [line] = without_effect({name: "1", "PATH": "/bin"})
    assert line.startswith(f"{name} has no effect: ")
    assert without_effect({name: ""}) == []


def test_a_former_name_works_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert settings.load({"PUNA_ATTIC": "2M"}).host_cache == 2 << 20
    assert "PUNA_ATTIC is called PUNA_HOST_CACHE now" in caplog.text
    caplog.clear()
    assert settings.load({"PUNA_ATTIC": "many"}).host_cache is None
    assert "PUNA_ATTIC='many' is not usable" in caplog.text
    caplog.clear()
    assert settings.load({"PUNA_ATTIC": "2M", "PUNA_HOST_CACHE": "3M"}).host_cache == 3 << 20
    assert caplog.text == ""


@pytest.mark.parametrize(
    "text", ["a:b:c", "[::1", "user:pw@host:1", "http://h:80:90", "a\tb", "two words", "h?x=1", "h:port", "h:-1", "h:70000"]
)
def test_an_address_that_is_none_is_told_and_not_used(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert settings.load({"OLLAMA_HOST": text}).host == settings.Address()
    assert f"OLLAMA_HOST={text!r} is not usable" in caplog.text


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("::1", "http://[::1]:11434"),
        ("[::1]:80", "http://[::1]:80"),
        ("fe80::1%eth0", "http://[fe80::1%eth0]:11434"),
        (":1234", "http://0.0.0.0:1234"),
        ("https://example.com/under/", "https://example.com:443/under"),
        ("höst_1", "http://höst_1:11434"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert settings.parse_address(text).url == url


def test_no_former_name_is_a_setting_of_today() -> None:
    names = [item.metadata["env"] for item in fields(Settings)]
    former = [name for item in fields(Settings) if (name := item.metadata["former_name"])]
    assert former
    assert not {*names, *settings.ELSEWHERE, *settings.UNSUPPORTED} & set(former)


def test_workers_are_names_and_ports() -> None:
    found = settings.load({"PUNA_RPC": " box:50052 , 192.168.1.7:1,box:50052, a.example.org:65535 "})
    assert found.rpc == ("box:50052", "192.168.1.7:1", "a.example.org:65535")
    assert settings.load({}).rpc == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("box", "'box' is not host:port"),
        (":50052", "':50052' is not host:port"),
        ("box:", "the port of 'box:' is not a number from 1 to 65535"),
        ("box:0", "the port of 'box:0' is not a number from 1 to 65535"),
        ("box:65536", "the port of 'box:65536' is not a number from 1 to 65535"),
        ("box:5e3", "the port of 'box:5e3' is not a number"),
        ("box:\u0665\u0660", "is not a number from 1 to 65535"),
        ("http://box:50052", "'http://box:50052' has a scheme, where only host:port belongs"),
        ("[::1]:50052", "'[::1]:50052' is an address of IPv6"),
        ("::1:50052", "'::1:50052' is an address of IPv6"),
        ("box;reboot:1", "'box;reboot:1' is not host:port"),
        ("box]:1", "'box]:1' is not host:port"),
        ("-box:1", "'-box:1' is not host:port"),
        ("good:1,bad", "'bad' is not host:port"),
        (",".join(f"box{i}:1" for i in range(17)), "more than 16 workers"),
    ],
)
def test_what_is_no_worker_is_refused_with_what_is_wrong(text: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert settings.load({"PUNA_RPC": text}).rpc == ()
    assert said in caplog.text
    assert "PUNA_RPC=" in caplog.text
