"""A checkpoint to a GGUF file, by the table of its family."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import vocabulary
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, Tensors, ignore
from puna.gguf.convert.encodings import Quantisation, Rows, Weights
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.output import FILE_TYPE_MXFP4, Change, Output, Piece, file_type, unchanged
from puna.gguf.convert.table import Family, Lengths, Line, Words
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

_BESIDE = ("model.", "language_model.", "model.language_model.", "language_model.model.")
_UNUSED = (r".*rotary_emb\.inv_freq", r".*\.attn\.(bias|masked_bias)")  # made anew from the configuration


@dataclass(frozen=True)
class Converted:
    kind: str  # of weights to have it in, where nobody asks for another: the file's own is twice as large as what there was
    sees: bool


def convert(
    family: Family, checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore, eyes: Path | None = None
) -> Converted:
    """Write *target* from a checkpoint, and *eyes* where it sees, its family's can be converted, and anybody wants them.

    Errors: FileFormatError naming file and tensor; UnsupportedModel for what has no counterpart in GGUF.
    """
    stated = checkpoint.config()
    fields = Fields.of_text(stated, family.defaults)
    _check(family, fields)
    quantisation = Quantisation.read(stated)
    with checkpoint.tensors(family.apart) as tensors:
        root = _root(family, tensors)
        table = root + family.table
        n_tokens = vocabulary.n_embeddings(tensors, table, family.lengths["embd"](fields))
        words = family.words(checkpoint, n_tokens, fields.values)
        writer = GGUFWriter(family.architecture)
        kind = FILE_TYPE_MXFP4 if quantisation.is_mxfp4 else file_type(tensors, table)
        writer.add("general.file_type", kind, ValueType.UINT32)
        keys = {"vocab_size": lambda _: n_tokens, **family.keys}
        values = {key: value(fields) for key, value in keys.items()}
        for key, value in {**values, **family.beside(checkpoint), **family.rope(fields)}.items():
            if value is not None:
                writer.add(f"{family.architecture}.{key}", value)
        words.add_to(writer)
        # First what is small: if it cannot be, nothing large was written for nothing.
        sees = eyes is not None and _convert_eyes(family, stated, checkpoint, tensors, words, quantisation, eyes)
        known = {"vocab": n_tokens, **family.known(checkpoint)}
        _write(writer, _Layout(family, fields, tensors, root, known), quantisation, target, on_bytes)
    return Converted("Q8_0" if quantisation.is_fp8 else "", sees=sees)


def _write(writer: GGUFWriter, layout: _Layout, quantisation: Quantisation, target: Path, on_bytes: OnBytes) -> None:
    weights = Weights(layout.tensors, quantisation)
    output = Output(writer, weights)
    for part in layout.parts():
        _add(output, part)
    for name, rows in layout.family.made(layout.fields).items():
        writer.add_tensor(name, rows)
    layout.check_all_used(weights.used)
    output.write(target, on_bytes)


def _number(words: Words, text: str) -> int:
    """Errors: FileFormatError naming a token that images need."""
    found = words.number_of(text)
    if found is None:
        raise FileFormatError(f"the tokenizer has no token {text}, which stands among an image's rows")
    return found


def _convert_eyes(
    family: Family,
    stated: Mapping[str, Any],
    checkpoint: Checkpoint,
    tensors: Tensors,
    words: Words,
    quantisation: Quantisation,
    target: Path,
) -> bool:
    """The file of a projector, as llama.cpp's are; whether the checkpoint has one."""
    eyes = family.eyes
    if eyes is None or all(re.fullmatch("|".join(eyes.unused), name) for name in tensors):
        return False
    fields = Fields.of_vision(stated, eyes.defaults)
    _check(eyes, fields)
    root = _root(eyes, tensors)
    writer = GGUFWriter(eyes.architecture)
    writer.add("general.type", "mmproj")
    writer.add("general.file_type", file_type(tensors, root + eyes.table), ValueType.UINT32)
    values = {key: value(fields) for key, value in eyes.keys.items()}
    for key, value in {**values, **eyes.beside(checkpoint)}.items():
        if value is not None:
            writer.add(f"{eyes.architecture}.{key}", value)
    width = family.lengths["embd"](Fields.of_text(stated, family.defaults))
    n_tokens = vocabulary.n_embeddings(tensors, _root(family, tensors) + family.table, width)
    known = {"vocab": n_tokens, **{name: _number(words, text) for name, text in eyes.tokens.items()}}
    _write(writer, _Layout(eyes, fields, tensors, root, known), quantisation, target, ignore)
    return True


def _check(family: Family, fields: Fields) -> None:
    for name, allowed in family.expects.items():
        found = fields.get(name)
        if found is not None and found not in allowed:
            wanted = f"with {' or '.join(str(value)[:100] for value in allowed)}" if allowed else "without it"
            raise UnsupportedModel(
                f"{fields.file}: {name} is {str(found)[:100]}; a {family.architecture} can only be converted {wanted}"
            )
    family.check(fields)


def _root(family: Family, tensors: Tensors) -> str:
    """Where in the names of the checkpoint the text part is.

    Errors: FileFormatError when nowhere; it names the tensor as most checkpoints have it.
    """
    found = [root for root in family.roots if root + family.table in tensors]
    if not found:  # for the message: where its layers are
        first = family.layers.format(i=0)
        found = [root for root in family.roots if any(name.startswith(root + first) for name in tensors)] or [family.roots[0]]
    tensors.home(found[0] + family.table)
    return found[0]


@dataclass(frozen=True)
class _Part:
    """A line of the table for one layer."""

    line: Line
    ours: str
    sources: tuple[str, ...]
    lengths: Lengths
    bias: str = ""  # the tensor's beside the first source


class _Layout:
    def __init__(self, family: Family, fields: Fields, tensors: Tensors, root: str, known: Lengths) -> None:
        self.family, self.fields, self.tensors, self.root = family, fields, tensors, root
        self.n_layers: int = family.n_layers(fields)
        self.lengths = {**{name: value(fields) for name, value in family.lengths.items()}, **known}

    def parts(self) -> Iterator[_Part]:
        for line in self.family.ends:
            if line.when is None or line.when(self.fields):
                yield self._part(line, "", self._top(line), self.lengths)
        lines = [line for line in self.family.layer if line.when is None or line.when(self.fields)]
        for i in range(self.n_layers):
            kinds: Set[str] = self.family.kinds(self.fields, i)
            lengths = {**self.lengths, **self.family.layer_lengths(self.fields, i)}
            prefix = self.root + self.family.layers.format(i=i)
            for line in lines:
                is_absent = line.spare and f"{prefix}{line.theirs}.weight" not in self.tensors
                if (not line.on or line.on in kinds) and not is_absent:
                    yield self._part(line, self.family.ours.format(i=i), prefix + line.theirs, lengths)

    def _top(self, line: Line) -> str:
        """What begins with a slash stands beside this part in some checkpoints, with its name's beginning in others."""
        if not line.theirs.startswith("/"):
            return self.root + line.theirs
        name, suffix = line.theirs[1:], "" if line.whole else ".weight"
        roots = ("", self.root.removesuffix("model."), self.root, *_BESIDE)
        return next((root + name for root in roots if root + name + suffix in self.tensors), name)

    def _part(self, line: Line, ours: str, theirs: str, lengths: Lengths) -> _Part:
        if line.instead is not None:
            other = theirs.removesuffix(line.theirs) + line.instead.theirs
            if other + ("" if line.instead.whole else ".weight") in self.tensors:
                return self._part(line.instead, ours, other, lengths)
        n_experts = lengths.get("experts", 0)
        suffix = "" if line.whole else ".weight"
        names = tuple(theirs.replace("{e}", str(e)) for e in range(n_experts)) if "{e}" in theirs else (theirs,)
        bias = "" if line.whole else f"{names[0]}.bias"
        has_bias = bool(bias) and (bias in self.tensors or (line.biased is not None and line.biased(self.fields)))
        return _Part(line, ours + line.ours + suffix, tuple(name + suffix for name in names), lengths, bias if has_bias else "")

    def check_all_used(self, used: Set[str]) -> None:
        """Errors: UnsupportedModel naming a tensor of the checkpoint that has no place in the file."""
        unused = re.compile("|".join((*_UNUSED, *self.family.unused, *self._beyond())))
        # A head that is tied may be stored as well.
        heads = {f"{root}lm_head.weight" for root in ("", self.root.removesuffix("model."), self.root)}
        for name in self.tensors:
            if name not in used and name not in heads and not unused.fullmatch(name):
                raise UnsupportedModel(
                    f"{self.tensors.home(name).name}: tensor {name[:200]} has no place in a {self.family.architecture} of "
                    f"{self.n_layers} layers"
                )

    def _beyond(self) -> Iterator[str]:
        if self.family.beyond:
            n_guessing = self.fields.whole("num_nextn_predict_layers", default=0, low=0, high=64)
            for i in range(self.n_layers, self.n_layers + n_guessing):
                yield re.escape(self.root + self.family.layers.format(i=i)) + ".*"


def _add(output: Output, part: _Part) -> None:
    line, lengths = part.line, part.lengths
    shape = _shape(line.dims, lengths)
    result = _shape(line.to or line.dims, lengths)
    change = _bound(line, lengths)
    if line.packed:
        output.add_blocks(part.ours, part.sources[0], shape, result, change)
        return
    is_stack = "{e}" in line.theirs
    output.add(
        Piece(part.ours, part.sources, shape, result, change, is_stack=is_stack, is_exact=line.exact, computes=line.computes)
    )
    if part.bias:
        ours = part.ours.removesuffix(".weight") + ".bias"
        moved = change if line.changes_bias else unchanged
        output.add(Piece(ours, [part.bias], shape[:1], result[:1], moved))


def _bound(line: Line, lengths: Lengths) -> Change:
    change = line.change
    if change is None:
        return unchanged

    def bound(rows: Rows) -> Rows:
        return change(rows, lengths)

    return bound


def _shape(dims: str, lengths: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(int(part) if part.isdigit() else lengths[part] for part in axis.split("*")) for axis in dims.split())


def described(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """The class that config.json names, and all of it."""
    stated = checkpoint.config()
    names = stated.get("architectures")
    name = names[0] if isinstance(names, list) and names else stated.get("model_type", "")
    return str(name), stated
