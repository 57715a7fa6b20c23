"""``puna doctor``: whether this installation works, and what it found on this machine.

The tensor library is examined in a process of its own (puna.native.report), as everywhere outside a runner: where the
library is broken, that process dies and this one reports it.
"""

from __future__ import annotations

import json as json_format
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from puna import __version__, packed_files
from puna.cli.connect import settings
from puna.cli.format import human_bytes
from puna.cli.table import table
from puna.cli.terminal import safe
from puna.llm import discovery
from puna.settings import Address

SELFTEST = (sys.executable, "-m", "puna.native.report", "--json", "--facts")
_SELFTEST_TIMEOUT_S = 600.0
_SERVER_TIMEOUT_S = 5.0
_SHOWN_STDERR_CHARS = 500
BUILD = "puna native build"
_ORIGINS = {
    "prebuilt": "prebuilt for many processors",
    "compiled": "compiled for this processor",
    "installed": "compiled when it was installed",
    "named": "named by PUNA_LIBRARY",
}


def doctor(json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Check this installation: libraries, processor, memory, GPUs, workers on other machines, store.

    Ends with exit status 1 when something does not work.
    """
    report = examine(settings().host, settings().models)
    if json:
        print(json_format.dumps(report, indent=2, ensure_ascii=False))
    else:
        sys.stdout.write(safe("".join(render(report)), sys.stdout))
    if problems(report):
        raise typer.Exit(1)


def examine(
    host: Address, models: Path, selftest: Sequence[str] = SELFTEST, search: Sequence[str] = discovery.COMMAND
) -> dict[str, Any]:
    return {
        "puna": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "native": native_report(selftest),
        "devices": devices_report(search),
        "store": store_report(models),
        "server": server_report(host),
    }


def native_report(command: Sequence[str]) -> dict[str, Any]:
    """What the self-test's process printed, or why it printed nothing, as ``error``."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=_SELFTEST_TIMEOUT_S
        )
        report = json_format.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"the self-test gave no answer within {_SELFTEST_TIMEOUT_S:.0f} s"}
    except OSError as error:
        return {"error": f"the self-test could not be started: {error}"}
    except ValueError:
        return {"error": f"the self-test ended with status {done.returncode}: {done.stderr.strip()[-_SHOWN_STDERR_CHARS:]}"}
    return report if isinstance(report, dict) else {"error": "the self-test printed something else than a report"}


def devices_report(command: Sequence[str]) -> dict[str, Any]:
    """What the tensor library can compute on beside the processor, searched for in a process of its own."""
    found = msgspec.to_builtins(discovery.look_once(command))
    gpus = [device for device in found["devices"] if device["kind"] in ("gpu", "igpu")]
    workers = [device for device in found["devices"] if device["kind"] == "rpc"]
    return {"gpus": gpus, "workers": workers, "lost": found["lost"], "filters": found["filters"], "error": found["error"]}


def store_report(models: Path) -> dict[str, Any]:
    """Where models go, what packed weights take there, and the space left.

    A folder that does not exist yet will lie on its parent's disk.
    """
    existing = next((folder for folder in (models, *models.parents) if folder.is_dir()), None)
    try:
        free = shutil.disk_usage(existing).free if existing else None
    except OSError:
        free = None
    packed = packed_files.n_bytes(models)
    return {"path": str(models), "exists": models.is_dir(), "packed_bytes": packed, "free_bytes": free}


def server_report(host: Address) -> dict[str, Any]:
    import httpx

    report: dict[str, Any] = {"address": host.client_url, "version": None}
    try:
        reply = httpx.get(f"{host.client_url}/api/version", timeout=_SERVER_TIMEOUT_S, trust_env=not host.is_loopback)
        report["version"] = str(reply.raise_for_status().json()["version"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        report["error"] = str(error) or type(error).__name__
    except (ValueError, KeyError, TypeError):
        report["error"] = "it does not answer like a server of models"
    return report


def problems(report: Mapping[str, Any]) -> list[str]:
    """What does not work; a server that is not running is no problem, since commands start their own."""
    native, devices = report["native"], report["devices"]
    if "error" in native:
        return [str(native["error"])]
    if devices["error"]:
        return [str(devices["error"])]
    broken = [c for c in native["verdict"]["combinations"] if c["status"] == "broken"]
    return [*devices["lost"]] + [f"{c['tensor_type']} in {c['buffer_type']}: {c['reason']}" for c in broken]


def render(report: Mapping[str, Any]) -> Iterator[str]:
    native, store, server = report["native"], report["store"], report["server"]
    rows = [
        ("Puna", report["puna"]),
        ("Python", f"{report['python']['version']} ({report['python']['executable']})"),
        *_native_rows(native),
        *_device_rows(report["devices"]),
        ("Store", store["path"] + ("" if store["exists"] else " (not created yet)")),
        ("Packed weights", human_bytes(store["packed_bytes"]) if store["packed_bytes"] else "none kept"),
        ("Free disk", "unknown" if store["free_bytes"] is None else human_bytes(store["free_bytes"])),
        ("Server", f"{server['version']} at {server['address']}" if server["version"] else f"none at {server['address']}"),
    ]
    yield table(rows)
    found = problems(report)
    yield "\nEverything works.\n" if not found else "\nProblems:\n" + "".join(f"  {problem}\n" for problem in found)


def _native_rows(native: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "cpu" in native:
        yield from _cpu_rows(native["cpu"])
    library = native.get("library", {})
    if "folder" in library:
        yield "Library path", library["folder"]
    if "verdict" not in native:
        yield "Library", f"not usable ({library.get('package', 'none')})"
        return
    verdict = native["verdict"]
    yield "Library", f"ggml {verdict['version']}, {_ORIGINS.get(library['kind'], library['kind'])} ({library['package']})"
    yield from _speed_rows(native)
    yield "Matrix products", native["products"]
    for buffer_type in verdict["buffer_types"]:
        yield f"Weights in {buffer_type}", _tested(buffer_type, verdict["combinations"])


def _speed_rows(native: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the choice of library costs: measured where there are two, and the one command that makes it faster."""
    if faster := native.get("faster"):
        ratios = ", ".join(f"{what} {ratio:g} times" for what, ratio in faster.items())
        yield "Compiled for it", f"{ratios} as fast as the prebuilt library, by a short measurement"
    under_way = native.get("build", {})
    if "seconds" in under_way:
        share = f"{under_way['share']}, " if under_way["share"] else ""
        yield "Being compiled", f"{share}after {under_way['seconds']} s; the next start uses it"
    elif native["library"]["kind"] == "prebuilt" and not faster:
        yield "Faster with", f"`{BUILD}`: compiles it for this processor, once, about 4 minutes; needs a C++ compiler"
    if "failed" in under_way:
        yield "Last compilation", under_way["failed"].splitlines()[-1]


def _device_rows(devices: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for gpu in devices["gpus"]:
        kind = ", integrated" if gpu["kind"] == "igpu" else ""
        memory = f"{human_bytes(gpu['total'])}, {human_bytes(gpu['free'])} free"
        code = f", compute {gpu['capability']}" if gpu["capability"] else ""
        driver = f", driver {gpu['driver']}" if gpu["driver"] else ""
        yield f"GPU {gpu['name']}", f"{gpu['description']} ({gpu['library']}{kind}{code}{driver}), {memory}"
    if not devices["gpus"]:
        yield "GPU", "none"
    for worker in devices["workers"]:
        yield worker["description"], f"{human_bytes(worker['total'])}, {human_bytes(worker['free'])} free"
    for name, value in devices["filters"].items():
        yield name, value or "(empty)"


def _tested(buffer_type: str, combinations: Sequence[Mapping[str, Any]]) -> str:
    """The tensor types that work there, and those that do not."""
    types: dict[str, list[str]] = {"ok": [], "broken": [], "unsupported": []}
    for item in combinations:
        if item["buffer_type"] == buffer_type:
            types[item["status"]].append(item["tensor_type"])
    working = " ".join(types["ok"]) or "none"
    return f"{working}; BROKEN: {' '.join(types['broken'])}" if types["broken"] else working


def _cpu_rows(cpu: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "Processor", cpu["model"]
    yield "Extensions", " ".join(cpu["flags"]) or "none known"
    limit = f", limited to {cpu['cpu_limit']:g}" if cpu["cpu_limit"] is not None else ""
    yield "Cores", f"{cpu['physical_cores']} physical, {cpu['usable_cores']} of {cpu['logical_cores']} logical usable{limit}"
    yield "Threads", str(cpu["threads"])
    limit = f", limited to {human_bytes(cpu['memory_limit_bytes'])}" if cpu["memory_limit_bytes"] is not None else ""
    yield "Memory", f"{human_bytes(cpu['memory_bytes'])}, {human_bytes(cpu['memory_available_bytes'])} available{limit}"
