"""The largest images that families take, over as many layers as published models have: the graph fits what is said of it, and its
memory grows with the number of patches, not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from puna.native.kernels.library import kernels
from puna.vision.look import LookAtOnce
from tests import needs
from tests.vision import gemma3, lfm2, llava, pixtral
from tests.vision.encoding import Inputs, opened_eyes
from tests.vision.files import Encoder

N_LAYERS = 27
MOST_BYTES = 16 << 10  # of working memory, for each patch of these narrow encoders

ENCODERS: dict[str, tuple[Callable[[Path], Path], Callable[[], Encoder], int]] = {
    "gemma3, 896 pixels": (gemma3.write_text, partial(gemma3.encoder, n_layers=N_LAYERS, n_embd=48, n_ff=80, side=64), 4096),
    "pixtral, 1540 pixels": (pixtral.write_text, partial(pixtral.encoder, n_layers=N_LAYERS, image_size=1540), 12100),
    "llava, 336 pixels": (llava.write_text, partial(llava.encoder, n_layers=N_LAYERS, side=24), 576),
    "lfm2, 512 pixels": (lfm2.write_text, partial(lfm2.encoder, n_layers=N_LAYERS), 1024),
}


@pytest.mark.parametrize("own", [True, False], ids=["own", "ggml"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_graph_over_all_layers_of_the_largest_image(name: str, own: bool, tmp_path: Path) -> None:
    if own:
        needs.kernels()
    write_text, encoder, n_patches = ENCODERS[name]
    text = write_text(tmp_path / "text.gguf")
    with opened_eyes(encoder().save(tmp_path / "p.gguf"), text, kernels=kernels() if own else None) as eyes:
        model = eyes.model
        width, height = model.largest()
        prepared = model.prepare(np.zeros((height, width, 3), np.uint8))
        piece = max(prepared.pieces, key=lambda piece: len(piece.arrays["patches"]))
        assert len(piece.arrays["patches"]) == n_patches
        context = eyes.backend.context(model.max_nodes())
        inputs = Inputs(context, piece)
        state = model.begin(context, inputs)
        for index in range(model.n_layers):
            state = model.layer(LookAtOnce(context), state, inputs, index)
        context.output(model.end(context, piece.used(state), inputs))
        assert context.n_nodes <= model.max_nodes()
        assert sum(eyes.backend.reserve_sizes(context)) < MOST_BYTES * n_patches
        context.close()
