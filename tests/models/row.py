"""A row of the table of architectures: what is written about one, and the tiny random files it is tested with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from tests.tiny import CHATML, CONTROL, RandomWeights, Vocabulary, bpe_vocabulary, spm_vocabulary

# With small batches: together they fill a sequence's room in the cache to the last cell.
WINDOW_AS_BATCH: Mapping[str, Any] = {"attention__sliding_window": 128}


@dataclass(frozen=True)
class Row:
    """``write(path, **variant)`` writes a file; the first variant should be the plain one, in F32.

    A variant whose name has "cache-q8_0" in it runs with such a cache, one with "no-flash" without the fused attention, one
    with "small-batches" so that the contract's texts are longer than what layers with a window keep of them. The fused
    attention sums in F16, whose order changes where the engine has forgotten what libllama masks; without it nothing but a
    wrong set of keys shows. "dtype" is the type of the matrices.
    """

    models: str  # examples, for docs/models.md
    attends: str  # what layers attend to, for docs/models.md
    write: Callable[..., Path]
    variants: Mapping[str, Mapping[str, Any]]
    # Of the largest error over the largest logit, for files that are not quantised; every row's energy must be within 1e-3.
    worst: float = 1e-3
    can_shift: bool = True
    is_recurrent: bool = False  # libllama forgets such a sequence as a whole or not at all, and moves nothing in it
    # Variants in which libllama turns cached keys wrongly (the note says how), and what is different in files of one layer
    # that are the judges instead.
    shifted_alone: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    note: str = ""  # where libllama and other engines differ: which is followed, and why
    # Writes the same model as libllama reads it, for rows of other programs' names of keys and tensors.
    norm: Callable[..., Path] | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)  # of both engines, beside n_ctx 1024 and 4 sequences


def with_marks(vocabulary: Vocabulary, marks: Sequence[str]) -> Vocabulary:
    """The same with further control tokens at the end."""
    tokens = [*vocabulary.tokens, *(mark.encode() for mark in marks)]
    scores = [*vocabulary.scores, *[0.0] * (len(marks) if vocabulary.scores else 0)]
    return replace(vocabulary, tokens=tokens, kinds=[*vocabulary.kinds, *[CONTROL] * len(marks)], scores=scores)


class TinyFile:
    """Metadata and weights of a tiny model: a byte-level BPE vocabulary (or SentencePiece) and what every model states."""

    def __init__(
        self,
        architecture: str,
        *,
        seed: int = 0,
        dtype: str = "f32",
        n_layers: int = 3,
        n_embd: int = 256,
        n_heads: int = 4,
        n_kv_heads: int | list[int] = 2,  # of all layers, or of each
        n_ff: int = 512,
        n_ctx: int = 2048,
        spm: bool = False,
        chat_template: str | None = CHATML,
        marks: Sequence[str] = (),
        **metadata: Any,
    ) -> None:
        """*marks* are further control tokens, the last of the vocabulary. *metadata* has the architecture's own keys, ``__`` for
        a point: ``attention__key_length=64``; None leaves one out.
        """
        vocabulary = with_marks(spm_vocabulary() if spm else bpe_vocabulary(), marks)
        self.writer = GGUFWriter(architecture)
        self.n_vocab, self.n_embd = len(vocabulary.tokens), n_embd
        # Without the architecture: libllama takes a name with "phi3" in it for a promise about the vocabulary.
        self.writer.add("general.name", f"tiny {dtype} seed {seed}")
        stated: dict[str, Any] = {
            "vocab_size": self.n_vocab,
            "context_length": n_ctx,
            "embedding_length": n_embd,
            "block_count": n_layers,
            "feed_forward_length": n_ff,
            "attention.head_count": n_heads,
            "attention.head_count_kv": n_kv_heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        stated |= {key.replace("__", "."): value for key, value in metadata.items()}
        for key, value in stated.items():
            if value is not None:
                self.writer.add(f"{architecture}.{key}", value)
        vocabulary.add_to(self.writer)
        if chat_template is not None:
            self.writer.add("tokenizer.chat_template", chat_template)
        self.weights = RandomWeights(self.writer, seed, TensorType.from_name(dtype))

    def ends(
        self, *, tied: bool = False, norm_bias: bool = False, logits_std: float = 3.0, norm_name: str = "output_norm"
    ) -> None:
        """Embedding, last norm and head."""
        w = self.weights
        w.matrix("token_embd.weight", self.n_vocab, self.n_embd, std=logits_std / self.n_embd**0.5 if tied else 1.0)
        # A tied head would mostly repeat the last token, whose embedding is still in the residual; random signs undo that.
        w.norm(f"{norm_name}.weight", self.n_embd, random_signs=tied)
        if norm_bias:
            w.bias(f"{norm_name}.bias", self.n_embd)
        if not tied:
            w.matrix("output.weight", self.n_vocab, self.n_embd, std=logits_std / self.n_embd**0.5)

    def matrices(self, prefix: str, shapes: Mapping[str, tuple[int, int]], *, biases: bool = False, gain: float = 1.0) -> None:
        """``{"attn_q": (n_out, n_in)}``; outputs keep unit size. ``biases`` adds one to each."""
        for name, (n_out, n_in) in shapes.items():
            self.weights.matrix(f"{prefix}.{name}.weight", n_out, n_in, std=gain / n_in**0.5)
            if biases:
                self.weights.bias(f"{prefix}.{name}.bias", n_out)

    def norms(self, prefix: str, *names: str, n: int = 0, biases: bool = False) -> None:
        for name in names:
            self.weights.norm(f"{prefix}.{name}.weight", n or self.n_embd)
            if biases:
                self.weights.bias(f"{prefix}.{name}.bias", n or self.n_embd)

    def experts(
        self,
        prefix: str,
        *,
        n_experts: int,
        n_ff: int,
        biases: bool = False,
        names: tuple[str, ...] = ("gate", "up", "down"),
        dtype: str = "",
        gain: float = 1.0,
    ) -> None:
        """A router and experts; the router's scores spread, so that both engines choose the same experts."""
        n = self.n_embd
        stacks = (
            RandomWeights(self.writer, int(self.weights.random.integers(1 << 30)), TensorType.from_name(dtype))
            if dtype
            else self.weights
        )
        # As files have it, the router is never quantised.
        plain = RandomWeights(self.writer, int(self.weights.random.integers(1 << 30)), TensorType.F32)
        plain.matrix(f"{prefix}.ffn_gate_inp.weight", n_experts, n, std=2.0 / n**0.5)
        for name in names:
            n_out, n_in = {"down": (n, n_ff), "gate_up": (2 * n_ff, n)}.get(name, (n_ff, n))
            std = (3.0 if name == "down" else gain) / n_in**0.5
            stacks.stack(f"{prefix}.ffn_{name}_exps.weight", n_experts, n_out, n_in, std=std)
            if biases:
                self.weights.bias_rows(f"{prefix}.ffn_{name}_exps.bias", n_experts, n_out)
        if biases:
            self.weights.bias(f"{prefix}.ffn_gate_inp.bias", n_experts)

    def selection_bias(self, prefix: str, n_experts: int) -> None:
        """As large as the probabilities of sigmoids, so that it decides some choices."""
        self.weights.bias(f"{prefix}.exp_probs_b.bias", n_experts)

    def mlp(self, prefix: str, *, n_ff: int, suffix: str = "") -> None:
        """Gate, up and down; suffix ``_shexp`` for a shared expert."""
        shapes = {"ffn_gate": (n_ff, self.n_embd), "ffn_up": (n_ff, self.n_embd)}
        self.matrices(prefix, {name + suffix: shape for name, shape in shapes.items()})
        self.matrices(prefix, {"ffn_down" + suffix: (self.n_embd, n_ff)}, gain=3.0)

    def save(self, path: str | Path) -> Path:
        self.writer.write(path)
        return Path(path)
