"""What the table of classes promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from puna.engines import ARCHITECTURES as TEXT
from puna.errors import FileFormatError, UnsupportedModel
from puna.vision.registry import ARCHITECTURES, PROJECTORS
from tests.vision import gemma3, llava, pixtral
from tests.vision.encoding import opened_eyes, picture
from tests.vision.files import Encoder

MODELS = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
SECTION = MODELS.partition("## Models that see")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", [*PROJECTORS, *ARCHITECTURES])
def test_what_sees_is_written_down(name: str) -> None:
    assert f"`{name}`" in SECTION


@pytest.mark.parametrize("kind", sorted({*PROJECTORS.values(), *ARCHITECTURES.values()}))
def test_classes_are_there(kind: str) -> None:
    module, _, cls = kind.partition(":")
    assert callable(getattr(import_module(module), cls))


def test_the_other_half_of_a_file_that_holds_both_is_run_here() -> None:
    assert set(ARCHITECTURES) <= set(TEXT)


@pytest.mark.parametrize("name", ["v.blk.0.ls_out.weight", "v.blk.2.attn_q_norm.weight", "v.pre_ln.bias", "mm.model.fc.weight"])
def test_what_a_projectors_file_holds_is_computed_or_refused(name: str, tmp_path: Path) -> None:
    text, encoder = gemma3.write_text(tmp_path / "text.gguf"), gemma3.encoder()
    encoder.values(name, (72,))
    with pytest.raises(UnsupportedModel, match=name), opened_eyes(encoder.save(tmp_path / "p.gguf"), text):
        pass


def test_what_hears_and_layers_that_nobody_wants_may_be_there(tmp_path: Path) -> None:
    text, encoder = gemma3.write_text(tmp_path / "text.gguf"), gemma3.encoder()
    for name in ("mm.a.fc.weight", "a.blk.0.ln1.weight", "v.blk.3.ln1.weight", "v.blk.0.ffn_up.input_scale"):
        encoder.values(name, (72,))
    with opened_eyes(encoder.save(tmp_path / "p.gguf"), text) as eyes:
        assert eyes.rows(picture(20, 20)).shape == (9, gemma3.N_EMBD_TEXT)


@pytest.mark.parametrize(
    ("write_text", "encoder"),
    [
        (pixtral.write_text, partial(pixtral.encoder, image_size=1 << 14)),
        (gemma3.write_text, partial(gemma3.encoder, patch=128, side=48, cell=4)),
        (llava.write_text, partial(llava.encoder, patch=128, side=12, pinpoints=[6144, 6144])),
    ],
    ids=["pixtral", "gemma3", "llava"],
)
def test_images_that_a_file_asks_for_are_bounded(
    write_text: Callable[[Path], Path], encoder: Callable[[], Encoder], tmp_path: Path
) -> None:
    """The largest is prepared when the file is opened, before anybody knows whether there is room."""
    text, projector = write_text(tmp_path / "t.gguf"), encoder().save(tmp_path / "p.gguf")
    with pytest.raises(FileFormatError, match="more than 33554432"), opened_eyes(projector, text):
        pass
