from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ports import kept_free
from tests.unit.api.fake_server import FakeServer
from tests.unit.cli.conftest import Cli

from puna import packed_files
from puna.cli import doctor
from puna.settings import Address

CPU = {
    "model": "Example CPU",
    "flags": ["avx2", "amx_int8"],
    "physical_cores": 4,
    "logical_cores": 8,
    "usable_cores": 6,
    "cpu_limit": 2.5,
    "threads": 2,
    "memory_bytes": 16_000_000_000,
    "memory_available_bytes": 9_000_000_000,
    "memory_limit_bytes": 8_000_000_000,
}


def _native(status: str = "ok", reason: str = "", kind: str = "compiled") -> dict[str, Any]:
    combinations = [
        {"buffer_type": "CPU", "tensor_type": "f32", "status": "ok", "reason": "", "error": 0.0},
        {"buffer_type": "AMX", "tensor_type": "f32", "status": "unsupported", "reason": "", "error": None},
        {"buffer_type": "AMX", "tensor_type": "q4_0", "status": "ok", "reason": "", "error": 0.0},
        {"buffer_type": "AMX", "tensor_type": "q4_K", "status": status, "reason": reason, "error": None},
    ]
    verdict = {"version": "9.9", "buffer_types": ["CPU", "AMX"], "combinations": combinations}
    return {
        "library": {"kind": kind, "package": "some-library==1", "folder": "/lib"},
        "build": {},
        "faster": None,
        "cpu": CPU,
        "products": "Puna's own (abacus)",
        "verdict": verdict,
    }


GPU = {"name": "G0", "library": "X", "kind": "igpu", "free": 3_000_000_000, "total": 8_000_000_000, "description": "A chip"}
GPU |= {"capability": "", "driver": ""}
KNOWN_GPU = {**GPU, "name": "G1", "kind": "gpu", "capability": "8.9", "driver": "12.4"}
NO_DEVICES: dict[str, Any] = {"gpus": [], "workers": [], "lost": [], "filters": {}, "error": ""}


def _report(native: dict[str, Any], devices: dict[str, Any] = NO_DEVICES) -> dict[str, Any]:
    return {
        "puna": "0.0",
        "python": {"version": "3.12.1", "executable": "/bin/python"},
        "native": native,
        "devices": devices,
        "store": {"path": "/models", "exists": False, "packed_bytes": 0, "free_bytes": 5_000_000_000},
        "server": {"address": "http://127.0.0.1:1", "version": None},
    }


def _printing(tmp_path: Path, code: str) -> list[str]:
    script = tmp_path / "selftest.py"
    script.write_text(code)
    return [sys.executable, "-S", str(script)]


def test_a_sound_installation_is_told_in_full() -> None:
    text = "".join(doctor.render(_report(_native())))
    for part in (
        "ggml 9.9, compiled for this processor (some-library==1)",
        "avx2 amx_int8",
        "4 physical, 6 of 8 logical usable, limited to 2.5",
        "16 GB, 9 GB available, limited to 8 GB",
        "q4_0 q4_K\n",
        "/models (not created yet)",
        "5 GB",
        "none at http://127.0.0.1:1",
        "Everything works.",
    ):
        assert part in text


def test_the_prebuilt_library_comes_with_the_command_that_makes_it_faster() -> None:
    text = "".join(doctor.render(_report(_native(kind="prebuilt"))))
    assert "ggml 9.9, prebuilt for many processors (some-library==1)" in text
    assert re.search(r"^Faster with +`puna native build`: .*4 minutes", text, re.MULTILINE)
    assert "puna native build" not in "".join(doctor.render(_report(_native())))


def test_a_build_that_is_under_way_or_failed_is_told() -> None:
    native = {**_native(kind="prebuilt"), "build": {"share": "37 %", "seconds": 81}}
    text = "".join(doctor.render(_report(native)))
    assert re.search(r"^Being compiled +37 %, after 81 s; the next start uses it$", text, re.MULTILINE)
    assert "Faster with" not in text
    text = "".join(doctor.render(_report({**native, "build": {"failed": "g++: a long story\nno room"}})))
    assert re.search(r"^Last compilation +no room$", text, re.MULTILINE)


def test_what_the_choice_costs_is_told_where_it_was_measured() -> None:
    text = "".join(doctor.render(_report({**_native(), "faster": {"product": 1.25, "attention": 1.1}})))
    assert "product 1.25 times, attention 1.1 times as fast as the prebuilt library" in text


def test_what_is_broken_is_named_with_its_reason() -> None:
    report = _report(_native("broken", "crash (SIGSEGV)"))
    assert doctor.problems(report) == ["q4_K in AMX: crash (SIGSEGV)"]
    text = "".join(doctor.render(report))
    assert "q4_0; BROKEN: q4_K" in text
    assert "Everything works" not in text


def test_workers_on_other_machines_are_told_and_those_that_are_lost_are_a_problem() -> None:
    worker = {"name": "RPC0[box:50052]", "kind": "rpc", "description": "RPC worker box:50052", "total": 8 << 30, "free": 4 << 30}
    lost = "the RPC worker attic:50052 cannot be reached: Connection refused"
    report = _report(_native(), devices={**NO_DEVICES, "workers": [worker], "lost": [lost]})
    text = "".join(doctor.render(report))
    assert re.search(r"^RPC worker box:50052 +8\.6 GB, 4\.3 GB free$", text, re.MULTILINE)
    assert doctor.problems(report) == [lost]
    assert lost in text


def test_gpus_and_what_hides_them_are_told() -> None:
    text = "".join(doctor.render(_report(_native())))
    assert re.search(r"^GPU +none$", text, re.MULTILINE)
    filters = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "1"}
    devices = {**NO_DEVICES, "gpus": [GPU, KNOWN_GPU], "filters": filters}
    text = "".join(doctor.render(_report(_native(), devices)))
    assert re.search(r"^GPU G0 +A chip \(X, integrated\), 8 GB, 3 GB free$", text, re.MULTILINE)
    assert re.search(r"^GPU G1 +A chip \(X, compute 8\.9, driver 12\.4\), 8 GB, 3 GB free$", text, re.MULTILINE)
    assert re.search(r"^CUDA_VISIBLE_DEVICES +\(empty\)$", text, re.MULTILINE)
    assert re.search(r"^HIP_VISIBLE_DEVICES +1$", text, re.MULTILINE)


def test_a_search_for_devices_that_fails_is_a_problem(tmp_path: Path) -> None:
    devices = doctor.devices_report(_printing(tmp_path, "import os; os.abort()"))
    assert doctor.problems(_report(_native(), devices)) == ["the search for devices ended with signal 6"]


def test_a_library_that_is_missing_is_a_problem_and_the_rest_is_still_shown() -> None:
    library = {"kind": "prebuilt", "package": "some-library==1", "folder": "/lib"}
    report = _report({"library": library, "cpu": CPU, "build": {}, "error": "the tensor library is not installed"})
    assert doctor.problems(report) == ["the tensor library is not installed"]
    text = "".join(doctor.render(report))
    assert "not usable (some-library==1)" in text
    assert "Example CPU" in text


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("import os; os.abort()", "ended with status -6"),
        ("import sys; sys.exit('no module')", "no module"),
        ("print([])", "something else"),
    ],
)
def test_a_self_test_that_fails_is_reported(tmp_path: Path, code: str, part: str) -> None:
    assert part in doctor.native_report(_printing(tmp_path, code))["error"]


def test_a_self_test_that_cannot_start_or_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "could not be started" in doctor.native_report([str(tmp_path / "missing")])["error"]
    monkeypatch.setattr(doctor, "_SELFTEST_TIMEOUT_S", 0.5)
    assert "no answer" in doctor.native_report(_printing(tmp_path, "import time; time.sleep(30)"))["error"]


def test_the_store_may_not_exist_yet(tmp_path: Path) -> None:
    report = doctor.store_report(tmp_path / "a" / "b")
    assert not report["exists"]
    assert report["free_bytes"] > 0
    assert doctor.store_report(tmp_path)["exists"]


def test_what_packed_weights_take_is_told(tmp_path: Path) -> None:
    assert re.search(r"^Packed weights +none kept$", "".join(doctor.render(_report(_native()))), re.MULTILINE)
    (tmp_path / packed_files.FOLDER).mkdir()
    names = [f"sha256-{'0' * 64}", packed_files.name_of_file("/downloads/model.gguf", (1, 2, 3))]
    for name in names:
        packed_files.place_of(tmp_path, name, "1-ab").write_bytes(bytes(1_500_000))
    (tmp_path / packed_files.FOLDER / "notes.txt").write_bytes(bytes(4_000_000))
    report = {**_report(_native()), "store": doctor.store_report(tmp_path)}
    assert re.search(r"^Packed weights +3 MB$", "".join(doctor.render(report)), re.MULTILINE)


def test_a_running_server_is_found(fake: FakeServer) -> None:
    assert doctor.server_report(fake.address)["version"]


def test_nobody_listening_is_no_error(tmp_path: Path) -> None:
    with kept_free() as port:
        report = doctor.server_report(Address(port=port))
    assert report["version"] is None
    assert report["error"]


def test_the_command_reports_this_machine_as_json(puna: Cli) -> None:
    done = puna("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["native"]["verdict"]["version"]
    assert report["server"]["version"]
    assert report["devices"]["error"] == ""


def test_the_command_prints_a_table(puna: Cli) -> None:
    done = puna("doctor")
    assert done.returncode == 0
    assert "Weights in CPU" in done.stdout
    assert done.stdout.endswith("Everything works.\n")
