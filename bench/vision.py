"""Encoders of images against libmtmd's: both in one process, taking turns, on the same files and pixels.

Layers have the shapes of published models, and random weights; there are few of them, so that a run ends. A ratio above 1 says
that Puna's is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.vision import gemma3, lfm2, llava, pixtral
from tests.vision.encoding import Eyes, picture
from tests.vision.files import Encoder

from bench.facts import facts
from puna.native.kernels.library import kernels
from puna.native.log import route_to_logging


@dataclass(frozen=True)
class Shape:
    write_text: Callable[[Path], Path]
    encoder: Callable[..., Encoder]
    size: tuple[int, int]  # of an image that neither engine resizes
    for_libmtmd: Callable[[Encoder], Encoder] = lambda encoder: encoder


SHAPES = {
    "gemma3": Shape(
        gemma3.write_text,
        lambda **options: gemma3.encoder(n_embd=1152, n_heads=16, n_ff=4304, side=64, **options),
        (896, 896),
    ),
    "pixtral": Shape(
        pixtral.write_text,
        lambda **options: pixtral.encoder(n_heads=16, head_dim=64, n_ff=4096, image_size=1540, **options),
        (840, 840),
    ),
    "llava": Shape(
        llava.write_text,
        lambda **options: llava.encoder(n_embd=1024, n_heads=16, n_ff=4096, side=24, **options),
        (336, 336),
        llava.for_libmtmd,
    ),
    "lfm2": Shape(
        lfm2.write_text,
        lambda **options: lfm2.encoder(n_embd=768, n_heads=12, n_ff=3072, **options),
        (512, 512),
    ),
}


@dataclass
class Row:
    model: str
    weights: str
    n_rows: int
    puna_ms: float
    libmtmd_ms: float
    ratio: float  # of the medians
    best_ratio: float


def race(
    shape: Shape, weights: str, n_layers: int, samples: int, n_threads: int, clock: Callable[[], float]
) -> tuple[int, list[float], list[float]]:
    """Rows of the image, and seconds of each sample, Puna's and libmtmd's."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        encoder = shape.encoder(n_layers=n_layers, dtype=weights)
        text = shape.write_text(folder / "text.gguf")
        theirs = shape.for_libmtmd(encoder).save(folder / "theirs.gguf")
        oracle = stack.enter_context(MtmdOracle(text, theirs, n_threads=n_threads))
        eyes = stack.enter_context(closing(Eyes(encoder.save(folder / "ours.gguf"), text, kernels=kernels())))
        eyes.backend.set_threads(n_threads)
        pixels = picture(*shape.size)
        chunks = [chunk for chunk in oracle.chunks(MARKER, [pixels]) if chunk.kind == "image"]
        pieces = eyes.model.prepare(pixels).pieces
        runs: Sequence[Callable[[], object]] = (
            lambda: [eyes.encoded(piece) for piece in pieces],
            lambda: [oracle.encode(chunk) for chunk in chunks],
        )
        times: tuple[list[float], list[float]] = ([], [])
        for sample in range(samples + 1):
            for i in (0, 1) if sample % 2 else (1, 0):
                begin = clock()
                runs[i]()
                if sample:  # the first gives memory
                    times[i].append(clock() - begin)
        return eyes.model.size(*shape.size)[0], *times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--weights", nargs="+", default=["f16"])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="on a machine that others use: one thread, and its time alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    route_to_logging()
    clock, n_threads = (time.process_time, 1) if options.cpu_time else (time.perf_counter, options.threads)
    found = []
    table = Table("model", "weights", "rows", "Puna ms", "libmtmd ms", "ratio", "best")
    for model in options.models:
        for weights in options.weights:
            n_rows, own, theirs = race(SHAPES[model], weights, options.layers, options.samples, n_threads, clock)
            ratio, best = statistics.median(theirs) / statistics.median(own), min(theirs) / min(own)
            row = Row(model, weights, n_rows, min(own) * 1000, min(theirs) * 1000, ratio, best)
            found.append(row)
            table.add_row(
                model, weights, str(n_rows), f"{row.puna_ms:.0f}", f"{row.libmtmd_ms:.0f}", f"{ratio:.3f}", f"{best:.3f}"
            )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"facts": facts(), "rows": [asdict(row) for row in found]}, indent=1))


if __name__ == "__main__":
    main()
