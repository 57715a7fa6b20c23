"""What drivers say of GPUs. NVIDIA's is a small library written here, with the documented prototypes; AMD's are files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from puna import wire
from puna.llm.discovery import look, look_once
from puna.native import drivers
from puna.native.drivers import CUDA, DriverError, Facts, amd_facts
from tests import needs
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
PLACE = "0000:c1:00"

INIT = "int cuInit(unsigned flags) { return flags == 0 ? %s : 1; }"
# Two cards: number 5 at c1 and number 6 at c2, whatever the order in which ggml lists them.
BY_PLACE = """
int cuDeviceGetByPCIBusId(int *device, const char *place) {
    if (strcmp(place, "0000:c1:00.0") == 0) { *device = 5; return 0; }
    if (strcmp(place, "0000:c2:00.0") == 0) { *device = 6; return 0; }
    return 101;
}"""
ATTRIBUTE = """
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 75) { *value = device == 5 ? 8 : 12; return 0; }
    if (attribute == 76) { *value = device == 5 ? 9 : 0; return 0; }
    return 1;
}"""
VERSION = "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }"
CRASH = "int cuInit(unsigned flags) { raise(SIGSEGV); return 0; }"
HANG = "int cuInit(unsigned flags) { for (;;) pause(); }"


def build(folder: Path, *functions: str) -> Path:
    """A driver with these functions alone, as libcuda.so.1 in *folder*."""
    compiler = needs.c_compiler()
    source = folder / "driver.c"
    source.write_text("#include <signal.h>\n#include <string.h>\n#include <unistd.h>\n" + "\n".join(functions) + "\n")
    library = folder / drivers.CUDA_LIBRARY
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", source, "-o", library], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert built.returncode == 0, built.stderr
    return library


def test_a_card_is_known_by_its_place(tmp_path: Path) -> None:
    driver = CUDA(str(build(tmp_path, INIT % 0, BY_PLACE, ATTRIBUTE, VERSION)))
    assert driver.facts(PLACE) == Facts("8.9", "12.4")
    assert driver.facts("0000:c2:00") == Facts("12.0", "12.4")
    with pytest.raises(DriverError, match="cuDeviceGetByPCIBusId answers with error 101"):
        driver.facts("0000:c3:00")


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ([INIT % 100, BY_PLACE, ATTRIBUTE, VERSION], "cuInit answers with error 100"),
        ([BY_PLACE, ATTRIBUTE, VERSION], "undefined symbol: cuInit"),
        ([INIT % 0, ATTRIBUTE, VERSION], "undefined symbol: cuDeviceGetByPCIBusId"),
        ([INIT % 0, BY_PLACE, VERSION], "undefined symbol: cuDeviceGetAttribute"),
        ([INIT % 0, BY_PLACE, ATTRIBUTE], "undefined symbol: cuDriverGetVersion"),
        ([INIT % 0, BY_PLACE, ATTRIBUTE.replace("8", "0"), VERSION], "0.9 is impossible"),
        ([INIT % 0, BY_PLACE, ATTRIBUTE.replace("76", "77"), VERSION], "cuDeviceGetAttribute answers with error 1"),
        ([INIT % 0, BY_PLACE, ATTRIBUTE, VERSION.replace("return 0", "return 999")], "answers with error 999"),
    ],
)
def test_a_driver_that_refuses_or_lacks_something_says_why(tmp_path: Path, functions: list[str], reason: str) -> None:
    with pytest.raises(DriverError, match=reason):
        CUDA(str(build(tmp_path, *functions))).facts(PLACE)


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_library_that_is_missing_or_none_says_so(tmp_path: Path, content: bytes | None) -> None:
    library = tmp_path / drivers.CUDA_LIBRARY
    if content is not None:
        library.write_bytes(content)
    with pytest.raises(DriverError, match=str(library)):
        CUDA(str(library)).facts(PLACE)


@pytest.mark.parametrize(
    ("pci_id", "place"),
    [
        ("0000:c1:00.0", PLACE),
        ("0000:C1:00.0", PLACE),
        ("0000:c1:00.0-v1", PLACE),  # one of two devices that ggml makes of a card
        ("00010000:c1:00.0", "00010000:c1:00"),
        ("0000:c1:00", PLACE),
        ("", ""),
        ("0000:c1:00.0;rm", ""),
        ("gpu0", ""),
    ],
)
def test_places_as_libraries_write_them(pci_id: str, place: str) -> None:
    assert drivers._place(pci_id) == place


def node(folder: Path, number: int, text: str) -> None:
    (folder / str(number)).mkdir()
    (folder / str(number) / "properties").write_text(text)


def test_the_kernel_tells_what_amd_s_cards_run(tmp_path: Path) -> None:
    """A processor is a node, too; two cards differ in the bus, two more in the domain alone."""
    node(tmp_path, 0, "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\ngfx_target_version 0\n")
    node(tmp_path, 1, "simd_count 192\nlocation_id 49408\ndomain 0\ngfx_target_version 110000\n")
    node(tmp_path, 2, "simd_count 440\nlocation_id 768\ngfx_target_version 90010\n")
    node(tmp_path, 3, "simd_count 304\nlocation_id 768\ndomain 1\ngfx_target_version 90402\n")
    (tmp_path / "version").write_text("6.10.5\n")

    def told(place: str, version: str = "version") -> Facts:
        return amd_facts(place, tmp_path, tmp_path / version)

    assert told(PLACE) == Facts("gfx1100", "6.10.5")
    assert told("0000:03:00", "absent") == Facts("gfx90a")
    assert told("0001:03:00", "absent") == Facts("gfx942")
    with pytest.raises(DriverError, match="no such GPU"):
        told("0000:04:00")


@pytest.mark.parametrize("text", ["", "location_id\n", "location_id x\ngfx_target_version -1\n", "\x00\xff" * 100_000])
def test_files_that_say_nothing_sensible_are_passed_over(tmp_path: Path, text: str) -> None:
    node(tmp_path, 0, text)
    (tmp_path / "1" / "properties").mkdir(parents=True)
    node(tmp_path, 2, "location_id 49408\ngfx_target_version 100300\n")
    assert amd_facts(PLACE, tmp_path, tmp_path / "absent") == Facts("gfx1030")


def test_a_machine_without_amd_s_driver(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="no such GPU"):
        amd_facts(PLACE, tmp_path / "absent")


def discovery(folder: Path, *devices: str) -> list[str]:
    """The whole process, with these synthetic devices and the driver that lies in *folder*."""
    environ = {"SYNTHETIC_GPUS": ",".join(devices), "SYNTHETIC_GPUS_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    given = [f"{name}={value}" for name, value in environ.items()]
    return ["env", *given, sys.executable, "-m", "tests.synthetic_gpus", "discover"]


CARDS = ("CUDA0:1000:library=CUDA:at=0000-c2-00.0", "CUDA1:1000:library=CUDA:at=0000-c1-00.0")


def gpus(seen: wire.Discovery) -> dict[str, tuple[str, str, str]]:
    return {d.name: (d.library, d.capability, d.driver) for d in seen.devices if d.kind == "gpu"}


def test_the_search_tells_what_the_driver_says(tmp_path: Path) -> None:
    build(tmp_path, INIT % 0, BY_PLACE, ATTRIBUTE, VERSION)
    seen = look_once(discovery(tmp_path, *CARDS, "SIM0:1000:at=0000-c3-00.0", "CUDA2:1000:library=CUDA"))
    assert seen.error == ""
    assert gpus(seen) == {
        "CUDA0": ("CUDA", "12.0", "12.4"),
        "CUDA1": ("CUDA", "8.9", "12.4"),
        "SIM0": ("SIM", "", ""),
        "CUDA2": ("CUDA", "", ""),  # ggml did not say where it sits
    }


def test_the_search_tells_integrated_gpus_from_others(tmp_path: Path) -> None:
    seen = look_once(discovery(tmp_path, "SIM0:1000", "SIM1:500:i"))
    found = [(d.name, d.kind, d.total >> 20, d.free >> 20) for d in seen.devices if d.kind != "cpu"]
    assert found == [("SIM0", "gpu", 1000, 1000), ("SIM1", "igpu", 500, 500)]


def test_a_driver_that_refuses_costs_the_search_nothing_else(tmp_path: Path) -> None:
    build(tmp_path, INIT % 999)
    seen = look_once(discovery(tmp_path, *CARDS))
    assert seen.error == ""
    assert gpus(seen) == {name: ("CUDA", "", "") for name in ("CUDA0", "CUDA1")}


def test_a_driver_that_crashes_or_hangs_costs_the_search_and_nothing_else(tmp_path: Path) -> None:
    build(tmp_path, CRASH)
    assert "ended with signal 11" in look_once(discovery(tmp_path, *CARDS)).error
    build(tmp_path, HANG)
    assert "no answer within 5 s" in uvloop.run(look(discovery(tmp_path, *CARDS), timeout_s=5.0)).error
