"""What holds for the encoders of all families."""

from __future__ import annotations

from pathlib import Path

import pytest

from puna.native.ggml import ggml
from puna.vision.look import LookAtOnce
from tests.vision.encoding import Inputs, opened_eyes, picture
from tests.vision.table import FAMILIES


@pytest.mark.parametrize("flash_attention", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_deep_encoder_has_no_more_nodes_than_it_says(name: str, flash_attention: bool, tmp_path: Path) -> None:
    """The library ends the process where a graph is larger than its room."""
    family = FAMILIES[name]
    text, projector = family.write_text(tmp_path / "t.gguf"), family.encoder(n_layers=12).save(tmp_path / "p.gguf")
    with opened_eyes(projector, text, flash_attention=flash_attention) as eyes:
        # The last of an image's pieces, and an image whose windows are of all sizes.
        piece = eyes.model.prepare(picture(308, 364)).pieces[-1]
        most = eyes.model.max_nodes()
        ctx = eyes.backend.context(8 * most)
        inputs = Inputs(ctx, piece)
        state = eyes.model.begin(ctx, inputs)
        for index in range(eyes.model.n_layers):
            state = eyes.model.layer(LookAtOnce(ctx), state, inputs, index)
        ctx.output(eyes.model.end(ctx, piece.used(state), inputs))
        n_bytes = ggml().ggml_used_mem(ctx.address) - ggml().ggml_graph_overhead_custom(8 * most, False)
        assert n_bytes <= most * ggml().ggml_tensor_overhead()
        assert ctx.n_nodes <= most
        ctx.close()
