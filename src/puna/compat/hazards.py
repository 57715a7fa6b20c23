"""What libllama would end the process over, found in the file before libllama is asked."""

from __future__ import annotations

import re

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.layers import n_stored_layers
from puna.gguf.lora import TABLE
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType

MAX_LAYERS, MAX_EXPERTS = 512, 1024  # that libllama has room for
SCALINGS = ("none", "linear", "yarn", "longrope")

# Lists of numbers in the shape of matrices.
_LISTS = re.compile(r".*(tid2eid|d2t|ordering).*")

_VECTOR_TYPES = (TensorType.F32, TensorType.I32)


def check(file: GGUFFile, *, has_adapters: bool) -> None:
    """Errors: UnsupportedModel, FileFormatError."""
    _check_counts(file)
    _check_types(file)
    _check_factors(file, has_adapters)


def _check_counts(file: GGUFFile) -> None:
    meta = file.metadata
    n_layers = n_stored_layers(meta)
    if n_layers > MAX_LAYERS:
        raise UnsupportedModel(f"{file.path}: {n_layers} layers, libllama has room for {MAX_LAYERS}")
    n_guessing = meta.integer("nextn_predict_layers", 0)
    if not 0 <= n_guessing <= n_layers:
        raise FileFormatError(f"{file.path}: {meta.full_key('nextn_predict_layers')} {n_guessing} of {n_layers} layers")
    n_experts, n_used = meta.integer("expert_count", 0), _most(file, "expert_used_count", n_layers)
    if not 0 <= n_experts <= MAX_EXPERTS:
        raise UnsupportedModel(f"{file.path}: {n_experts} experts, libllama has room for {MAX_EXPERTS}")
    if not min(n_experts, 1) <= n_used <= n_experts:
        raise FileFormatError(f"{file.path}: {n_used} of {n_experts} experts cannot be used")
    scaling = meta.string("rope.scaling.type", SCALINGS[0])
    if scaling not in SCALINGS:
        raise FileFormatError(f"{file.path}: rope.scaling.type {scaling!r} is not known")


def _most(file: GGUFFile, key: str, n_layers: int) -> int:
    """The largest of a number for all layers, or of one for each."""
    value = file.metadata.get(file.metadata.full_key(key))
    return max(file.metadata.per_layer(key, n_layers)) if isinstance(value, LazyArray) else file.metadata.integer(key, 0)


def _check_types(file: GGUFFile) -> None:
    """What is added to hidden states or multiplied with them, value by value, must be as they are; libllama does not look.
    Nor does it look whether there is a product of a matrix.
    """
    for tensor in file.tensors.values():
        is_vector = len(tensor.shape) == 1 or tensor.name == "token_types.weight"
        if is_vector and tensor.type not in _VECTOR_TYPES:
            kind = f"is of type {tensor.type.name}, libllama computes with it only in F32"
            raise UnsupportedModel(f"{file.path}: tensor {tensor.name} {kind}")
        is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight") and not _LISTS.fullmatch(tensor.name)
        if is_matrix and not tensor.type.is_multiplied:
            kind = tensor.type.name
            raise FileFormatError(f"{file.path}: tensor {tensor.name} is a matrix in {kind}, in which nothing is multiplied")


def _check_factors(file: GGUFFile, has_adapters: bool) -> None:
    """Of matrices in NVFP4: libllama has no order for the factor and what else is to be done with the product."""
    for name, tensor in file.tensors.items():
        stem = name.removesuffix(".weight")
        if tensor.type is not TensorType.NVFP4 or stem + ".scale" not in file.tensors:
            continue
        is_dense = re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)(_shexp)?", stem)
        if is_dense and (has_adapters or stem + ".bias" in file.tensors):
            what = "an adapter" if has_adapters else "a bias"
            raise UnsupportedModel(f"{file.path}: libllama cannot compute {name} in NVFP4 with a factor and {what}")
    table = file.tensors.get(TABLE)
    if table is not None and table.type is TensorType.NVFP4 and "output.weight" not in file.tensors:
        factor = next((name for name in ("output.scale", "output.input_scale") if name in file.tensors), None)
        if factor:
            raise UnsupportedModel(f"{file.path}: {factor} is for a head of its own, which {TABLE} in NVFP4 is not")
