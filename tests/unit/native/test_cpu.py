from __future__ import annotations

from pathlib import Path

import pytest

from puna.native import cpu

X86 = """processor\t: 0
model name\t: Example CPU 9000 @ 2.00GHz
flags\t\t: fpu sse4_2 avx2 avx512f amx_tile amx_int8

processor\t: 1
model name\t: Other
flags\t\t: fpu
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd4f\n"


def test_the_first_processor_of_an_x86_list_is_read() -> None:
    model = cpu.parse_cpuinfo(X86)
    assert model.name == "Example CPU 9000 @ 2.00GHz"
    assert model.mattering_flags == ("sse4_2", "avx2", "avx512f", "amx_tile", "amx_int8")


def test_arm_lists_its_flags_as_features() -> None:
    assert cpu.parse_cpuinfo(ARM).mattering_flags == ("asimddp", "i8mm")


def test_apple_flags_get_linux_names() -> None:
    text = "machdep.cpu.brand_string: Apple M9\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
    assert cpu._darwin_model(text) == cpu.Model("Apple M9", frozenset({"asimddp"}))


def test_the_key_depends_on_every_flag_but_not_on_their_order() -> None:
    model = cpu.parse_cpuinfo(X86)
    assert model.key == cpu.parse_cpuinfo(X86.replace("fpu sse4_2 avx2", "avx2 fpu sse4_2")).key
    assert model.key != cpu.parse_cpuinfo(X86.replace("fpu sse4_2", "sse4_2")).key
    assert model.key != cpu.parse_cpuinfo(X86.replace("9000", "9001")).key


def _group(root: Path, path: str, *, cpu_max: str | None = None, memory_max: str | None = None) -> None:
    group = root / path
    group.mkdir(parents=True, exist_ok=True)
    if cpu_max is not None:
        (group / "cpu.max").write_text(cpu_max + "\n")
    if memory_max is not None:
        (group / "memory.max").write_text(memory_max + "\n")


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    _group(tmp_path, "a/b", cpu_max="max 100000", memory_max="8000")
    _group(tmp_path, "a", cpu_max="150000 100000", memory_max="max")
    _group(tmp_path, ".", memory_max="9000")
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cpu.cgroup_limits(membership, tmp_path) == cpu.Limits(1.5, 8000)


def test_a_path_of_the_host_still_finds_the_limits_of_the_mount(tmp_path: Path) -> None:
    _group(tmp_path, ".", cpu_max="200000 100000", memory_max="4096")
    membership = tmp_path / "membership"
    membership.write_text("0::/host/only/path\n")
    assert cpu.cgroup_limits(membership, tmp_path) == cpu.Limits(2.0, 4096)


@pytest.mark.parametrize("text", ["", "7:cpu:/old\n", "0::/\n"])
def test_no_limits_where_no_group_sets_one(tmp_path: Path, text: str) -> None:
    membership = tmp_path / "membership"
    membership.write_text(text)
    _group(tmp_path, ".", cpu_max="nonsense", memory_max="")
    assert cpu.cgroup_limits(membership, tmp_path) == cpu.Limits()
    assert cpu.cgroup_limits(tmp_path / "missing", tmp_path) == cpu.Limits()


@pytest.mark.parametrize(
    ("physical", "usable", "limit", "expected"),
    [(8, 16, None, 8), (8, 4, None, 4), (8, 16, 2.5, 2), (8, 16, 0.5, 1), (1, 1, 64.0, 1)],
)
def test_threads_stay_within_what_the_process_may_run(physical: int, usable: int, limit: float | None, expected: int) -> None:
    assert cpu.threads(physical, usable, limit) == expected


def test_facts_of_this_machine_are_plausible() -> None:
    facts = cpu.facts()
    assert facts.model
    assert 1 <= facts.threads <= facts.usable_cores <= facts.logical_cores
    assert 0 < facts.memory_available_bytes <= facts.memory_bytes
    assert set(facts.as_json()) >= {"model", "flags", "threads", "memory_limit_bytes"}
