"""The ggml backend: where weights go, what memory is reported, and what a file that cannot run is told."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import pytest

from puna.errors import FileFormatError, LoadError, MissingTensors, NotFound, PunaError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.writer import GGUFWriter
from puna.kvcache.cache import Limits
from puna.ml.backend import Use
from puna.ml.ggml import devices as devices_module
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.ggml.devices import cpu
from puna.ml.ggml.weights import Weights
from puna.ml.tensor import DType, Gate
from puna.model.registry import open_model
from puna.native import structs
from puna.native.pages import can_be_huge
from puna.wire import DeviceLayers
from tests.puna_engine import PunaEngine
from tests.smaps import flags_of
from tests.tiny import write_llama


def opened(path: Path, **options: Any) -> tuple[GGMLBackend, Any]:
    backend = GGMLBackend(path, n_threads=1, **options)
    try:
        return backend, open_model(backend.file, backend, 256)
    except BaseException:
        backend.close()
        raise


# Small ones of these are copied, to lie together.
JOINED = ("attn_q.", "attn_k.", "attn_v.", "ffn_gate.", "ffn_up.")


def test_devices_are_told_while_a_load_joins_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare may be asked for them while it is taken."""
    joined: dict[str, Any] = {}

    class Joining(list[Any]):
        def __iter__(self) -> Any:
            joined["b:1"] = []
            return super().__iter__()

    joined["a:1"] = Joining()
    monkeypatch.setattr(devices_module, "_joined", joined)
    assert devices_module.devices()[-1].is_cpu


def test_plain_weights_are_pages_of_the_file(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="f16")
    backend, _ = opened(path, use_mmap=True)
    sizes = {name: t.n_bytes for name, t in backend.file.tensors.items()}
    memory = backend.memory()
    assert memory.mapped == pytest.approx(sum(n for name, n in sizes.items() if not any(j in name for j in JOINED)), rel=0.01)
    assert memory.input_weights + sum(memory.devices[-1].weights) == pytest.approx(sum(sizes.values()), rel=0.01)
    backend.close()


def test_large_matrices_are_not_copied_to_lie_together(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", n_layers=1, n_embd=1024, n_ff=2048)
    backend, _ = opened(path, use_mmap=True)
    assert backend.memory().mapped == pytest.approx(sum(t.n_bytes for t in backend.file.tensors.values()), rel=0.01)
    backend.close()


def test_nothing_is_mapped_when_that_is_not_wanted(tmp_path: Path) -> None:
    backend, _ = opened(write_llama(tmp_path / "m.gguf", dtype="f16"), use_mmap=False)
    backend.allocate()
    backend.load(lambda _share: None)
    assert backend.memory().mapped == 0
    backend.close()


def test_a_small_file_is_read_into_huge_pages_and_a_larger_one_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="f16")
    for limit in (path.stat().st_size, path.stat().st_size - 1):
        monkeypatch.setattr("puna.ml.ggml.weights.SMALL_FILE_BYTES", limit)
        backend, _ = opened(path)
        is_read = limit == path.stat().st_size and can_be_huge()
        assert (backend.memory().mapped == 0) is is_read
        backend.allocate()
        backend.load(lambda _share: None)
        table = np.frombuffer(structs.memory(backend.tensor("token_embd.weight", Use.ROWS).address, 1), np.uint8)
        assert ("hg" in flags_of(table.ctypes.data + mmap.PAGESIZE)) is is_read
        backend.close()


def test_where_no_page_is_huge_even_a_small_file_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.ml.ggml.weights.can_be_huge", lambda: False)
    backend, _ = opened(write_llama(tmp_path / "m.gguf", dtype="f16"))
    assert backend.memory().mapped > 0
    backend.close()


def test_weights_are_counted_by_layer(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="f32", n_layers=3)
    backend, _ = opened(path)
    layers = backend.memory().devices[-1].weights
    assert len(layers) == 4
    assert layers[0] == layers[1] == layers[2] > 0
    for i in range(3):
        of_layer = sum(t.n_bytes for n, t in backend.file.tensors.items() if n.startswith(f"blk.{i}."))
        assert layers[i] == pytest.approx(of_layer, rel=0.01)
    backend.close()


def test_a_tied_head_that_needs_no_other_memory_is_not_held_twice(tmp_path: Path) -> None:
    backend, _ = opened(write_llama(tmp_path / "m.gguf", dtype="f32", tied=True))
    rows, matrix = backend.tensor("token_embd.weight", Use.ROWS), backend.tensor("token_embd.weight", Use.MATRIX)
    assert rows.address == matrix.address
    backend.close()


def test_matrices_that_gain_from_another_order_are_converted_and_a_veto_keeps_them_plain(tmp_path: Path) -> None:
    """Which buffer types there are depends on the processor; the veto must hold for each."""
    path = write_llama(tmp_path / "m.gguf", dtype="q4_0")
    asked: list[tuple[str, str]] = []

    def veto(buffer_type: str, tensor_type: str) -> bool:
        asked.append((buffer_type, tensor_type))
        return False

    backend, _ = opened(path, allows=veto, use_mmap=True)
    plain = [t.n_bytes for name, t in backend.file.tensors.items() if not any(j in name for j in JOINED)]
    assert backend.memory().mapped == pytest.approx(sum(plain), rel=0.01)
    backend.close()
    special = [b.name for b in cpu().buffer_types[:-1]]
    assert {name for name, _ in asked} == set(special)
    if special:
        backend, _ = opened(path, use_mmap=True)
        assert backend.memory().mapped < sum(plain)
        backend.close()


def test_a_closed_backend_is_gone_with_what_it_had_mapped(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", dtype="f16")
    gc.disable()
    try:
        backend, _ = opened(path, use_mmap=True)
        backend.allocate()
        backend.load(lambda _share: None)
        known = weakref.ref(backend)
        backend.close()
        del backend, _
        assert known() is None
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(path) not in maps.read_text()
    finally:
        gc.enable()


def test_progress_grows_to_one(tmp_path: Path) -> None:
    backend, _ = opened(write_llama(tmp_path / "m.gguf", dtype="q4_0"), use_mmap=False)
    backend.allocate()
    shares: list[float] = []
    backend.load(shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    backend.close()


def steps_of_a_load(path: Path) -> int:
    """Functions of Python that are called on this thread until the weights are read."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    gc.collect()  # what it calls is none of the load's
    sys.setprofile(count)
    try:
        with PunaEngine(path):
            pass
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_load_takes_as_many_steps_as_there_are_layers(tmp_path: Path) -> None:
    """Not their square, as where each weight is compared with all that were placed before."""
    path = tmp_path / "m.gguf"
    steps = [steps_of_a_load(write_llama(path, n_layers=n, n_embd=64, n_ff=64, n_heads=1, n_kv_heads=1)) for n in (1, 1, 40, 80)]
    assert steps[3] - steps[2] < 1.2 * (steps[2] - steps[1])


def test_a_graph_is_built_once_while_its_shape_lasts(tmp_path: Path) -> None:
    with PunaEngine(write_llama(tmp_path / "m.gguf"), n_ctx=1024) as engine:
        builds = engine.forward.n_builds
        for position in range(250):
            engine.decode([5], [position], [0], [0])
        assert engine.forward.n_builds == builds + 1
        for position in range(250, 260):
            engine.decode([5], [position], [0], [0])
        assert engine.forward.n_builds == builds + 2


def test_cache_memory_is_reported_as_allocated(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", n_layers=2, n_kv_heads=2, n_embd=256, n_heads=4)
    backend, model = opened(path)
    model.make_cache(backend, Limits(2, 512, 64), DType.F16)
    per_layer = 2 * (64 * 2) * 2 * 1024  # K and V, width, bytes of F16, cells
    assert backend.memory().devices[-1].cache == [per_layer, per_layer, 0]
    backend.close()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([DeviceLayers(device="CUDA99", begin=0, end=1)], "no device CUDA99"),
        ([DeviceLayers(device="CPU", begin=2, end=9)], "not within"),
    ],
)
def test_impossible_layouts_are_named(tmp_path: Path, layers: list[DeviceLayers], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        GGMLBackend(write_llama(tmp_path / "m.gguf"), n_threads=1, layers=layers)


@pytest.mark.parametrize(
    ("fails", "error", "n_weights"),
    [
        ({"layers": [DeviceLayers(device="CUDA99", begin=0, end=1)]}, LoadError, 0),
        ({"adapters": ["nowhere.gguf"]}, NotFound, 1),
    ],
)
def test_what_was_open_is_closed_when_a_later_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: dict[str, Any], error: type[PunaError], n_weights: int
) -> None:
    """Whoever keeps the error, to tell it to others, keeps neither the mapped file nor the library's memory."""
    closed, close = [], Weights.close

    def counted(weights: Weights) -> None:
        closed.append(weights)
        close(weights)

    monkeypatch.setattr(Weights, "close", counted)
    path = write_llama(tmp_path / "m.gguf")
    with pytest.raises(error) as caught:  # its traceback holds the half-made backend
        GGMLBackend(path, n_threads=1, **fails)
    assert str(path) not in {mapped.path for mapped in psutil.Process().memory_maps()}
    assert len(closed) == n_weights
    assert caught.tb is not None


def rewritten(
    source: Path, target: Path, change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any] | None], **keys: Any
) -> Path:
    """A copy of a file of F32 tensors with tensors changed or left out, and metadata replaced."""
    with GGUFFile.open(source) as file:
        writer = GGUFWriter(keys.pop("architecture", file.architecture))
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.alignment"):
                writer.add(
                    key,
                    keys.get(
                        key.removeprefix("llama.").replace(".", "__"), list(value) if hasattr(value, "iter_bytes") else value
                    ),
                )
        for name, info in file.tensors.items():
            array = np.frombuffer(file.tensor_data(name), np.float32).reshape(info.shape[::-1])
            changed = change(name, array)
            if changed is not None:
                writer.add_tensor(name, np.ascontiguousarray(changed))
        writer.write(target)
    return target


def test_missing_tensors_are_all_named(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf")
    gone = {"blk.0.attn_q.weight", "blk.1.ffn_down.weight", "output_norm.weight"}
    path = rewritten(source, tmp_path / "cut.gguf", lambda name, a: None if name in gone else a)
    with pytest.raises(MissingTensors) as caught:
        opened(path)
    assert set(caught.value.names) == gone


def test_a_tensor_of_another_shape_than_the_metadata_says_is_named(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf")
    path = rewritten(source, tmp_path / "odd.gguf", lambda name, a: a[:, :128] if name == "blk.1.attn_k.weight" else a)
    with pytest.raises(FileFormatError, match=r"blk\.1\.attn_k\.weight has the shape \[128, 128\]"):
        opened(path)


def test_an_unknown_architecture_is_named_with_those_there_are(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf")
    path = rewritten(source, tmp_path / "x.gguf", lambda _name, a: a, architecture="wombat")
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=r"'wombat'.*llama"):
        open_model(file, None, 256)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__head_count": 3},
        {"attention__head_count": 0},
        {"attention__head_count_kv": 3},
        {"block_count": 0},
        {"expert_count": 8},
    ],
)
def test_impossible_metadata_is_refused(tmp_path: Path, keys: dict[str, int]) -> None:
    extra = {f"llama.{k}": v for k, v in keys.items() if k == "expert_count"}
    source = write_llama(tmp_path / "m.gguf", metadata=extra)
    path = rewritten(source, tmp_path / "x.gguf", lambda _name, a: a, **keys)
    with pytest.raises((FileFormatError, UnsupportedModel)):
        opened(path)


@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0", "q4_0", "q4_K"])
def test_joined_matrices_give_what_they_give_apart(dtype: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", seed=3, dtype=dtype, n_kv_heads=2)
    names = [f"blk.1.attn_{part}.weight" for part in "qkv"]
    inputs = np.random.default_rng(1).standard_normal((5, 256), dtype=np.float32)
    results = []
    for is_joined in (False, True):
        backend = GGMLBackend(path, n_threads=1)
        parts = backend.joined(names) if is_joined else [backend.tensor(name, Use.MATRIX) for name in names]
        assert parts is not None
        backend.allocate()
        backend.load(lambda _share: None)
        context = backend.context(64)
        x = context.input(DType.F32, 256, 5)
        products = [product.contiguous() for product in x.products(parts)]
        for product in products:
            context.output(product)
        context.set(x, inputs)
        assert context.compute()
        rows = [np.empty((5, part.shape[1]), np.float32) for part in parts]
        for product, row in zip(products, rows, strict=True):
            context.get(product, row)
        results.append((rows, context.n_nodes))
        context.close()
        backend.close()
    (apart, n_apart), (joined, n_joined) = results
    for a, b in zip(apart, joined, strict=True):
        assert np.array_equal(a, b)
    assert n_joined == n_apart + 3 - 2  # two products fewer, a view of each part more


def test_matrices_of_other_types_or_with_adapters_stay_apart(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", seed=3, dtype="q8_0")
    with_norm = ["blk.0.attn_q.weight", "blk.0.attn_norm.weight"]
    uneven = ["blk.0.attn_q.weight", "blk.0.ffn_down.weight"]
    backend = GGMLBackend(path, n_threads=1)
    assert backend.joined(with_norm) is None
    assert backend.joined(uneven) is None
    backend.tensor("blk.0.ffn_up.weight", Use.MATRIX)
    assert backend.joined(["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]) is None  # one is there already
    backend.close()


def test_a_common_product_is_computed_again_for_another_input(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", seed=3)
    backend = GGMLBackend(path, n_threads=1)
    parts = backend.joined(["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"])
    assert parts is not None
    backend.allocate()
    backend.load(lambda _share: None)
    context = backend.context(64)
    a, b = context.input(DType.F32, 256, 2), context.input(DType.F32, 256, 2)
    products = [product.contiguous() for x in (a, b, a) for product in x.products(parts)]
    for product in products:
        context.output(product)
    for x, fill in ((a, 1.0), (b, 2.0)):
        context.set(x, np.full((2, 256), fill, np.float32))
    assert context.compute()
    rows = [np.empty((2, 512), np.float32) for _ in products]
    for product, row in zip(products, rows, strict=True):
        context.get(product, row)
    np.testing.assert_allclose(rows[2], 2 * rows[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rows[3], 2 * rows[1], rtol=1e-5, atol=1e-5)
    assert np.array_equal(rows[4], rows[0])
    assert np.array_equal(rows[5], rows[1])
    context.close()
    backend.close()


def test_nothing_of_a_common_product_outlives_its_graph(tmp_path: Path) -> None:
    """Graphs and inputs come at the same addresses again, and a graph may use one part and the next another."""
    backend = GGMLBackend(write_llama(tmp_path / "m.gguf", seed=3), n_threads=1)
    parts = backend.joined(["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"])
    assert parts is not None
    backend.allocate()
    backend.load(lambda _share: None)
    places: set[tuple[int, int]] = set()
    found: dict[int, list[Any]] = {0: [], 1: []}
    for turn in range(40):
        context = backend.context(64)
        x = context.input(DType.F32, 256, 2)
        places.add((context.address, x.address))
        product = x.products(parts)[turn % 2].contiguous() if turn % 4 < 2 else x.products([parts[turn % 2]])[0].contiguous()
        context.output(product)
        context.set(x, np.ones((2, 256), np.float32))
        assert context.compute()
        found[turn % 2].append(context.values(product).copy())
        context.close()
    assert len(places) < 40, "an address has come again"
    for rows in found.values():
        assert all(np.array_equal(row, rows[0]) for row in rows)
    backend.close()


@pytest.mark.parametrize("dtype", ["f32", "q4_0"])
@pytest.mark.parametrize("gate", list(Gate))
def test_what_is_gated_is_the_same_from_two_matrices_and_from_one(gate: Gate, dtype: str, tmp_path: Path) -> None:
    backend = GGMLBackend(write_llama(tmp_path / "m.gguf", seed=3, dtype=dtype), n_threads=1)
    names = ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]
    apart = [backend.tensor(name, Use.MATRIX) for name in names]
    whole = backend.tensor("blk.0.ffn_up.weight", Use.MATRIX)
    backend.allocate()
    backend.load(lambda _share: None)
    context = backend.context(64)
    x = context.input(DType.F32, 256, 3)
    gate_rows, up_rows = x.products(apart)
    results = [gate.of(gate_rows, up_rows), x.gated_product(apart, gate)]
    halves = x.gated_product([whole], gate), gate.of_halves(x.products([whole])[0])
    for result in (*results, *halves):
        context.output(result)
    context.set(x, np.random.default_rng(2).standard_normal((3, 256), np.float32))
    assert context.compute()
    assert np.array_equal(context.values(results[0]), context.values(results[1]))
    assert np.array_equal(context.values(halves[0]), context.values(halves[1]))
    assert halves[0].shape[0] == results[0].shape[0] // 2
    context.close()
    backend.close()


@pytest.mark.parametrize("is_on_host", [True, False])
def test_inputs_are_set_again_for_every_compute(is_on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie if the host can write there, through the library where it cannot, as on a GPU."""
    if not is_on_host:
        monkeypatch.setattr(structs, "is_on_host", lambda _tensor: False)
    backend, _ = opened(write_llama(tmp_path / "m.gguf"))
    backend.allocate()
    context = backend.context(64)
    a, b = context.input(DType.F32, 3, 2), context.input(DType.I32, 2)
    total = a.rows(b).scale(2.0)
    context.output(total)
    for turn in range(3):
        rows = np.arange(6, dtype=np.float32).reshape(2, 3) + turn
        order = np.array([turn % 2, 1 - turn % 2], np.int32)
        context.set(a, rows)
        context.set(b, order)
        assert context.compute()
        assert np.array_equal(context.values(total), 2 * rows[order])
    for wrong in (np.zeros((3, 3), np.float32), np.zeros((3, 2), np.float32).T):
        with pytest.raises(ValueError, match="24 bytes"):
            context.set(a, wrong)
    context.close()
    backend.close()


@pytest.mark.parametrize("n_cells", [256, 1 << 18])
def test_storage_is_zero_wherever_it_lies(n_cells: int, tmp_path: Path) -> None:
    """Attention multiplies what is hidden by zero, and zero times NaN is NaN."""
    backend = GGMLBackend(write_llama(tmp_path / "m.gguf"), n_threads=1)
    storage = [backend.storage(layer, DType.F16, 128, n_cells) for layer in (0, 1)]
    used = [np.full(100 << 10, 0xFF, np.uint8) for _ in range(2000)]  # each too small for pages of its own
    last = used.pop()  # the heap's end stays where it is
    used.clear()
    backend.allocate()
    values = np.empty(1 << 16, np.uint8)
    for tensor in storage:
        for begin in range(0, 128 * 2 * n_cells, values.size):
            backend.read(tensor, begin, values)
            assert not values.any(), begin
    assert last.all()
    backend.close()
