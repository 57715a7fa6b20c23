"""One table of environment settings: name, type, default, help; and what other variables that people know mean here.

Values are trimmed of spaces and quotes. A value that cannot be used is reported once as a warning that names the
variable, the value and the default used instead; it never stops the program.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

FOREVER = float("inf")


@dataclass(frozen=True)
class Address:
    """Where the server listens, or where a client finds it."""

    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = 11434
    path: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def client_url(self) -> str:
        """The URL to connect to: a server that listens on all interfaces is reached over loopback."""
        if self.host in ("0.0.0.0", "::"):
            loopback = "127.0.0.1" if self.host == "0.0.0.0" else "::1"
            return Address(self.scheme, loopback, self.port, self.path).url
        return self.url

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_here(self) -> bool:
        """Whether a server that is reached there runs on this machine."""
        return self.is_loopback or self.host in ("0.0.0.0", "::")


_NO_HOST = re.compile(r"[\s\x00-\x1f\x7f@?#\[\]\\]")


def parse_address(text: str) -> Address:
    """``[scheme://]host[:port][/path]`` as Ollama reads OLLAMA_HOST.

    Errors: ValueError when the port is not a number in 0..65535, or the host has what no host has.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest, default_port = "http", text, 11434
    else:
        default_port = 443 if scheme == "https" else 80
    location, _, path = rest.partition("/")
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", location)
    if match:
        host, port = match.group(1), match.group(2)
    elif location.count(":") == 1:
        host, _, port = location.partition(":")
        if not host:
            host = "0.0.0.0"
    else:
        host, port = location, None
    if _NO_HOST.search(host) or (":" in host and not _is_ipv6(host)):
        raise ValueError(f"{host!r} is no host")
    if port is None or port == "":
        number = default_port
    else:
        if not (port.isascii() and port.isdigit()):
            raise ValueError(f"port {port!r} is no number")
        number = int(port)
        if not 0 <= number <= 65535:
            raise ValueError(f"port {number} is out of range")
    return Address(scheme, host or "127.0.0.1", number, "/" + path.strip("/") if path.strip("/") else "")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


MAX_DURATION_CHARS = 100
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Go's duration syntax (``1h30m``, ``300ms``, ``-1m``, ``0``) in seconds; anything negative means forever.

    Errors: ValueError with Go's wording.
    """
    if len(text) > MAX_DURATION_CHARS:
        raise ValueError(f'time: invalid duration "{text[:MAX_DURATION_CHARS]}..."')
    body = text.lstrip("+-")
    if body == "0":
        return 0.0
    parts = re.findall(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", body)
    if not parts or "".join(n + u for n, u in parts) != body:
        if re.fullmatch(r"\d+\.?\d*", body):
            raise ValueError(f'time: missing unit in duration "{text}"')
        raise ValueError(f'time: invalid duration "{text}"')
    seconds = sum(float(n) * _UNITS[u] for n, u in parts)
    return FOREVER if text.startswith("-") and seconds > 0 else seconds


def _keep_alive(text: str) -> float:
    try:
        seconds = float(int(text))
    except ValueError:
        return parse_duration(text)
    return FOREVER if seconds < 0 else seconds


def _timeout(text: str) -> float:
    seconds = _keep_alive(text)
    return seconds if seconds > 0 else FOREVER


def _boolean(text: str) -> bool:
    return text not in ("0", "f", "F", "false", "FALSE", "False")


def _unsigned(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ValueError("not an unsigned number")
    return int(text)


def parse_bytes(text: str) -> int:
    """Errors: ValueError that says what it is not."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:I?B)?", text.upper())
    if not match:
        raise ValueError("not a number of bytes, with K, M, G or T for multiples of 1024")
    return int(match.group(1)) << 10 * " KMGT".index(match.group(2) or " ")


def _streams(text: str) -> int:
    number = _unsigned(text)
    if not 1 <= number <= 64:
        raise ValueError("not between 1 and 64")
    return number


def _web_address(text: str) -> str:
    parts = urlsplit(text)
    is_here = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not parts.hostname or parts.scheme not in (("https", "http") if is_here else ("https",)):
        raise ValueError("not the address of a server, with https unless it is on this machine")
    return text.rstrip("/")


MAX_WORKERS = 16


def _workers(text: str) -> tuple[str, ...]:
    """``host:port,host:port``, as the tensor library takes them: names, and addresses of IPv4."""
    workers = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for worker in workers:
        host, _, port = worker.rpartition(":")
        if "://" in worker:
            raise ValueError(f"{worker!r} has a scheme, where only host:port belongs")
        if ":" in host or "[" in worker:
            raise ValueError(f"{worker!r} is an address of IPv6, which the tensor library does not connect to")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", host):
            raise ValueError(f"{worker!r} is not host:port")
        if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
            raise ValueError(f"the port of {worker!r} is not a number from 1 to 65535")
    if len(workers) > MAX_WORKERS:
        raise ValueError(f"more than {MAX_WORKERS} workers")
    return workers


def _origins(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _log_format(text: str) -> str:
    if text.lower() not in ("text", "json"):
        raise ValueError("neither text nor json")
    return text.lower()


def _cluster_route(text: str) -> str:
    if text.lower() not in ("prefix", "turns"):
        raise ValueError("neither prefix nor turns")
    return text.lower()


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _hub_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"


def _setting(name: str, parse: Callable[[str], Any], default: Any, help_text: str, former_name: str = "") -> Any:
    """*former_name*: a variable that still works where the new one is not set."""
    meta = {"env": name, "parse": parse, "help": help_text, "former_name": former_name}
    if callable(default):
        return field(default_factory=default, metadata=meta)
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Settings:
    host: Address = _setting("OLLAMA_HOST", parse_address, Address(), "address to listen on, and where clients connect")
    models: Path = _setting("OLLAMA_MODELS", _path, lambda: Path.home() / ".ollama" / "models", "where models are stored")
    keep_alive: float = _setting("OLLAMA_KEEP_ALIVE", _keep_alive, 300.0, "how long an idle model stays loaded")
    load_timeout: float = _setting("OLLAMA_LOAD_TIMEOUT", _timeout, 300.0, "how long a load may go without progress")
    stall_timeout: float = _setting(
        "PUNA_STALL_TIMEOUT", _timeout, 300.0, "how long a model may compute without a result before it is restarted"
    )
    max_loaded_models: int = _setting("OLLAMA_MAX_LOADED_MODELS", _unsigned, 0, "models loaded at once (0: 3 per device)")
    warm_spare: bool = _setting("PUNA_WARM_SPARE", _boolean, True, "keep an idle process ready, so that models load faster")
    num_parallel: int = _setting("OLLAMA_NUM_PARALLEL", _unsigned, 0, "requests computed at once per model (0: automatic)")
    max_queue: int = _setting("OLLAMA_MAX_QUEUE", _unsigned, 512, "requests that may wait before new ones get 503")
    max_connections: int = _setting("PUNA_MAX_CONNECTIONS", _unsigned, 0, "open connections at once (0: 4096, or as files allow)")
    max_connections_per_peer: int = _setting(
        "PUNA_MAX_CONNECTIONS_PER_PEER", _unsigned, 0, "of them, those of one address (0: three quarters)"
    )
    client_timeout: float = _setting(
        "PUNA_CLIENT_TIMEOUT", _timeout, 60.0, "how long a client may leave a request half sent or an answer unread"
    )
    gpu_overhead: int = _setting("OLLAMA_GPU_OVERHEAD", _unsigned, 0, "bytes to leave free on each GPU")
    sched_spread: bool = _setting("OLLAMA_SCHED_SPREAD", _boolean, False, "spread each model over all GPUs")
    context_length: int = _setting(
        "OLLAMA_CONTEXT_LENGTH", _unsigned, 0, "default context (0: 4096; from 23 GiB of GPUs 32768, from 47 GiB 262144)"
    )
    token_gap: float = _setting(
        "PUNA_TOKEN_GAP",
        _timeout,
        0.15,
        "how long answers may wait for their next token while prompts are computed (0: any time)",
    )
    build_ahead: bool = _setting(
        "PUNA_BUILD_AHEAD", _boolean, False, "build the next step's graph while one is computed, for a GPU or a spare core"
    )
    kernels: bool = _setting("PUNA_KERNELS", _boolean, True, "multiply quantised matrices on the CPU with Puna's own products")
    kernel_instructions: str = _setting(
        "PUNA_KERNEL_INSTRUCTIONS", str, "", "what those compute with: avx2, avx512 and so on (unset: the fastest there is)"
    )
    library: str = _setting(
        "PUNA_LIBRARY",
        str,
        "auto",
        "tensor library: auto (compiled for this CPU, else prebuilt), compiled, prebuilt, or a path",
    )
    packed_cache: int = _setting(
        "PUNA_PACKED_CACHE",
        parse_bytes,
        32 << 30,
        "bytes on disk for packed weights, so that large models load at once (0: none)",
    )
    rpc: tuple[str, ...] = _setting(
        "PUNA_RPC", _workers, (), "other machines to compute on, as host:port,host:port; each runs puna rpc-worker"
    )
    flash_attention: bool = _setting("OLLAMA_FLASH_ATTENTION", _boolean, True, "compute attention in one fused operation")
    kv_cache_type: str = _setting("OLLAMA_KV_CACHE_TYPE", str, "f16", "type of the key/value cache: f16, q8_0 or q4_0")
    host_cache: int | None = _setting(
        "PUNA_HOST_CACHE",
        parse_bytes,
        None,
        "memory of each model for prefixes that lose their place in its cache (unset: 1/16 of all)",
        former_name="PUNA_ATTIC",
    )
    image_cache: int = _setting(
        "PUNA_IMAGE_CACHE",
        parse_bytes,
        256 << 20,
        "memory of each model for images that it has encoded, for those who send them again",
    )
    origins: tuple[str, ...] = _setting("OLLAMA_ORIGINS", _origins, (), "further origins that browsers may call from")
    api_keys: tuple[str, ...] = _setting(
        "PUNA_API_KEYS", _origins, (), "keys that requests must bring (comma list; none: all may), each with scopes if it has any"
    )
    api_keys_file: Path | None = _setting("PUNA_API_KEYS_FILE", _path, None, "file with such keys, one in a line")
    isolate_keys: bool | None = _setting(
        "PUNA_ISOLATE_KEYS",
        _boolean,
        None,
        "1: no key finds in the cache what others computed (unset: if there are several)",
    )
    allow_no_keys: bool = _setting("PUNA_ALLOW_NO_KEYS", _boolean, False, "let other machines use the server without keys")
    no_history: bool = _setting("OLLAMA_NOHISTORY", _boolean, False, "keep no history of the interactive prompt")
    max_transfer_streams: int = _setting("OLLAMA_MAX_TRANSFER_STREAMS", _streams, 4, "connections over which one file is pulled")
    cloud_base_url: str = _setting(
        "OLLAMA_CLOUD_BASE_URL", _web_address, "https://ollama.com", "where puna signin goes: another address, for tests"
    )
    hub_endpoint: str = _setting("HF_ENDPOINT", _web_address, "https://huggingface.co", "the hub that hf.co/... names")
    hub_home: Path = _setting("HF_HOME", _path, _hub_home, "where the hub's own tools keep files, which puna list --all shows")
    hub_cache: Path | None = _setting("HF_HUB_CACHE", _path, None, "the same for models alone (unset: the folder hub in HF_HOME)")
    hub_token: str = _setting("HF_TOKEN", str, "", "for what the hub shows to those only who may see it; sent nowhere else")
    no_prune: bool = _setting("OLLAMA_NOPRUNE", _boolean, False, "keep blobs that no model uses")
    new_engine: bool | None = _setting(
        "OLLAMA_NEW_ENGINE", _boolean, None, "1: only Puna's own engine, 0: only libllama (unset: whichever supports the model)"
    )
    cluster_route: str = _setting(
        "PUNA_CLUSTER_ROUTE",
        _cluster_route,
        "prefix",
        "on many machines: prefix, or turns to spread requests whatever they begin with",
    )
    otlp_endpoint: str = _setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        str,
        "",
        "who collects traces over HTTP, such as http://localhost:4318 (needs puna[traces])",
    )
    log_format: str = _setting("PUNA_LOG_FORMAT", _log_format, "text", "lines of the server's log: text, or json objects")
    debug: bool = _setting("OLLAMA_DEBUG", _boolean, False, "log in detail")


# Read by what they are made for, which is not Puna's own code.
ELSEWHERE = {
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        "which GPUs their driver shows",
    ),
    "HSA_OVERRIDE_GFX_VERSION": "which code ROCm takes a GPU to run; with _0, _1 and so on for one of them",
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"), "the way out for downloads; in lower case as well"),
    **dict.fromkeys(("OLLAMA_EDITOR", "VISUAL", "EDITOR"), "the editor that Ctrl-G opens in the interactive session"),
    "RAY_ADDRESS": "the Ray cluster that puna serve --ray joins (unset: the one on this machine, else one is started)",
    "RAY_USAGE_STATS_ENABLED": "whether Ray reports its use to its makers; Puna sets it to 0 where it is unset",
    "TERM": "what the terminal understands",
}

# Ollama's, without effect here, and why or what to use instead.
UNSUPPORTED = {
    "OLLAMA_MULTIUSER_CACHE": "every request finds the longest prefix that anything in the cache has",
    "OLLAMA_VULKAN": "Vulkan is used where the library has it; GGML_DISABLE_VULKAN=1 switches it off",
    "OLLAMA_IGPU_ENABLE": "integrated GPUs are used like others; the variables of their drivers hide them",
    "OLLAMA_GO_TEMPLATE": "a template of the Modelfile counts, else the model file's own",
    "LLAMA_ARG_FIT": "every load is fitted to the memory",
    "LLAMA_ARG_FIT_TARGET": "OLLAMA_GPU_OVERHEAD leaves memory free",
    "OLLAMA_LLM_LIBRARY": "PUNA_LIBRARY",
    "OLLAMA_LIBRARY_PATH": "PUNA_LIBRARY",
    "OLLAMA_TMPDIR": "TMPDIR",
    "OLLAMA_NO_CLOUD": "there is no cloud",
    "OLLAMA_REMOTES": "there are no remote models",
    "OLLAMA_AUTH": "requests are not signed; PUNA_API_KEYS",
    "OLLAMA_API_KEY": "for client libraries; PUNA_API_KEYS",
    "OLLAMA_DEBUG_LOG_REQUESTS": "requests are never written down",
    "OLLAMA_EXPERIMENT": "there are no experiments to choose",
}


def without_effect(environ: Mapping[str, str] | None = None) -> list[str]:
    """Of the variables that are set, those that people may take for settings; empty values ask for nothing."""
    source = os.environ if environ is None else environ
    return [f"{name} has no effect: {why}" for name, why in UNSUPPORTED.items() if source.get(name)]


def keys_in(path: Path) -> list[str]:
    """The lines of a file of API keys, with the scopes that stand in them; what follows a ``#`` is a comment.

    Errors: OSError; UnicodeDecodeError.
    """
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read every setting from the environment (or from *environ*)."""
    source = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for item in fields(Settings):
        name, text = _given(source, item.metadata["env"], item.metadata["former_name"])
        if not text:
            continue
        try:
            values[item.name] = item.metadata["parse"](text)
        except ValueError as error:
            log.warning("%s=%r is not usable (%s), using the default", name, text, error)
    return Settings(**values)


def _given(source: Mapping[str, str], name: str, former_name: str) -> tuple[str, str]:
    """The variable that sets a value, and its text without spaces and quotes."""
    text = _stripped(source, name)
    former = "" if text or not former_name else _stripped(source, former_name)
    if former:
        log.warning("%s is called %s now; the former name still works", former_name, name)
        return former_name, former
    return name, text


def _stripped(source: Mapping[str, str], name: str) -> str:
    return source.get(name, "").strip().strip("\"'").strip()
