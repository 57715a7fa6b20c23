"""Loading through libllama: what it refuses is said with its reason, what it takes is known before, and it can be cancelled."""

from __future__ import annotations

import inspect
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna import host
from puna.compat.model import LlamaModel, Options
from puna.compat.sizes import memory_report, read_sizes
from puna.errors import BadRequest, FileFormatError, LoadError, MissingTensors, OutOfMemory, PunaError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from puna.kvcache.cache import Limits
from puna.native.ggml import TYPE_F16, TYPE_Q4_0, TYPE_Q8_0
from puna.native.log import Line, captured
from puna.runner.engine import Engine
from puna.runner.loading import engines
from puna.runner.loading.engines import Opened
from puna.wire import DeviceLayers, Health, LoadOptions, LoadRequest
from tests import tiny
from tests.compat_engine import CompatEngine
from tests.lora import write_lora
from tests.oracle import Oracle
from tests.patience import PATIENCE_S
from tests.tiny import RandomWeights, bpe_vocabulary, write_bert, write_llama
from tests.tiny_others import OTHERS


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return OTHERS["gpt2"](tmp_path_factory.mktemp("gpt2") / "gpt2.gguf")


def opened(path: Path, cache_type: int = TYPE_F16, **limits: Any) -> LlamaModel:
    given = {"max_sequences": 4, "n_ctx": 256, "n_batch": 128, **limits}
    return LlamaModel(GGUFFile.open(path), Limits(**given), Options(n_threads=1, cache_type=cache_type))


def write_unknown(path: Path) -> Path:
    writer = GGUFWriter("wobble")
    writer.add("wobble.block_count", 1)
    bpe_vocabulary().add_to(writer)
    RandomWeights(writer, 1, TensorType.F32).matrix("token_embd.weight", 32, 32)
    writer.write(path)
    return path


def test_an_architecture_nobody_knows_is_named_and_where_the_known_ones_are(tmp_path: Path) -> None:
    path = write_unknown(tmp_path / "wobble.gguf")
    for new_engine in (None, False):
        with pytest.raises(UnsupportedModel, match=r"'wobble'.*docs/models\.md"):
            Engine(path, new_engine).load(LoadRequest())
    with pytest.raises(UnsupportedModel, match=r"'wobble' is not supported; supported: .*llama"):
        Engine(path, new_engine=True).load(LoadRequest())


def test_a_missing_tensor_is_named(gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "incomplete.gguf"
    path.write_bytes(gpt2.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(MissingTensors, match=r"blk\.1\.ffn_up\.weight"):
        Engine(path).load(LoadRequest())


def test_of_an_architecture_that_both_know_all_missing_tensors_are_named(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "incomplete.gguf", n_layers=2)
    path.write_bytes(path.read_bytes().replace(b"ffn_up.weight", b"ffn_xx.weight"))
    with pytest.raises(MissingTensors, match=r"2 tensors.*blk\.0\.ffn_up\.weight, blk\.1\.ffn_up\.weight"):
        Engine(path).load(LoadRequest())


@pytest.mark.parametrize("refusal", [MissingTensors(["blk.0.attn_q.weight"]), UnsupportedModel("it swings")])
def test_what_puna_cannot_do_with_a_file_libllama_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: PunaError
) -> None:
    """Tensors of other names, or in another arrangement, or something new in an architecture that is known."""

    def refuse(*_: Any) -> Opened:
        raise refusal

    monkeypatch.setattr(engines, "_open_with_puna", refuse)
    path = write_llama(tmp_path / "model.gguf")
    reply = Engine(path).load(LoadRequest(operation="fit", options=LoadOptions(n_ctx=256)))
    assert (reply.engine, reply.engine_reason) == ("compat", str(refusal))
    with pytest.raises(type(refusal)):
        Engine(path, new_engine=True).load(LoadRequest())


@pytest.mark.parametrize("name", ["token_types.weight", "token_embd_norm.bias", "blk.1.attn_q.bias"])
def test_tensors_of_a_type_that_libllama_would_end_on_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    add = GGUFWriter.add_raw_tensor

    def add_short(writer: GGUFWriter, given: str, shape: tuple[int, ...], kind: TensorType, data: Any) -> None:
        if given == name:
            kind, data = TensorType.F16, np.zeros(2 * math.prod(shape), np.uint8)
        add(writer, given, shape, kind, data)

    monkeypatch.setattr(GGUFWriter, "add_raw_tensor", add_short)
    path = inspect.unwrap(write_bert)(tmp_path / "short.gguf", pooling=1)  # no copy of one that is as it should be
    with pytest.raises(UnsupportedModel, match=f"{name} is of type F16, libllama computes with it only in F32"):
        Engine(path, new_engine=False).load(LoadRequest())


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "narrow.gguf", n_layers=1)
    path.write_bytes(path.read_bytes().replace(b"ffn_gate.weight", b"ffn_xate.weight").replace(b"ffn_down", b"ffn_gate"))
    with pytest.raises(FileFormatError, match=r"blk\.0\.ffn_gate\.weight.* has wrong shape; expected 256, 512, got 512, 256"):
        Engine(path, new_engine=False).load(LoadRequest())


def test_a_key_that_is_missing_is_named(gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "headless.gguf"
    path.write_bytes(gpt2.read_bytes().replace(b"gpt2.attention.layer_norm_epsilon", b"gpt2.attention.layer_norm_epsilom"))
    with pytest.raises(FileFormatError, match=r"key not found in model: gpt2\.attention\.layer_norm_epsilon"):
        Engine(path).load(LoadRequest())


def test_a_cache_type_that_the_heads_do_not_fit_is_a_bad_request(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "thin.gguf", n_embd=64, n_heads=4)
    with pytest.raises(BadRequest, match="q8_0"):
        opened(path, TYPE_Q8_0)


@pytest.mark.parametrize("n_pool", [1 << 30, 1 << 35])
def test_more_tokens_than_any_memory_holds_are_refused_before_anything_is_taken(gpt2: Path, n_pool: int) -> None:
    with pytest.raises(OutOfMemory, match="GB"):
        opened(gpt2, n_pool=n_pool)


def test_what_does_not_fit_is_no_success(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(gpt2)
    options = LoadOptions(n_ctx=512, n_threads=1, use_mmap=False)
    fit = engine.load(LoadRequest(operation="fit", options=options))
    assert fit.memory is not None
    needed = fit.memory.total - fit.memory.host
    for free, fits in ((needed - 1, False), (needed, True)):
        monkeypatch.setattr(host, "memory", lambda free=free: host.Memory(total=1 << 40, free=free, swap_free=0))
        reply = engine.load(LoadRequest(operation="alloc", options=options))
        assert (reply.success, "GB are needed on CPU" in reply.error) == (fits, not fits)
    engine.close()


def test_a_load_reports_progress_and_can_be_cancelled(gpt2: Path) -> None:
    seen: list[float] = []
    model = opened(gpt2)
    model.load(seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    model.close()
    cancelled = opened(gpt2)
    cancelled.abort()
    with pytest.raises(LoadError, match="cancelled"):
        cancelled.load(seen.append)
    cancelled.close()


def wait_until_ready(engine: Engine) -> Health:
    deadline = time.monotonic() + PATIENCE_S
    while (health := engine.health()).status == "loading":
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return health


def test_the_engine_says_what_it_takes_before_it_takes_it(gpt2: Path) -> None:
    engine = Engine(gpt2)
    options = LoadOptions(n_ctx=512, n_threads=1)
    fit, taken = (engine.load(LoadRequest(operation=operation, options=options)) for operation in ("fit", "alloc"))
    assert (fit.engine, fit.memory) == ("compat", taken.memory)
    assert "gpt2" in fit.engine_reason
    reply = engine.load(LoadRequest(options=options))
    assert wait_until_ready(engine).status == "ready"
    assert reply.memory == taken.memory
    engine.close()


def test_weights_are_counted_as_the_file_has_them_and_the_cache_by_its_type(gpt2: Path) -> None:
    plain, small = (opened(gpt2, kind, n_pool=1024) for kind in (TYPE_F16, TYPE_Q4_0))
    reports = [model.memory() for model in (plain, small)]
    with GGUFFile.open(gpt2) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    for report in reports:
        assert report.input_weights + sum(report.devices[0].weights) == n_bytes
        assert report.devices[0].graph > 0
    n_cells, n_layers, width = 1024, 2, 128
    half = sum(reports[0].devices[0].cache)
    assert half == pytest.approx(n_cells * n_layers * 2 * width * 2, rel=0.01)
    assert sum(reports[1].devices[0].cache) == pytest.approx(half * 18 / 64, rel=0.02)
    for model in (plain, small):
        model.close()


def really_taken(model: LlamaModel) -> dict[str, float]:
    """MiB of weights by where they are, as the log of a load says."""
    with captured() as lines:
        model.load(lambda _share: None)
    found = (re.match(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB", line.text) for line in lines)
    return {line[1]: float(line[2]) for line in found if line}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0", "q4_K", "q6_K"])
def test_weights_take_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tied: bool) -> None:
    """Whether or not this CPU multiplies the type in an order of its own: then they are copied, and nothing stays mapped
    beside the copies. A table that is also the head is there twice if only the head is reordered.
    """
    # Rows are reordered eight at a time: 376 tokens are, 380 are not.
    monkeypatch.setattr(tiny, "bpe_vocabulary", lambda pre: bpe_vocabulary(pre, 116))
    path = write_llama(tmp_path / "model.gguf", dtype=dtype, tied=tied, n_embd=512, n_ff=1024)
    model = opened(path)
    report, taken = model.memory(), really_taken(model)
    said = (report.input_weights + sum(report.devices[-1].weights)) / (1 << 20)
    assert sum(taken.values()) == pytest.approx(said, abs=0.01 * len(taken))
    assert taken.get("CPU_Mapped", 0) == pytest.approx(report.mapped / (1 << 20), abs=0.01)
    model.close()


def test_layers_are_counted_for_the_devices_they_are_on(gpt2: Path) -> None:
    lines = [
        Line(10, "llama_kv_cache: size =    4.00 MiB (  1024 cells,   2 layers,  8/1 seqs), K (f16): ..."),
        Line(10, "sched_reserve:      CUDA0 compute buffer size =     8.00 MiB"),
        Line(10, "sched_reserve:  CUDA_Host compute buffer size =     1.00 MiB"),
        Line(10, "llama_context:        CPU  output buffer size =     0.50 MiB"),
    ]
    placed = [DeviceLayers(device="CUDA0", begin=1, end=3)]
    with GGUFFile.open(gpt2) as file:
        report = memory_report(file, 2, placed, read_sizes(lines), is_mapped=False)
    gpu, cpu = report.devices
    mebi = 1 << 20
    assert (gpu.device, gpu.cache, gpu.graph) == ("CUDA0", [0, 2 * mebi, 0], 8 * mebi)
    assert (cpu.device, cpu.cache, cpu.graph) == ("CPU", [2 * mebi, 0, 0], mebi + mebi // 2)
    assert gpu.weights[0] == 0
    assert 0 not in gpu.weights[1:]
    assert cpu.weights[1:] == [0, 0]


def test_a_device_that_is_not_there_is_named(gpt2: Path) -> None:
    options = LoadOptions(n_ctx=128, gpu_layers=[DeviceLayers(device="CUDA7", begin=0, end=3)])
    with pytest.raises(LoadError, match="no device CUDA7; this machine has CPU"):
        Engine(gpt2).load(LoadRequest(options=options))


def test_factors_for_long_texts_are_left_alone_where_no_text_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libllama chooses them by the size of the pool; but four sequences of 256 tokens are no text of 1024."""
    write = GGUFWriter.write

    def write_with_factors(writer: GGUFWriter, path: str | Path) -> None:
        for name, factor in (("long", 4.0), ("short", 1.0)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.full(32, factor, np.float32))
        write(writer, path)

    monkeypatch.setattr(GGUFWriter, "write", write_with_factors)
    metadata = {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.original_context_length": 512}
    path = write_llama(tmp_path / "long.gguf", metadata=metadata)
    ids = list(range(20, 120))
    with (
        CompatEngine(path, n_ctx=256, n_sequences=4) as compat,
        Oracle(path, n_ctx=256) as short,
        Oracle(path, n_ctx=1024) as long,
    ):
        assert compat.limits.n_cells == 512
        ours, theirs, others = (e.decode(ids, range(100), [0] * 100, range(100)) for e in (compat, short, long))
    assert np.abs(ours - theirs).max() < 1e-2 * np.abs(theirs).max()
    assert np.abs(ours - others).max() > 0.1


@pytest.mark.parametrize("cache_type", [TYPE_Q8_0, TYPE_Q4_0])
def test_quantised_keys_and_values(gpt2: Path, cache_type: int) -> None:
    with CompatEngine(gpt2, n_ctx=256, cache_type=cache_type) as compat, Oracle(gpt2, n_ctx=256, cache_type=cache_type) as oracle:
        ids = np.random.default_rng(1).integers(3, compat.n_vocab, 100).tolist()
        ours, theirs = (engine.decode(ids, range(100), [0] * 100, range(100)) for engine in (compat, oracle))
    assert ((ours - theirs) ** 2).sum() / (theirs**2).sum() < 1e-3


def test_adapters_are_applied(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "base.gguf")
    adapter = write_lora(tmp_path / "adapter.gguf", path, ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
    ids = list(range(20, 60))
    with (
        CompatEngine(path, n_ctx=256, adapters=[str(adapter)]) as changed,
        CompatEngine(path, n_ctx=256) as base,
        Oracle(path, n_ctx=256, adapters=[adapter]) as oracle,
    ):
        ours, plain, theirs = (e.decode(ids, range(40), [0] * 40, range(40)) for e in (changed, base, oracle))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()
    assert np.abs(ours - plain).max() > 0.1
