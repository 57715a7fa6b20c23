from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.errors import NativeLibraryError
from puna.native import products
from puna.native.ggml import ggml_type_traits
from puna.native.kernels import library, race
from puna.native.kernels.attention_trial import OwnAttention
from puna.native.kernels.build import LIBRARY
from puna.native.kernels.library import Kernels
from tests import needs, packed
from tests.packed import ALL_TYPES, FLOATS, TYPES, TYPES_OF_256, WITH_GGML, block_of, error, matrix, rounded_for

needs.kernels()
KERNELS = library.kernels()
AVAILABLE = KERNELS.available()
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 64, 65, 130)

WITH_EXACT = 2e-2


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    before = KERNELS.instructions
    yield KERNELS
    KERNELS.use(before)


@pytest.fixture(scope="module")
def cpu() -> products.Cpu:
    return products.Cpu()


def activations(n: int, n_in: int, seed: int = 0) -> packed.Floats:
    """Normal, with one in 64 six times as large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, n_in), np.float32)
    return np.where(rng.integers(0, 64, x.shape) == 0, 6 * x, x).astype(np.float32)


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_products_are_ggml_s(kernels: Kernels, cpu: products.Cpu, name: str, instructions: str) -> None:
    tensor_type, block = ALL_TYPES[name], block_of(name)
    kernels.use(instructions)
    for n_in, n_rows in ((block, 1), (3 * block, 16), (2 * block, 40), (5 * block, 55)):
        data, _ = products.random_weights(tensor_type, n_in * n_rows)
        x = rounded_for(name, activations(max(COUNTS), n_in))
        expected = packed.ggml_product(cpu, tensor_type, data, x, n_rows)
        with matrix(kernels, tensor_type, data, n_in, n_rows) as weights:
            for n in COUNTS:
                assert error(weights.times(x[:n]), expected[:n]) < WITH_GGML, (n_in, n_rows, n)


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("name", sorted(FLOATS))
def test_rows_of_floats_may_have_any_length(kernels: Kernels, cpu: products.Cpu, name: str, instructions: str) -> None:
    """What stands in memory behind the last of them is not read."""
    tensor_type = FLOATS[name]
    kernels.use(instructions)
    for n_in, n_rows in ((1, 1), (31, 16), (33, 40), (588, 55), (100, 17)):
        data, values = products.random_weights(tensor_type, -(-n_in * n_rows // 32) * 32)
        data, values = data[: data.size // values.size * n_in * n_rows], values[: n_in * n_rows].reshape(n_rows, n_in)
        x = rounded_for(name, activations(max(COUNTS), n_in))
        expected = packed.ggml_product(cpu, tensor_type, data, x, n_rows)
        with matrix(kernels, tensor_type, data, n_in, n_rows) as weights:
            for n in COUNTS:
                assert error(weights.times(x[:n]), expected[:n]) < WITH_GGML, (n_in, n_rows, n)
        bytes_ = packed.pack(kernels, tensor_type, data, n_in, n_rows)
        found = np.full(n_in + 1, 12345.0, np.float32)
        kernels.puna_unpack(tensor_type, bytes_.ctypes.data, n_in, n_rows - 1, found.ctypes.data)
        assert np.array_equal(found, [*values[-1], 12345.0])


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_products_are_close_to_exact_ones(kernels: Kernels, name: str, instructions: str) -> None:
    tensor_type = ALL_TYPES[name]
    kernels.use(instructions)
    data, values = products.random_weights(tensor_type, 768 * 48)
    x = np.random.default_rng(1).standard_normal((33, 768), np.float32)
    with matrix(kernels, tensor_type, data, 768, 48) as weights:
        assert error(weights.times(x), x.astype(np.float64) @ values.reshape(48, 768).T) < WITH_EXACT


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ALL_TYPES)),
    n_blocks=st.integers(1, 9),
    n_rows=st.integers(1, 70),
    n=st.integers(1, 140),
    instructions=st.sampled_from(AVAILABLE),
)
def test_every_size_is_the_reference_s(name: str, n_blocks: int, n_rows: int, n: int, instructions: str) -> None:
    tensor_type, n_in = ALL_TYPES[name], n_blocks * block_of(name)
    data, values = products.random_weights(tensor_type, n_in * n_rows)
    x = activations(n, n_in, seed=n)
    sizes = np.abs(x) @ np.abs(values.reshape(n_rows, n_in)).T  # a sum may be almost nothing beside what it is made of
    before = KERNELS.instructions
    try:
        with matrix(KERNELS, tensor_type, data, n_in, n_rows) as weights:
            KERNELS.use("portable")
            expected = weights.times(x)
            KERNELS.use(instructions)
            assert (np.abs(weights.times(x) - expected) <= WITH_GGML * sizes).all()
    finally:
        KERNELS.use(before)


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("name", sorted({*ALL_TYPES} - {"f32"}))  # whose sums are never of whole numbers
def test_the_largest_sums_fit(kernels: Kernels, name: str, byte: int, instructions: str) -> None:
    """Every weight at one end of its range and every activation at the end of its own, of one sign or of both."""
    tensor_type, n_in, n_rows = ALL_TYPES[name], 512, 16
    block, n_bytes = (int(v) for v in _block(tensor_type))
    data = np.full((n_in * n_rows // block, n_bytes), byte, np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for begin in {
        "q2_K": (80, 82),
        "q3_K": (108,),
        "q6_K": (208,),
        "q4_1": (0, 2),
        "q5_1": (0, 2),
        "q4_K": (0, 2),
        "q5_K": (0, 2),
    }.get(name, (0,)):
        data[:, begin : begin + 2] = scale
    values = products.decode(tensor_type, data.reshape(-1), n_in * n_rows).reshape(n_rows, n_in).astype(np.float64)
    kernels.use(instructions)
    with matrix(kernels, tensor_type, data.reshape(-1), n_in, n_rows) as weights:
        for pattern in ((1.0,), (-1.0,), (1.0, -1.0), (1.0, 1.0, -1.0, -1.0)):
            x = np.resize(np.array(pattern, np.float32), (9, n_in))
            difference = np.abs(weights.times(x) - x @ values.T).max()
            assert difference <= 1e-3 + 2e-3 * np.abs(values).max() * n_in


def _block(tensor_type: int) -> tuple[int, int]:
    traits: ggml_type_traits = products._traits(tensor_type)
    return traits.blck_size, traits.type_size


@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_rows_come_back(name: str) -> None:
    tensor_type, n_in, n_rows = ALL_TYPES[name], 3 * block_of(name), 21
    data, values = products.random_weights(tensor_type, n_in * n_rows)
    whole = packed.pack(KERNELS, tensor_type, data, n_in, n_rows)
    row = np.empty(n_in, np.float32)
    for i in range(n_rows):
        KERNELS.puna_unpack(tensor_type, whole.ctypes.data, n_in, i, row.ctypes.data)
        np.testing.assert_allclose(row, values.reshape(n_rows, n_in)[i], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_a_matrix_may_be_packed_in_parts(name: str) -> None:
    tensor_type, n_in, n_rows = ALL_TYPES[name], 2 * block_of(name), 48
    data, _ = products.random_weights(tensor_type, n_in * n_rows)
    whole = packed.pack(KERNELS, tensor_type, data, n_in, n_rows)
    assert np.array_equal(whole, packed.pack(KERNELS, tensor_type, data, n_in, n_rows, parts=(5, 20, 23)))


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_a_token_s_result_does_not_depend_on_its_batch(kernels: Kernels, name: str, instructions: str) -> None:
    tensor_type = ALL_TYPES[name]
    kernels.use(instructions)
    data, _ = products.random_weights(tensor_type, 512 * 32)
    x = activations(70, 512)
    with matrix(kernels, tensor_type, data, 512, 32) as weights:
        alone = np.concatenate([weights.times(x[i : i + 1]) for i in range(len(x))])
        assert np.array_equal(weights.times(x), alone)
        assert np.array_equal(weights.times(x[:13]), alone[:13])


def test_activations_that_are_zero_or_vast(kernels: Kernels) -> None:
    """A scale that half precision cannot hold stays a number, and no number comes out of nothing."""
    for name in ("q4_1", "q8_0", "q6_K"):
        tensor_type = ALL_TYPES[name]
        data, values = products.random_weights(tensor_type, 512 * 16)
        for instructions in AVAILABLE:
            kernels.use(instructions)
            with matrix(kernels, tensor_type, data, 512, 16) as weights:
                assert not weights.times(np.zeros((3, 512), np.float32)).any()
                vast = np.full((1, 512), 1e9, np.float32)
                assert error(weights.times(vast), vast.astype(np.float64) @ values.reshape(16, 512).T) < WITH_EXACT


@pytest.mark.parametrize("instructions", AVAILABLE)
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_what_is_no_number_stays_none(kernels: Kernels, name: str, instructions: str) -> None:
    """Wherever it is; the tokens beside it are as they were."""
    tensor_type = ALL_TYPES[name]
    kernels.use(instructions)
    data, _ = products.random_weights(tensor_type, 512 * 16)
    x = activations(6, 512)
    with matrix(kernels, tensor_type, data, 512, 16) as weights:
        expected = weights.times(x)
        for value in (np.nan, np.inf, -np.nan):
            for place in (0, 17, 263, 511):
                spoilt = x.copy()
                spoilt[2, place] = value
                found = weights.times(spoilt)
                assert not np.isfinite(found[2]).any(), (value, place)
                assert np.array_equal(np.delete(found, 2, 0), np.delete(expected, 2, 0))


def test_what_is_packed_is_little_larger_than_the_file() -> None:
    for name, tensor_type in (TYPES | TYPES_OF_256).items():
        block, n_bytes = _block(tensor_type)
        ratio = KERNELS.puna_packed_bytes(tensor_type, 2048, 2048) / (2048 * 2048 // block * n_bytes)
        assert 1 <= ratio < 1.06, (name, ratio)
        assert KERNELS.puna_packed_bytes(tensor_type, 2048, 33) % 64 == 0


def test_a_change_of_the_layout_gets_another_number() -> None:
    """Files of packed weights outlive the library that wrote them."""
    digest = hashlib.sha256()
    for _, tensor_type in sorted(ALL_TYPES.items()):
        n_weights, n_bytes = _block(tensor_type)
        data = np.random.default_rng(0).integers(0, 256, 48 * 512 // n_weights * n_bytes, np.uint8)
        memory = packed.aligned(KERNELS.puna_packed_bytes(tensor_type, 512, 48))
        KERNELS.puna_pack(tensor_type, data.ctypes.data, 512, 0, 48, memory.ctypes.data)
        digest.update(memory.tobytes())
    assert (library.LAYOUT, digest.hexdigest()[:16]) == ("1", "10403d8b6e9ae3b7")


def test_other_types_and_shapes_are_not_packed() -> None:
    assert KERNELS.puna_packed_bytes(products.weight_types()["iq3_s"], 256, 16) == 0
    assert KERNELS.puna_packed_bytes(ALL_TYPES["q8_0"], 48, 16) == 0
    assert KERNELS.puna_packed_bytes(ALL_TYPES["q4_K"], 96, 16) == 0
    assert KERNELS.puna_packed_bytes(ALL_TYPES["q4_0"], 48, 16) == 0


def test_the_best_instructions_are_chosen_and_others_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AVAILABLE[-1] == "portable"
    monkeypatch.delenv(library.FORCED, raising=False)
    assert Kernels(str(LIBRARY)).instructions == AVAILABLE[0]
    monkeypatch.setenv(library.FORCED, "portable")
    assert Kernels(str(LIBRARY)).instructions == "portable"
    monkeypatch.setenv(library.FORCED, "abacus")
    with pytest.raises(NativeLibraryError, match=r"abacus: this processor has .*portable"):
        Kernels(str(LIBRARY))
    KERNELS.use(AVAILABLE[0])  # the choice is the library's, which is opened once


@pytest.mark.parametrize("rivals", library.RIVALS.items())
@pytest.mark.parametrize("wins", [0, 1])
def test_of_rivals_the_faster_is_chosen(monkeypatch: pytest.MonkeyPatch, rivals: tuple[str, str], wins: int) -> None:
    faster = rivals[wins]
    monkeypatch.delenv(library.FORCED, raising=False)
    monkeypatch.setattr(Kernels, "available", lambda _self: [*rivals, "portable"])
    monkeypatch.setattr(Kernels, "use", lambda self, name: setattr(self, "instructions", name))
    monkeypatch.setattr(Kernels, "use_both", lambda self, fast, _settled: setattr(self, "instructions", fast))
    measured: list[str] = []

    def fastest(names: list[str], _use: object, work: Callable[[], None]) -> str:
        work()
        measured.extend(names)
        return faster

    monkeypatch.setattr(library, "fastest", fastest)
    assert Kernels(str(LIBRARY)).instructions == faster
    assert measured == [*rivals]


def test_which_of_rivals_is_faster_changes_no_bit(kernels: Kernels, cpu: products.Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race of milliseconds ends one way today and another tomorrow, and no text may tell."""
    best, slow = AVAILABLE[0], "portable"
    tensor_type, n_in, n_rows = FLOATS["bf16"], 96, 40
    data, _ = products.random_weights(tensor_type, n_in * n_rows)
    x = activations(9, n_in)
    monkeypatch.delenv(library.FORCED, raising=False)
    monkeypatch.setattr(library, "RIVALS", {best: slow})
    found = []
    for winner in (best, slow):
        monkeypatch.setattr(library, "fastest", lambda _names, _use, _work, winner=winner: winner)
        own = Kernels(str(LIBRARY))
        assert own.instructions == winner
        attended = [OwnAttention(cpu, own).error(0, FLOATS["f16"], n) for n in (1, 33)]
        with matrix(own, tensor_type, data, n_in, n_rows) as weights:
            found.append((attended, weights.times(x).tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("rivals", library.RIVALS.items())
@pytest.mark.parametrize("name", sorted(ALL_TYPES))
def test_rivals_multiply_with_the_same_bits(kernels: Kernels, name: str, rivals: tuple[str, str]) -> None:
    """All but weights in BF16, which the first one always multiplies. Tiles are compared by an emulation of them."""
    tensor_type, n_in, n_rows = ALL_TYPES[name], 3 * block_of(name), 55
    data, _ = products.random_weights(tensor_type, n_in * n_rows)
    x = activations(17, n_in)
    found = set()
    for one in rivals:
        if one in AVAILABLE:
            kernels.use_both(one, AVAILABLE[0])
            with matrix(kernels, tensor_type, data, n_in, n_rows) as weights:
                found.add(b"".join(weights.times(x[:n]).tobytes() for n in (1, 5, 17)))
    assert len(found) <= 1


def test_where_there_are_dot_products_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.FORCED, raising=False)
    for available in (["avx512_vnni", "avx512", "avx2", "portable"], ["avx2", "portable"], ["avx512", "portable"]):
        monkeypatch.setattr(Kernels, "available", lambda _self, names=available: names)
        monkeypatch.setattr(Kernels, "use", lambda self, name: setattr(self, "instructions", name))
        monkeypatch.setattr(library, "fastest", None)
        assert Kernels(str(LIBRARY)).instructions == available[0]


def test_the_fastest_is_the_one_that_takes_the_shortest_time(kernels: Kernels) -> None:
    with closing(race.Product(kernels)) as product:
        assert race.fastest(["portable", AVAILABLE[0]], kernels.use, product) == AVAILABLE[0]


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    with pytest.raises(NativeLibraryError, match="another version"):
        Kernels(str(LIBRARY))
