"""Models that see against libmtmd and libllama: both in one process, taking turns, on the same files and pixels.

Encoders and language models have layers of published shapes, and random weights; there are few of them, so that a run ends. A
ratio above 1 says that Puna's is faster. Three rows for each: the encoder alone; a prompt of an image between texts, from pixels
to the logits after it; and the same prompt when the image is encoded already, as a share of that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.mtmd_oracle import MtmdOracle
from tests.puna_engine import PunaEngine
from tests.vision import gemma3, gemma4, idefics3, internvl, lfm2, llama4, llava, minicpmv, pixtral, qwen
from tests.vision.conversation import Prompt, computed, marked
from tests.vision.encoding import Eyes, opened_eyes, picture
from tests.vision.files import Encoder, add_tokens

from bench import slices
from bench.facts import facts
from puna.native.kernels.library import kernels
from puna.native.log import route_to_logging

WORDS = "why is the sky blue and the dog in the fox " * 3
N_CTX = 4096


@dataclass(frozen=True)
class Shape:
    model: str
    encoder: Callable[..., Encoder]
    sizes: dict[str, Any]
    image: tuple[int, int]  # that neither engine resizes
    text: str  # of bench.slices
    n_layers: int = 2  # of the text; 0 as the slice has them
    tokens: Sequence[str] = ()
    for_libmtmd: Callable[[Encoder], Encoder] = lambda encoder: encoder


SIGLIP = {"n_embd": 1152, "n_heads": 16, "n_ff": 4304}  # so400m

SHAPES = {
    "gemma3": Shape(
        "Gemma 3", gemma3.encoder, {**SIGLIP, "side": 64, "n_text": 3840}, (896, 896), "gemma3", tokens=gemma3.TOKENS
    ),
    "gemma4": Shape(
        "Gemma 4 26B",
        gemma4.encoder,
        {**SIGLIP, "cell": 3, "n_places": 1024, "clamped": False, "n_text": 2816},
        (960, 672),
        "gemma4:experts",
        0,
        gemma4.TOKENS,
    ),
    "gemma4-small": Shape(
        "Gemma 4 E4B",
        gemma4.encoder,
        {"n_embd": 768, "n_heads": 12, "n_ff": 3072, "cell": 3, "n_places": 1024, "standardised": False, "n_text": 2560},
        (960, 672),
        "gemma4",
        0,
        gemma4.TOKENS,
    ),
    "idefics3": Shape(
        "SmolVLM 2.2B",
        idefics3.encoder,
        {**SIGLIP, "side": 27, "cell": 3, "longest": 378, "n_text": 4096},
        (378, 378),
        "llama",
        tokens=idefics3.TOKENS,
    ),
    "internvl": Shape(
        "InternVL 3 8B",
        internvl.encoder,
        {"n_embd": 1024, "n_heads": 16, "n_ff": 4096, "side": 32, "n_text": 4096},
        (448, 448),
        "llama",
        tokens=internvl.TOKENS,
        for_libmtmd=internvl.for_libmtmd,
    ),
    "lfm2": Shape(
        "LFM2-VL 1.6B",
        lfm2.encoder,
        {"n_embd": 1152, "n_heads": 16, "n_ff": 4304, "n_text": 2048},
        (512, 512),
        "lfm2",
        0,
        lfm2.TOKENS,
    ),
    "llama4": Shape(
        "Llama 4 Scout",
        llama4.encoder,
        {"n_embd": 1408, "n_heads": 16, "n_ff": 5632, "patch": 14, "tile": 336, "n_adapter": (4096, 4096), "n_text": 5120},
        (336, 336),
        "llama4",
        0,
        llama4.TOKENS,
    ),
    "llava": Shape(
        "LLaVA 1.5",
        llava.encoder,
        {"n_embd": 1024, "n_heads": 16, "n_ff": 4096, "side": 24, "n_text": 4096},
        (336, 336),
        "llama",
        for_libmtmd=llava.for_libmtmd,
    ),
    "minicpm-v": Shape(
        "MiniCPM-V 2.6",
        minicpmv.encoder,
        {**SIGLIP, "side": 32, "n_queries": 64, "n_text": 3584},
        (448, 448),
        "qwen2",
        tokens=minicpmv.TOKENS,
    ),
    "pixtral": Shape(
        "Mistral Small 3.1",
        pixtral.encoder,
        {"n_heads": 16, "head_dim": 64, "n_ff": 4096, "image_size": 1540, "n_text": 4096},
        (840, 840),
        "mistral3",
        tokens=pixtral.TOKENS,
    ),
    "qwen2-vl": Shape(
        "Qwen 2-VL 7B",
        qwen.encoder25,
        {"n_embd": 1280, "n_heads": 16, "n_ff": 5120, "is_first": True, "n_text": 3584},
        (840, 840),
        "qwen2vl",
        tokens=qwen.TOKENS,
    ),
    "qwen2.5-vl": Shape(
        "Qwen 2.5-VL 7B",
        qwen.encoder25,
        {"n_embd": 1280, "n_heads": 16, "n_ff": 3420, "pattern": 3, "n_text": 3584},
        (840, 840),
        "qwen2vl",
        tokens=qwen.TOKENS,
    ),
    "qwen3-vl": Shape(
        "Qwen 3-VL 8B",
        qwen.encoder3,
        {**SIGLIP, "side": 48, "deepstack": (0, 1, 2), "n_text": 4096},
        (768, 768),
        "qwen3vl",
        4,
        qwen.TOKENS,
    ),
}

ENCODER, PROMPT, AGAIN = "encoder", "prompt", "prompt, image encoded"


@dataclass
class Row:
    model: str
    what: str
    weights: str
    n_rows: int
    puna_ms: float
    libmtmd_ms: float
    ratio: float  # of the medians
    best_ratio: float
    share: float  # of Puna's whole prompt


class Contest:
    def __init__(self, shape: Shape, weights: str, n_layers: int, n_threads: int, folder: Path, stack: ExitStack) -> None:
        encoder = shape.encoder(n_layers=n_layers, dtype=weights, **shape.sizes)
        text = Path(shutil.copy(slices.path_of(shape.text, shape.n_layers), folder / "text.gguf"))
        add_tokens(text, shape.tokens)
        projector = encoder.save(folder / "ours.gguf")
        theirs = shape.for_libmtmd(encoder).save(folder / "theirs.gguf")
        self.eyes: Eyes = stack.enter_context(opened_eyes(projector, text, kernels=kernels()))
        self.eyes.backend.set_threads(n_threads)
        options: dict[str, Any] = {"n_ctx": N_CTX, "n_batch": N_CTX // 2, "n_threads": n_threads}
        self.oracle = stack.enter_context(MtmdOracle(text, theirs, **options))
        self.puna = stack.enter_context(PunaEngine(text, use_kernels=True, **options))
        self.pixels = picture(*shape.image)
        self.pieces = self.eyes.model.prepare(self.pixels).pieces
        self.chunks = self.oracle.chunks(*marked([WORDS, self.pixels, WORDS]))
        self.seen = self._prompt()

    def _prompt(self) -> Prompt:
        prompt = Prompt()
        prompt.add_text(self.eyes.tokenizer.encode(WORDS))
        prompt.add_image(self.eyes, self.pixels)
        prompt.add_text(self.eyes.tokenizer.encode(WORDS, add_special=False))
        return prompt

    def runs(self) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
        def seen() -> None:
            self.puna.forget()
            computed(self.puna, [self.seen])

        def prompt() -> None:
            self.puna.forget()
            computed(self.puna, [self._prompt()])

        def theirs() -> None:
            self.oracle.forget()
            self.oracle.evaluate(self.oracle.chunks(*marked([WORDS, self.pixels, WORDS])))

        return {
            ENCODER: (
                lambda: [self.eyes.encoded(piece) for piece in self.pieces],
                lambda: [self.oracle.encode(chunk) for chunk in self.chunks if chunk.kind == "image"],
            ),
            PROMPT: (prompt, theirs),
            AGAIN: (seen, None),
        }


def race(contest: Contest, samples: int, clock: Callable[[], float]) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each sample, Puna's and libmtmd's, by what was run."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for what, pair in contest.runs().items():
        found = times[what] = [], []
        for sample in range(samples + 1):
            for i in (0, 1) if sample % 2 else (1, 0):
                run = pair[i]
                if run is None:
                    continue
                begin = clock()
                run()
                if sample:  # the first gives memory
                    found[i].append(clock() - begin)
    return times


def rows_of(name: str, weights: str, options: argparse.Namespace) -> list[Row]:
    clock, n_threads = (time.process_time, 1) if options.cpu_time else (time.perf_counter, options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contest = Contest(SHAPES[name], weights, options.layers, n_threads, Path(folder), stack)
        times = race(contest, options.samples, clock)
        n_rows = contest.eyes.model.prepare(contest.pixels).n_rows
    whole = statistics.median(times[PROMPT][0])
    found = []
    for what, (own, theirs) in times.items():
        ratios = (statistics.median(theirs) / statistics.median(own), min(theirs) / min(own)) if theirs else (0.0, 0.0)
        ms = min(own) * 1000, min(theirs, default=0.0) * 1000
        found.append(Row(SHAPES[name].model, what, weights, n_rows, *ms, *ratios, statistics.median(own) / whole))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--weights", nargs="+", default=["f16"])
    parser.add_argument("--layers", type=int, default=3, help="of the encoder")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="on a machine that others use: one thread, and its time alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    route_to_logging()
    found = []
    console = Console()
    for model in options.models:
        for weights in options.weights:
            rows = rows_of(model, weights, options)
            table = Table("model", "what", "weights", "rows", "Puna ms", "libmtmd ms", "ratio", "best", "of the prompt")
            for row in rows:
                peer = (f"{row.libmtmd_ms:.0f}", f"{row.ratio:.3f}", f"{row.best_ratio:.3f}") if row.ratio else ("", "", "")
                table.add_row(row.model, row.what, row.weights, str(row.n_rows), f"{row.puna_ms:.0f}", *peer, f"{row.share:.3f}")
            console.print(table)
            found += rows
    if options.json:
        options.json.write_text(json.dumps({"facts": facts(), "rows": [asdict(row) for row in found]}, indent=1))


if __name__ == "__main__":
    main()
