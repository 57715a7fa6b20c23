"""Llama 3.2 Vision in plain numpy, after the published description: what both of its parts are compared with.

Written row by row as the description has it: masks are masks, all tiles are computed, nothing is left out or reordered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType

Doubles = npt.NDArray[np.float64]

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HIDDEN = -1e30

erf = np.vectorize(math.erf, otypes=[np.float64])


def tensors_of(path: Path) -> dict[str, Doubles]:
    """All of a file in F32 and F16, in numpy's order of axes."""
    found = {}
    with GGUFFile.open(path) as file:
        for name, info in file.tensors.items():
            kind = {TensorType.F32: np.float32, TensorType.F16: np.float16}[info.type]
            found[name] = np.frombuffer(file.tensor_data(name), kind).reshape(info.shape[::-1]).astype(np.float64)
    return found


def metadata_of(path: Path) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        return {
            key.removeprefix("mllama."): list(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
            for key, value in file.metadata.items()
            if key.startswith("mllama.")
        }


def layer_norm(x: Doubles, t: Mapping[str, Doubles], name: str) -> Doubles:
    centred = x - x.mean(-1, keepdims=True)
    normal: Doubles = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * t[f"{name}.weight"] + t[f"{name}.bias"]
    return normal


def rms_norm(x: Doubles, weight: Doubles) -> Doubles:
    normal: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    return normal


def softmax(scores: Doubles) -> Doubles:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    shares: Doubles = e / e.sum(-1, keepdims=True)
    return shares


# ---- images


def supported(max_tiles: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(1, max_tiles + 1) for b in range(1, max_tiles + 1) if a * b <= max_tiles]


def canvas_of(height: int, width: int, max_tiles: int, tile: int) -> tuple[int, int]:
    """Height and width in tiles: the least enlargement there is, else the least reduction; then the least area."""
    sizes = np.array(supported(max_tiles)) * tile
    scales = np.minimum(sizes[:, 0] / height, sizes[:, 1] / width)
    chosen = scales[scales >= 1].min() if (scales >= 1).any() else scales[scales < 1].max()
    options = sizes[scales == chosen]
    best = options[np.argmin(options[:, 0] * options[:, 1])] // tile
    return int(best[0]), int(best[1])


def fitted(height: int, width: int, canvas_height: int, canvas_width: int, tile: int) -> tuple[int, int]:
    target_width, target_height = np.clip(width, tile, canvas_width), np.clip(height, tile, canvas_height)
    scale_h, scale_w = target_height / height, target_width / width
    if scale_w < scale_h:
        return min(math.floor(height * scale_w) or 1, int(target_height)), int(target_width)
    return int(target_height), min(math.floor(width * scale_h) or 1, int(target_width))


def processed(pixels: npt.NDArray[np.uint8], max_tiles: int, tile: int) -> tuple[Doubles, int, int]:
    """Tiles [max_tiles, 3, tile, tile], how many of them are the image's, and the number of its proportions."""
    height, width, _ = pixels.shape
    rows, columns = canvas_of(height, width, max_tiles, tile)
    new_height, new_width = fitted(height, width, rows * tile, columns * tile, tile)
    # Along the rows first, as Pillow did it when the model was published.
    narrowed = Image.fromarray(pixels).resize((new_width, height), Image.Resampling.BILINEAR)
    image = np.asarray(narrowed.resize((new_width, new_height), Image.Resampling.BILINEAR))
    canvas = np.zeros((rows * tile, columns * tile, 3))
    canvas[:new_height, :new_width] = image
    values = ((canvas / 255 - MEAN) / STD).transpose(2, 0, 1)
    cut = values.reshape(3, rows, tile, columns, tile).transpose(1, 3, 0, 2, 4).reshape(rows * columns, 3, tile, tile)
    tiles = np.zeros((max_tiles, 3, tile, tile))
    tiles[: rows * columns] = cut
    return tiles, rows * columns, supported(max_tiles).index((rows, columns)) + 1


class Eyes:
    """``states`` are, after a call, those before each layer and after the last, of the image's own rows [n_tiles * n_rows, n]."""

    def __init__(self, path: Path) -> None:
        self.t = tensors_of(path)
        self.m = {key.removeprefix("vision."): value for key, value in metadata_of(path).items() if key.startswith("vision.")}
        self.n = int(self.m["embedding_length"])
        self.states: list[Doubles] = []

    def gate(self, name: str) -> Doubles | float:
        return self.t.get(f"v.{name}.gate", 1.0)

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> Doubles:
        """The rows that text looks at, [n_tiles * n_rows, n_text]."""
        t, m, n = self.t, self.m, self.n
        max_tiles, patch = m["max_num_tiles"], m["patch_size"]
        tiles, n_tiles, ratio = processed(pixels, max_tiles, m["image_size"])
        side = m["image_size"] // patch
        cut = tiles.reshape(max_tiles, 3, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5).reshape(max_tiles, side**2, -1)
        x = cut @ t["v.patch_embd.weight"].reshape(n, -1).T
        x = x + t["v.pre_tile_position_embd.weight"][ratio].reshape(max_tiles, 1, n) * self.gate("pre_tile_position_embd")
        x = np.concatenate([np.broadcast_to(t["v.class_embd"], (max_tiles, 1, n)), x], 1)
        n_rows = side**2 + 1
        x = x + t["v.position_embd.weight"] * self.gate("position_embd")
        placed = t["v.tile_position_embd.weight"][ratio].reshape(max_tiles, n_rows, n)
        x = layer_norm(x + placed * self.gate("tile_position_embd"), t, "v.pre_ln")
        n_filling = (8 - n_rows % 8) % 8
        x = np.pad(x, ((0, 0), (0, n_filling), (0, 0)))
        real = np.zeros((max_tiles, n_rows + n_filling))
        real[:n_tiles] = 1
        if n_filling:
            real[:, -n_filling:] = 0
        filling = 1 - real.reshape(-1, 1)
        mask = filling @ filling.T * HIDDEN
        x = x.reshape(-1, n)
        self.states, before = [], []
        for i in range(m["block_count"]):
            before.append(x)
            x = self._layer(x, mask, f"v.blk.{i}")
        local = [*before, x]
        x = layer_norm(x, t, "v.post_ln").reshape(max_tiles, -1, n)
        x = x + t["v.post_tile_position_embd.weight"][ratio].reshape(max_tiles, 1, n) * self.gate("post_tile_position_embd")
        x = x.reshape(-1, n)
        beyond = []
        for i in range(m["global.block_count"]):
            beyond.append(x)
            x = self._layer(x, mask, f"v.global.blk.{i}")
        kept = real.reshape(-1) == 1
        self.states = [state[kept] for state in [*before, *beyond, x]]
        taken = [local[i] for i in m["intermediate_layers_indices"]]
        joined = np.concatenate([x, np.stack(taken, -1).reshape(len(x), -1)] if taken else [x], -1)[kept]
        rows: Doubles = joined @ t["mm.0.weight"].T + t["mm.0.bias"]
        return rows

    def _layer(self, x: Doubles, mask: Doubles, name: str) -> Doubles:
        t, n_heads = self.t, self.m["attention.head_count"]
        y = layer_norm(x, t, f"{name}.ln1")
        q, k, v = ((y @ t[f"{name}.attn_{p}.weight"].T).reshape(len(x), n_heads, -1).transpose(1, 0, 2) for p in "qkv")
        shares = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1]) + mask)
        mixed = (shares @ v).transpose(1, 0, 2).reshape(len(x), -1)
        x = x + t.get(f"{name}.attn_gate", 1.0) * (mixed @ t[f"{name}.attn_out.weight"].T)
        y = layer_norm(x, t, f"{name}.ln2")
        first, second = ("ffn_up", "ffn_down")
        if t[f"{name}.ffn_up.weight"].shape[1] != self.n:
            first, second = second, first
        y = y @ t[f"{name}.{first}.weight"].T + t[f"{name}.{first}.bias"]
        y = 0.5 * y * (1 + erf(y / math.sqrt(2)))
        y = y @ t[f"{name}.{second}.weight"].T + t[f"{name}.{second}.bias"]
        result: Doubles = x + t.get(f"{name}.ffn_gate", 1.0) * y
        return result


# ---- text


def together(images: Sequence[tuple[int, npt.NDArray[Any]]], number: int, n_most: int) -> npt.NDArray[Any]:
    """Images whose tokens stand one after another are looked at together by what follows the last of them."""
    rows, first = images[number][1], number
    while first and images[first - 1][0] == images[first][0] - 1 and len(rows) + len(images[first - 1][1]) <= n_most:
        first -= 1
        rows = np.concatenate([images[first][1], rows])
    return rows


class Text:
    """One sequence at a time, whole: tokens, and images as (position, rows) in order."""

    def __init__(self, path: Path, head_dim: int = 64, n_most: int = 40) -> None:
        """*n_most*: rows of images that are looked at at once."""
        self.t, self.m, self.head_dim, self.n_most = tensors_of(path), metadata_of(path), head_dim, n_most

    def __call__(self, tokens: Sequence[int], images: Sequence[tuple[int, npt.NDArray[Any]]] = ()) -> Doubles:
        """Logits [n, rows of the head]. Each row looks at the last image that does not come after it, if there is one, and at
        those that stand directly before that, as far as there is room.
        """
        t = self.t
        x = t["token_embd.weight"][list(tokens)]
        for i in range(self.m["block_count"]):
            x = self._cross(x, images, i) if i in self.m["attention.cross_attention_layers"] else self._self(x, i)
        logits: Doubles = rms_norm(x, t["output_norm.weight"]) @ t.get("output.weight", t["token_embd.weight"]).T
        return logits

    def _mlp(self, x: Doubles, name: str) -> Doubles:
        t = self.t
        y = rms_norm(x, t[f"{name}.ffn_norm.weight"])
        gate, up = y @ t[f"{name}.ffn_gate.weight"].T, y @ t[f"{name}.ffn_up.weight"].T
        added: Doubles = (gate / (1 + np.exp(-gate)) * up) @ t[f"{name}.ffn_down.weight"].T
        return added

    def _heads(self, x: Doubles) -> Doubles:
        return x.reshape(len(x), -1, self.head_dim).transpose(1, 0, 2)

    def _mixed(self, q: Doubles, k: Doubles, v: Doubles, mask: Doubles | float) -> Doubles:
        group = len(q) // len(k)
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        shares = softmax(q @ k.transpose(0, 2, 1) / math.sqrt(self.head_dim) + mask)
        mixed: Doubles = (shares @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)
        return mixed

    def _self(self, x: Doubles, i: int) -> Doubles:
        t, name = self.t, f"blk.{i}"
        y = rms_norm(x, t[f"{name}.attn_norm.weight"])
        q, k, v = (self._heads(y @ t[f"{name}.attn_{p}.weight"].T) for p in "qkv")
        mask = np.triu(np.full((len(x), len(x)), HIDDEN), 1)
        x = x + self._mixed(self._turned(q), self._turned(k), v, mask) @ t[f"{name}.attn_output.weight"].T
        return x + self._mlp(x, name)

    def _turned(self, x: Doubles) -> Doubles:
        """Neighbouring values are pairs, as files have them."""
        factors = self.t.get("rope_freqs.weight", np.ones(self.head_dim // 2))
        angles = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(0, self.head_dim, 2) / self.head_dim) / factors
        a, b = x[..., 0::2], x[..., 1::2]
        turned = np.empty_like(x)
        turned[..., 0::2] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., 1::2] = a * np.sin(angles) + b * np.cos(angles)
        return turned

    def _cross(self, x: Doubles, images: Sequence[tuple[int, npt.NDArray[Any]]], i: int) -> Doubles:
        t, name, result = self.t, f"blk.{i}", x.copy()
        for number, (begin, _) in enumerate(images):
            end = images[number + 1][0] if number + 1 < len(images) else len(x)
            part = x[begin:end]
            rows = together(images, number, self.n_most)
            y = rms_norm(part, t[f"{name}.attn_norm.weight"])
            q = rms_norm(self._heads(y @ t[f"{name}.cross_attn_q_proj.weight"].T), t[f"{name}.cross_attn_q_norm.weight"])
            k = rms_norm(self._heads(rows @ t[f"{name}.cross_attn_k_proj.weight"].T), t[f"{name}.cross_attn_k_norm.weight"])
            v = self._heads(rows @ t[f"{name}.cross_attn_v_proj.weight"].T)
            mixed = self._mixed(q, k, v, 0.0) @ t[f"{name}.cross_attn_o_proj.weight"].T
            part = part + np.tanh(t[f"{name}.cross_attn_attn_gate"]) * mixed
            result[begin:end] = part + np.tanh(t[f"{name}.cross_attn_mlp_gate"]) * self._mlp(part, name)
        return result
