"""A model file that libllama runs: looked at first, then loaded.

The look is a dry load: libllama reads the file's head, plans everything and takes no memory. What it refuses it refuses
there, with its reasons, and what it would take is known before it is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from puna import host
from puna.compat import hazards
from puna.compat.cache import AttentionCache, StateCache
from puna.compat.failures import why
from puna.compat.sizes import HOST, memory_report, read_sizes, weight_places
from puna.compat.step import Forward
from puna.errors import LoadError, OutOfMemory, UnsupportedModel
from puna.gguf.layers import n_stored_layers
from puna.gguf.lora import TABLE, read_lora
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Use
from puna.ml.ggml.devices import cpu, devices, join
from puna.ml.ggml.weights import Weights
from puna.native.decoder import MAX_DEVICES, MAX_SEQUENCES, Context, ContextOptions, Model, Placement
from puna.native.llama import POOLING_TYPE_NONE, POOLING_TYPE_RANK, POOLING_TYPE_UNSPECIFIED
from puna.native.log import captured
from puna.native.structs import AbortFlag
from puna.wire import DeviceLayers, MemoryReport

log = logging.getLogger(__name__)

# What is noted of each token that is kept: libllama's position, shift, and set of sequences as bits; the same here.
_CELL_BYTES = 80


@dataclass(frozen=True)
class Options:
    """*pooling* as GGUF numbers it, 0 for a model that generates text."""

    n_threads: int
    cache_type: int  # ggml_type of keys and values
    flash_attention: bool = True
    pooling: int = POOLING_TYPE_NONE
    use_mmap: bool = True
    use_repacking: bool = True
    layers: Sequence[DeviceLayers] = ()
    adapters: Sequence[str] = ()


class LlamaModel:
    """The model, what it keeps of past tokens, and its forward pass. Ask for nothing but figures before load."""

    def __init__(
        self,
        file: GGUFFile,
        limits: Limits,
        options: Options,
        *,
        whole_texts: Limits | None = None,
        max_rows: int | None = None,
    ) -> None:
        """The file must stay open until close. *max_rows* of one batch may be asked for; by default one for each sequence.

        *whole_texts* are the limits instead where a text must be in one batch as a whole.

        Errors: UnsupportedModel, MissingTensors, FileFormatError, BadRequest, OutOfMemory, LoadError.
        """
        self._stack = ExitStack()
        self.file = file
        self._options = options
        self._abort = AbortFlag()
        self._model: Model | None = None
        self._context: Context | None = None
        try:
            for adapter in options.adapters:
                with GGUFFile.open(adapter) as opened:
                    _check_adapter(opened, file)
            hazards.check(file, has_adapters=bool(options.adapters))
            self._n_layers = n_stored_layers(file.metadata)
            self._layers = _last_layers(options.layers, self._n_layers)
            self._placement = _placement(self._layers)
            self.limits = replace(limits, max_sequences=min(limits.max_sequences, MAX_SEQUENCES), n_pool=_n_cells(file, limits))
            self._look(whole_texts or limits, max_rows)
        except BaseException:
            self.close()
            raise

    def _look(self, whole_texts: Limits, max_rows: int | None) -> None:
        with captured() as lines:
            model = self._load(is_dry=True)
        if model is None:
            raise why(self.file.path, lines)
        # libllama would keep the whole file mapped beside what the CPU multiplies in an order of its own.
        reorders = not weight_places(lines).isdisjoint(kind.name for kind in cpu().buffer_types[:-1])
        self._maps = self._options.use_mmap and not reorders
        self._stack.callback(model.close)
        _check_kind(self.file, model)
        self._needs_whole_steps = model.is_recurrent or model.is_hybrid
        self._context_options = self._plan(max_rows)
        _check_books(self.limits)
        context = self._create(model)
        # Where tokens see those after them, or all are judged together, a text is computed in one batch.
        self.sees_whole_text = context.memory is None or not context.is_causal or self._options.pooling == POOLING_TYPE_RANK
        if self.sees_whole_text:
            context.close()
            self.limits = whole_texts
            options = self._plan(max_rows)
            self._context_options = replace(options, n_outputs=options.n_batch, embeds=True, pooling=POOLING_TYPE_UNSPECIFIED)
            context = self._create(model)
        self.n_vocab, self.has_axes, self.n_embd = model.n_vocab, model.has_axes, model.n_embd_in
        self._head_copy = self._second_table() if context.is_causal else 0
        self.cache = self._make_cache(model, context)
        books = None if isinstance(self.cache, Uncached) else self.cache
        self.forward = Forward(self, self.limits, books, max_rows=self._context_options.n_outputs, output=self._output())
        context.close()
        model.close()

    def _second_table(self) -> int:
        """Bytes of the embedding table's copy, where it is also the head and multiplied elsewhere or in another order."""
        if TABLE not in self.file.tensors or "output.weight" in self.file.tensors:
            return 0
        owner = next((part.device for part in self._layers if part.begin <= self._n_layers < part.end), HOST)
        head = next(device for device in devices() if device.name == owner)
        uses_all = self._options.use_repacking
        weights = Weights(
            self.file,
            self._n_layers,
            lambda layer: head if layer == self._n_layers else cpu(),
            use_mmap=False,
            allows=lambda _buffer_type, _tensor_type: uses_all,
        )
        try:
            for use in (Use.ROWS, Use.MATRIX):
                weights.tensor(TABLE, use)
            return sum(weights.layer_bytes(head))
        except LoadError:  # the device does not multiply this type: libllama leaves the head with the host
            return 0
        finally:
            weights.close()

    def _plan(self, max_rows: int | None) -> ContextOptions:
        limits = self.limits
        embeds = self._options.pooling != POOLING_TYPE_NONE
        return ContextOptions(
            n_cells=limits.n_cells,
            n_sequences=limits.max_sequences,
            n_batch=limits.n_batch,
            n_outputs=limits.n_batch if embeds else max_rows or limits.max_outputs,
            n_threads=self._options.n_threads,
            cache_type=self._options.cache_type,
            flash_attention=self._options.flash_attention,
            embeds=embeds,
            pooling=POOLING_TYPE_NONE,
            # A step of a recurrent model may move the states of sequences that are not in it.
            abort_function=0 if self._needs_whole_steps else self._abort.function,
            abort_data=0 if self._needs_whole_steps else self._abort.data,
        )

    def _output(self) -> str:
        if self._options.pooling == POOLING_TYPE_NONE:
            return "hidden" if self.sees_whole_text else "logits"
        if self._options.pooling == POOLING_TYPE_RANK:
            return "scores"
        return "pooled" if self.sees_whole_text else "hidden"

    def _make_cache(self, model: Model, context: Context) -> AttentionCache | StateCache | Uncached:
        if context.memory is None:
            return Uncached()
        if model.is_recurrent:
            return StateCache(lambda: self.context, self.limits)
        return AttentionCache(
            lambda: self.context,
            self.limits,
            context.n_cells,
            window=model.window,
            can_shift=context.can_shift,
            is_hybrid=model.is_hybrid,
            has_axes=model.has_axes,
        )

    def _create(self, model: Model) -> Context:
        with captured() as lines:
            context = Context.create(model, self._context_options)
        if context is None:
            raise why(self.file.path, lines)
        self._stack.callback(context.close)
        self._sizes = read_sizes(lines)
        return context

    def _load(self, *, is_dry: bool, progress: Callable[[float], bool] = lambda _share: True) -> Model | None:
        return Model.load(
            str(self.file.path),
            placement=self._placement,
            use_mmap=not is_dry and self._maps,
            use_repacking=self._options.use_repacking,
            is_dry=is_dry,
            progress=progress,
        )

    def load(self, progress: Callable[[float], None]) -> None:
        """Read the weights and take all memory.

        Errors: LoadError also when abort was called meanwhile; OutOfMemory.
        """

        def go_on(share: float) -> bool:
            progress(share)
            return not self._abort

        with captured() as lines:
            self._model = self._load(is_dry=False, progress=go_on)
        if self._model is None:
            raise LoadError("the load was cancelled") if self._abort else why(self.file.path, lines)
        self._stack.callback(self._model.close)
        self._context = self._create(self._model)
        with captured() as lines:
            if self._options.adapters and not self._context.apply(self._options.adapters):
                raise why(self.file.path, lines)

    @property
    def model(self) -> Model:
        assert self._model is not None, "load comes first"
        return self._model

    @property
    def context(self) -> Context:
        assert self._context is not None, "load comes first"
        return self._context

    def check_free(self) -> None:
        """Nothing is taken before load; this says whether it could be.

        Errors: OutOfMemory.
        """
        report = self.memory()
        own = report.input_weights + report.host - report.mapped  # of the host; pages of the file can be read again
        for device in report.devices:
            free = _free(device.device)
            needed = device.total + (own if device.device == HOST else 0)
            if needed > free:
                gigabytes = f"{needed / 1e9:.1f} GB are needed on {device.device}, {free / 1e9:.1f} GB are free"
                raise OutOfMemory(f"{self.file.path}: {gigabytes}")

    def memory(self) -> MemoryReport:
        sizes, copy = self._sizes, self._head_copy
        return memory_report(self.file, self._n_layers, self._layers, sizes, head_copy=copy, is_mapped=self._maps)

    def set_threads(self, n_threads: int) -> None:
        """Between two steps."""
        self.context.set_threads(n_threads)

    def abort(self) -> None:
        """Make the load, or the running step if it may be broken off, end early; from any thread."""
        self._abort.set()

    def clear_abort(self) -> None:
        self._abort.clear()

    def close(self) -> None:
        self._stack.close()
        self._model = self._context = None


def _check_adapter(adapter: GGUFFile, model: GGUFFile) -> None:
    """Errors: FileFormatError; UnsupportedModel for a change that would end the process inside libllama."""
    changed = {change.weight for change in read_lora(adapter, model)}
    if TABLE in changed and "output.weight" not in model.tensors:
        raise UnsupportedModel(f"adapter {adapter.path}: libllama cannot change an embedding table that is also the head")


def _free(name: str) -> int:
    """Bytes on a device."""
    if name == HOST:
        memory = host.memory()
        return memory.free + memory.swap_free
    return next(device.memory()[0] for device in devices() if device.name == name)


def _check_books(limits: Limits) -> None:
    """Errors: OutOfMemory when the accounts of so many tokens alone, here and in libllama, would fill the memory."""
    n_bytes = limits.n_cells * (_CELL_BYTES + limits.max_sequences)
    if limits.n_cells >= 1 << 31 or n_bytes > host.memory().free:
        raise OutOfMemory(f"{n_bytes / 1e9:.1f} GB would be needed only to keep account of {limits.n_cells} tokens")


def _check_kind(file: GGUFFile, model: Model) -> None:
    """Errors: UnsupportedModel for models that do not go from a text to its next token, or to a vector."""
    if model.is_diffusion:
        raise UnsupportedModel(f"{file.path}: {file.architecture} writes by diffusion, which is not supported")
    if model.has_encoder and model.has_decoder:
        raise UnsupportedModel(f"{file.path}: {file.architecture} has an encoder and a decoder, which is not supported")


def _n_cells(file: GGUFFile, limits: Limits) -> int:
    """As many as wanted; but libllama chooses between factors for short and long texts by the size of the whole pool."""
    original = file.metadata.integer("rope.scaling.original_context_length", 0)
    if any("rope_factors_long" in name for name in file.tensors) and limits.n_ctx <= original < limits.n_cells:
        log.info(
            "all sequences together may hold %d tokens: with more, libllama would turn to its factors for long texts", original
        )
        return original
    return limits.n_cells


def _last_layers(layers: Sequence[DeviceLayers], n_layers: int) -> list[DeviceLayers]:
    """As libllama places layers: each device takes as many as it was given, in order, the last one up to the output.

    Errors: LoadError for layers that the model does not have.
    """
    counts: dict[str, int] = {}
    for part in sorted(layers, key=lambda part: part.begin):
        if not 0 <= part.begin <= part.end <= n_layers + 1:
            raise LoadError(f"layers {part.begin}..{part.end} are not within the model's {n_layers + 1}")
        counts[part.device] = counts.get(part.device, 0) + part.end - part.begin
    begin = n_layers + 1 - sum(counts.values())
    if begin < 0:
        raise LoadError(f"{sum(counts.values())} layers are placed, the model has {n_layers + 1}")
    placed = []
    for device, count in counts.items():
        placed.append(DeviceLayers(device=device, begin=begin, end=begin + count))
        begin += count
    return placed


def _placement(layers: Sequence[DeviceLayers]) -> Placement:
    """Errors: LoadError for a device that is not there."""
    join(part.device for part in layers)
    known = {device.name: device.address for device in devices()}
    unknown = [part.device for part in layers if part.device not in known]
    if unknown:
        raise LoadError(f"there is no device {unknown[0]}; this machine has {', '.join(known)}")
    if len(layers) > MAX_DEVICES:
        raise LoadError(f"libllama spreads a model over {MAX_DEVICES} devices at most")
    return Placement(tuple(known[p.device] for p in layers), tuple(p.end - p.begin for p in layers))
