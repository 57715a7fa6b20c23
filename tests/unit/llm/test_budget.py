from __future__ import annotations

import pytest

from puna.host import Memory
from puna.llm.budget import Held, available
from puna.llm.layout import GPU
from puna.wire import Device, DeviceMemory, MemoryReport
from tests.unit.llm.fake_machine import gpu

HOST = Memory(total=1000, free=800, swap_free=50)


def held(on_host: int, private: int, **on_gpus: int) -> Held:
    devices = [DeviceMemory(device=d, weights=[n], cache=[0], graph=0, is_gpu=True) for d, n in on_gpus.items()]
    cpu = DeviceMemory(device="CPU", weights=[on_host], cache=[0], graph=0)
    return Held(MemoryReport(devices=[*devices, cpu], input_weights=0), private)


@pytest.mark.parametrize(
    ("models", "free"),
    [
        ([], 800),
        ([held(100, private=100)], 800),  # the system no longer calls it free
        ([held(100, private=30)], 730),  # a cache that is mostly untouched, or pages of the file
        ([held(100, private=30), held(200, private=0)], 530),
        ([held(100, private=300)], 800),  # more than it said: that is gone already
        ([held(5000, private=0)], 0),
    ],
)
def test_what_was_promised_is_not_free_even_if_it_looks_so(models: list[Held], free: int) -> None:
    assert available([], HOST, models).host == free


@pytest.mark.parametrize(
    ("device", "models", "is_fresh", "free"),
    [
        (gpu("A", 100, free=90), [], True, 90),
        (gpu("A", 100, free=90), [held(0, 0, A=30)], True, 70),  # it has not taken all of it yet
        (gpu("A", 100, free=20), [held(0, 0, A=30)], True, 20),  # others use the GPU, too
        (gpu("A", 100, free=20), [held(0, 0, A=30)], False, 70),  # 20 was true once
        (gpu("A", 100, free=20), [], False, 100),
        (gpu("A", 100), [held(0, 0, A=80), held(0, 0, A=80)], True, 0),
        (gpu("A", 100), [held(0, 0, B=80)], True, 100),
    ],
)
def test_a_gpu_s_free_memory(device: Device, models: list[Held], is_fresh: bool, free: int) -> None:
    assert available([device], HOST, models, is_fresh=is_fresh).gpus == (GPU("A", "CUDA", free),)


def test_an_integrated_gpu_has_no_more_than_the_host() -> None:
    found = available([gpu("I", 5000, is_integrated=True)], HOST, [held(100, private=0)])
    assert found.gpus == (GPU("I", "CUDA", 700, is_integrated=True),)
    assert (found.host, found.swap) == (700, 50)
