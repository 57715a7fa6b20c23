"""What a model takes with libllama: weights as the file has them, each once unless a table is also the head and lies
elsewhere as such; the rest as libllama's log says.

libllama rounds its sizes to a hundredth of a megabyte. Which layer's cache is how large it does not say: the layers share
it evenly here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from puna.gguf.reader import GGUFFile
from puna.native.log import Line
from puna.wire import DeviceLayers, DeviceMemory, MemoryReport

HOST = "CPU"

_CACHE = re.compile(r"^llama_\w+: +size = +([\d.]+) MiB \(")
_BUFFER = re.compile(r"^\w+: +(\S+) +(?:compute|output) buffer size = +([\d.]+) MiB")
_WEIGHTS = re.compile(r"^load_tensors: +(\S+) model buffer size")
_LAYER = re.compile(r"blk\.(\d+)\.")

# Looked up by row before the first layer, so they stay with the host.
_INPUTS = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")


@dataclass(frozen=True)
class Sizes:
    """Bytes. *working*: by buffer type, memory of graphs and of what they give."""

    cache: int
    working: Mapping[str, int]


def read_sizes(lines: Sequence[Line]) -> Sizes:
    cache = 0.0
    working: dict[str, int] = {}
    for line in lines:
        if found := _CACHE.match(line.text):
            cache += float(found[1])
        elif found := _BUFFER.match(line.text):
            working[found[1]] = working.get(found[1], 0) + _bytes(float(found[2]))
    return Sizes(_bytes(cache), working)


def weight_places(lines: Sequence[Line]) -> set[str]:
    """The buffer types that a load, a dry one too, puts weights into."""
    return {found[1] for line in lines if (found := _WEIGHTS.match(line.text))}


def _bytes(mebibytes: float) -> int:
    return round(mebibytes * (1 << 20))


def memory_report(
    file: GGUFFile, n_layers: int, placed: Sequence[DeviceLayers], sizes: Sizes, *, is_mapped: bool, head_copy: int = 0
) -> MemoryReport:
    """Layers that *placed* names are on those devices, the others with the host. *head_copy*: bytes of the embedding table
    that are there a second time as the head.
    """
    owners = [HOST] * (n_layers + 1)
    for part in placed:
        owners[part.begin : part.end] = [part.device] * (part.end - part.begin)
    weights, inputs = _weights(file, n_layers)
    weights[n_layers] += head_copy
    names = [*dict.fromkeys(part.device for part in placed), HOST]
    working = {name: sizes.working.get(name, 0) for name in names}
    # What is no device's own is memory of the host that a device can reach.
    working[HOST] += sum(n for name, n in sizes.working.items() if name not in names)
    share = sizes.cache // max(n_layers, 1)
    devices = [
        DeviceMemory(
            device=name,
            weights=[n if owner == name else 0 for n, owner in zip(weights, owners, strict=True)],
            cache=[share if owner == name else 0 for owner in owners[:-1]] + [0],
            graph=working[name],
            is_gpu=name != HOST,
        )
        for name in names
    ]
    return MemoryReport(devices=devices, input_weights=inputs, mapped=inputs + sum(devices[-1].weights) if is_mapped else 0)


def _weights(file: GGUFFile, n_layers: int) -> tuple[list[int], int]:
    """Bytes per layer, the output last; and of what comes before the first layer."""
    layers, inputs = [0] * (n_layers + 1), 0
    for tensor in file.tensors.values():
        found = _LAYER.match(tensor.name)
        if tensor.name.startswith(_INPUTS):
            inputs += tensor.n_bytes
        else:
            layers[min(int(found[1]), n_layers) if found else n_layers] += tensor.n_bytes
    return layers, inputs
