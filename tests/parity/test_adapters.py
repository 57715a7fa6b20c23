"""LoRA adapters on Puna's engine against libllama on the same files."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.compat_engine import CompatEngine
from tests.hf import Definition, hf_config, hf_tensors, write_safetensors
from tests.lora import write_lora
from tests.models.llama import write_mixtral
from tests.models.table import ROWS
from tests.oracle import Oracle
from tests.parity.test_llama import assert_close, tokens
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama
from tests.whole import factors, with_tensors

LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
LAYERS = [f"blk.{i}.{name}.weight" for i in range(2) for name in LINEAR]
HEAD = ["output.weight"]
TABLE = ["token_embd.weight"]
LIMITS: dict[str, Any] = {"n_ctx": 512, "n_sequences": 2}


def compare(model: Path, adapters: list[Path], *, is_quantised: bool = False) -> float:
    """A prompt and some steps of two sequences; returns how far the adapters moved the logits, in units of their size."""
    ids = tokens(60, 1, 300)
    with (
        PunaEngine(model, adapters=adapters, **LIMITS) as puna,
        Oracle(model, adapters=adapters, **LIMITS) as oracle,
        Oracle(model, **LIMITS) as plain,
    ):
        batches: list[Any] = [(ids, range(60), [0] * 60, range(60)), (ids[:20], range(20), [1] * 20, [19])]
        batches += [([ids[i], ids[-i]], [60 + i, 20 + i], [0, 1], [0, 1]) for i in range(3)]
        moved = 0.0
        for batch in batches:
            ours, theirs = puna.decode(*batch), oracle.decode(*batch)
            assert_close(ours, theirs, is_quantised)
            without = plain.decode(*batch)
            moved = max(moved, float(np.linalg.norm(theirs - without) / np.linalg.norm(without)))
    return moved


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        (LAYERS, {}),
        (LAYERS + HEAD, {"alpha": None, "std": 0.08}),  # without alpha the scale is 1
        (TABLE, {"std": 0.4}),
        (["blk.1.ffn_down.weight"], {"rank": 1, "std": 0.4}),
        (LAYERS[:7] + TABLE, {"rank": 32, "alpha": 16.0, "dtype": "float16", "std": 0.1}),
    ],
    ids=["all-layers", "no-alpha", "embedding", "one-weight-rank-1", "rank-32-f16"],
)
def test_an_adapter_moves_the_logits_as_in_libllama(weights: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", seed=7)
    assert compare(model, [write_lora(tmp_path / "a.gguf", model, weights, seed=3, **options)]) > 0.1


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_K"])
def test_over_weights_of_every_kind(dtype: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", seed=7, dtype=dtype, biases=True)
    adapter = write_lora(tmp_path / "a.gguf", model, LAYERS + HEAD + TABLE)
    assert compare(model, [adapter], is_quantised=dtype != "f16") > 0.1


def test_two_adapters_add_up(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", seed=7)
    one = write_lora(tmp_path / "1.gguf", model, LAYERS[:9], seed=1)
    two = write_lora(tmp_path / "2.gguf", model, LAYERS[5:], seed=2, rank=8, alpha=4.0)
    assert compare(model, [one, two]) > 0.1


@pytest.mark.parametrize("write", [partial(write_llama, biases=True), write_mixtral], ids=["dense", "experts"])
def test_over_weights_with_factors(write: Callable[..., Path], tmp_path: Path) -> None:
    """Of attention and experts a factor is on the weight alone, in a dense feed-forward part on the adapter as well."""
    plain = write(tmp_path / "plain.gguf", seed=7)
    with GGUFFile.open(plain) as file:
        model = with_tensors(plain, tmp_path / "m.gguf", factors(file))
    assert compare(model, [write_lora(tmp_path / "a.gguf", model, adaptable(model))]) > 0.1


# What an adapter changes there, libllama leaves as it is; Puna's engine applies it, or refuses it where it cannot.
LEFT_ALONE = {"deepseek2": re.compile(r"output\.weight|blk\.\d+\.attn_(q|kv|k_b|v_b)")}


# What people train adapters for: the projections of attention, MLPs, experts and other mixers, the head, the table.
TRAINED = re.compile(
    r"(blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down)(_exps|_shexp|_inp)?|ssm_(in|out)|shortconv\.(in|out)_proj)"
    r"|output|token_embd)\.weight"
)


def adaptable(model: Path) -> list[str]:
    with GGUFFile.open(model) as file:
        names = [name for name in file.tensors if TRAINED.fullmatch(name)]
        left_alone = LEFT_ALONE.get(file.architecture)
    is_tied = "output.weight" not in names
    return [n for n in names if not (is_tied and n in TABLE) and not (left_alone and left_alone.match(n))]


# Not the rows that libllama reads only under other names.
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.norm is None])
def test_every_architecture_applies_them_as_libllama_does(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    model = row.write(tmp_path / "m.gguf", **next(iter(row.variants.values())))
    adapter = write_lora(tmp_path / "a.gguf", model, adaptable(model), std=0.05)
    limits = {"n_ctx": 256, "n_sequences": 2, **row.limits}
    ids = tokens(60, 1, 250)
    batches: list[Any] = [(ids, range(60), [0] * 60, range(60)), (ids[:1], [60], [0], [0])]
    with PunaEngine(model, **limits) as plain:
        without = plain.decode(*batches[0]).copy()
    with PunaEngine(model, adapters=[adapter], **limits) as puna, Oracle(model, adapters=[adapter], **limits) as oracle:
        for batch in batches:
            ours, theirs = puna.decode(*batch), oracle.decode(*batch)
            assert ((ours - theirs) ** 2).sum() <= 1e-3 * (theirs**2).sum()
            if batch is batches[0]:
                assert ((theirs - without) ** 2).sum() > 1e-2 * (without**2).sum()


def test_the_compatibility_engine_applies_them_as_well(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", seed=7)
    adapters = [str(write_lora(tmp_path / f"{i}.gguf", model, LAYERS[i:] + TABLE, seed=i)) for i in range(2)]
    ids = tokens(60, 1, 300)
    batch = (ids, range(60), [0] * 60, range(60))
    with PunaEngine(model, adapters=adapters, **LIMITS) as puna, CompatEngine(model, adapters=adapters, **LIMITS) as compat:
        assert_close(compat.decode(*batch), puna.decode(*batch), is_quantised=False)


def test_libllama_is_spared_a_table_under_a_tied_head(tmp_path: Path) -> None:
    """It would end the process."""
    model = write_llama(tmp_path / "m.gguf", seed=7, tied=True)
    adapter = write_lora(tmp_path / "a.gguf", model, TABLE)
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: .* embedding table that is also the head"):
        CompatEngine(model, adapters=[str(adapter)])


def test_under_a_tied_head_only_the_lookup_changes(tmp_path: Path) -> None:
    """The same as a model with an own head that is the old table. libllama cannot compute such a pair at all."""
    tied = write_llama(tmp_path / "t.gguf", seed=7, tied=True)
    adapter = write_lora(tmp_path / "a.gguf", tied, TABLE, alpha=8.0, rank=4, std=0.4)
    merged = write_llama(tmp_path / "u.gguf", seed=8, tied=False)
    weights = read_f32(tied)
    change = read_f32(adapter)
    table = weights["token_embd.weight"]
    moved = table + 8.0 / 4 * change["token_embd.weight.lora_a"] @ change["token_embd.weight.lora_b"].T
    overwrite(merged, weights | {"output.weight": table, "token_embd.weight": moved})
    ids = tokens(20, 1, 300)
    batch = (ids, range(20), [0] * 20, range(20))
    with PunaEngine(tied, adapters=[adapter], **LIMITS) as puna, PunaEngine(merged, **LIMITS) as expected:
        assert_close(puna.decode(*batch), expected.decode(*batch), is_quantised=False)


def read_f32(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    with GGUFFile.open(path) as file:
        return {
            name: np.frombuffer(file.tensor_data(name), np.float32).reshape(info.shape[::-1]).copy()
            for name, info in file.tensors.items()
        }


def overwrite(path: Path, weights: dict[str, np.ndarray[Any, Any]]) -> None:
    with GGUFFile.open(path) as file, path.open("r+b") as target:
        for name, info in file.tensors.items():
            target.seek(info.offset)
            target.write(weights[name].astype(np.float32).tobytes())


@pytest.mark.parametrize(
    ("weights", "options", "says"),
    [
        (LAYERS, {"keys": {"general.architecture": "qwen2"}}, "architecture 'qwen2', this one is 'llama'"),
        (LAYERS, {"keys": {"general.type": "model"}}, "no LoRA adapter: general.type is 'model'"),
        (LAYERS, {"keys": {"adapter.type": "control_vector"}}, "adapter.type 'control_vector'"),
        (LAYERS, {"alpha": float("nan")}, "adapter.lora.alpha is nan"),
        ([], {}, "it has no tensors"),
        (LAYERS, {"keys": {"adapter.alora.invocation_tokens": [1, 2]}}, "aLoRA"),
    ],
)
def test_what_is_no_adapter_for_this_model_is_named(
    weights: list[str], options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "m.gguf")
    adapter = write_lora(tmp_path / "a.gguf", model, weights, **options)
    with pytest.raises(FileFormatError, match=says):
        PunaEngine(model, adapters=[adapter])


def test_an_adapter_of_a_larger_model_is_refused_with_the_tensor(tmp_path: Path) -> None:
    small, large = write_llama(tmp_path / "s.gguf"), write_llama(tmp_path / "l.gguf", n_embd=512, n_layers=3)
    wider = write_lora(tmp_path / "w.gguf", large, ["blk.0.attn_q.weight"])
    with pytest.raises(FileFormatError, match=r"'blk\.0\.attn_q\.weight\.lora_a' has the shape \[512, 4\], but \[256, 4\]"):
        PunaEngine(small, adapters=[wider])
    deeper = write_lora(tmp_path / "d.gguf", large, ["blk.2.attn_q.weight"])
    with pytest.raises(FileFormatError, match=r"'blk\.2\.attn_q\.weight', which the model does not have"):
        PunaEngine(small, adapters=[deeper])


def test_a_change_that_nothing_applies_is_refused(tmp_path: Path) -> None:
    """Of a matrix that is in the file but takes no part in the model's arithmetic."""
    model = write_llama(tmp_path / "m.gguf", n_layers=3)
    key = b"llama.block_count" + struct.pack("<I", ValueType.UINT32)
    of_two = model.read_bytes().replace(key + struct.pack("<I", 3), key + struct.pack("<I", 2))
    model.write_bytes(of_two.replace(b"blk.2.", b"mtp.2."))  # the layer that guesses further tokens
    adapter = write_lora(tmp_path / "a.gguf", model, ["mtp.2.attn_q.weight"])
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: it changes 'mtp\.2\.attn_q\.weight', which no adapter can change"):
        PunaEngine(model, adapters=[adapter])


def test_what_memory_the_adapters_take_is_reported(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf")
    adapter = write_lora(tmp_path / "a.gguf", model, LAYERS + TABLE)
    with GGUFFile.open(adapter) as file:
        n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    with PunaEngine(model, adapters=[adapter]) as with_adapter, PunaEngine(model) as plain:
        parts = [
            (m.input_weights + sum(map(sum, (d.weights for d in m.devices))))
            for m in (with_adapter.backend.memory(), plain.backend.memory())
        ]
        assert n_bytes <= parts[0] - parts[1] <= n_bytes + 64 * len(LAYERS + TABLE) * 2


def write_peft(folder: Path, model: Path, **config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """An adapter of every matrix in the PEFT library's form; returns what it adds to each of a checkpoint's tensors."""
    random = np.random.default_rng(4)
    rank, alpha = 4, 8
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    stored: dict[str, np.ndarray[Any, Any]] = {}
    added: dict[str, np.ndarray[Any, Any]] = {}
    for name, weight in hf_tensors(model).items():
        if weight.ndim != 2:
            continue
        down = 0.15 * random.standard_normal((rank, weight.shape[1])).astype(np.float32)
        up = 0.15 * random.standard_normal((weight.shape[0], rank)).astype(np.float32)
        added[name] = scale * up @ down
        inner = f"base_model.model.{name.removesuffix('.weight')}"
        if "embed_tokens" in name:  # the rows are looked up, so the first matrix is the table's
            stored |= {f"{inner}.lora_embedding_A": up.T.copy(), f"{inner}.lora_embedding_B": down.T.copy()}
        else:
            stored |= {f"{inner}.lora_A.weight": down, f"{inner}.lora_B.weight": up}
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", stored)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, **config}))
    return added


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}], ids=["plain", "rank-stabilised"])
def test_an_adapter_in_safetensors_adds_what_it_says(config: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint with the products added to its matrices, computed from its definition."""
    source = write_llama(tmp_path / "m.gguf", seed=7)
    added = write_peft(tmp_path / "peft", source, **config)
    tensors = {name: values + added.get(name, 0.0) for name, values in hf_tensors(source).items()}
    ids = tokens(60, 1, 300)
    expected = Definition(tensors, hf_config(source)).logits(ids)
    store = Store(tmp_path / "models")
    store.create("base", Recipe(files={"m.gguf": store.blobs.import_file(source).digest}))
    files = {path.name: store.blobs.import_file(path).digest for path in (tmp_path / "peft").iterdir()}
    model = store.create("changed", Recipe(base="base", adapters=files))
    for engine in (PunaEngine, Oracle):
        with engine(model.model_path, n_ctx=128, adapters=model.adapter_paths) as opened:
            found = opened.decode(ids, range(60), [0] * 60, range(60))
            assert ((found - expected) ** 2).sum() <= 1e-3 * (expected**2).sum()


def test_adapters_go_where_the_layers_go(tmp_path: Path) -> None:
    """Bit for bit, and the memory that is reported is what the devices gave."""
    (tmp_path / "notes").mkdir()
    environ = {**os.environ, "SYNTHETIC_GPUS": "SIM0:1000,SIM1:1000", "SYNTHETIC_GPUS_FOLDER": str(tmp_path / "notes")}
    command = [sys.executable, "-m", "tests.parity.adapters_worker", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["layout"] for line in lines] == ["one GPU", "a GPU and the CPU", "two GPUs"]
    for line in lines:
        assert line["worst"] == 0, line
        for device, n_bytes in line["reported"].items():
            assert line["taken"][device] == pytest.approx(n_bytes, rel=0.001)
