"""libmtmd as the tables of puna.native have it, on tiny projectors: it takes pictures and texts apart, encodes, and evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.native import projector as projector_module
from puna.native.log import captured
from puna.native.mtmd import mtmd
from puna.native.projector import Medium, Projector
from tests.mmproj import write_projector
from tests.mtmd_oracle import MARKER, MtmdOracle
from tests.overtaken import Overtaken
from tests.tiny import write_gemma3, write_llama

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (lambda path: write_gemma3(path), {"n_text": 128, "metadata": {"clip.vision.projector.scale_factor": 2}}),
    "mlp": (lambda path: write_llama(path), {"n_text": 256, "class_token": True, "pre_norm": True, "post_norm": False}),
}


def picture(seed: int, width: int = 56, height: int = 56) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(kind)
    write, options = KINDS[kind]
    return write(folder / "text.gguf"), write_projector(folder / "mmproj.gguf", kind, **options)


@pytest.fixture(scope="module")
def oracle(files: tuple[Path, Path]) -> Iterator[MtmdOracle]:
    with MtmdOracle(*files, n_sequences=2) as opened:
        yield opened


N_ROWS = {"gemma3": 4, "mlp": 16}


def test_a_prompt_falls_apart_into_texts_and_pictures(oracle: MtmdOracle, kind: str) -> None:
    chunks = oracle.chunks(f"the fox {MARKER} and {MARKER}", [picture(1), picture(2)])
    assert [chunk.kind for chunk in chunks if chunk.kind != "text"] == ["image", "image"]
    images = [chunk for chunk in chunks if chunk.kind == "image"]
    assert [(chunk.n_tokens, chunk.n_positions) for chunk in images] == [(N_ROWS[kind], N_ROWS[kind])] * 2
    assert [oracle.sees_both_ways(chunk) for chunk in images] == [kind == "gemma3"] * 2
    assert all(len(chunk.tokens) == chunk.n_tokens > 0 for chunk in chunks if chunk.kind == "text")
    assert not oracle.has_axes
    positions = images[0].positions(10)
    assert positions is not None
    assert (positions == 10 + np.arange(N_ROWS[kind])).all()


def test_special_tokens_are_parsed_and_added_only_where_wanted(oracle: MtmdOracle) -> None:
    text = "<|im_start|>the fox"
    begun = oracle.chunks(text)[0].tokens
    assert begun[1:] == oracle.chunks(text, add_special=False)[0].tokens
    plain = oracle.projector.tokenize(text, parse_special=False)
    assert plain is not None
    assert len(plain[0].tokens) > len(begun) - 1


def test_rows_are_encoded_and_are_the_same_every_time(oracle: MtmdOracle, kind: str) -> None:
    rows = oracle.encoded(picture(1))
    assert rows.shape == (N_ROWS[kind], oracle.n_out)
    assert np.isfinite(rows).all()
    assert rows.std() > 0.1
    assert (oracle.encoded(picture(1)) == rows).all()
    assert np.abs(oracle.encoded(picture(2)) - rows).max() > 0.1


def test_what_a_picture_shows_decides_what_is_answered(oracle: MtmdOracle) -> None:
    prompt = f"the quick {MARKER} fox"
    rows: dict[int, np.ndarray[Any, Any]] = {}
    for seed in (1, 2, 1):
        oracle.forget()
        chunks = oracle.chunks(prompt, [picture(seed)])
        row, after = oracle.evaluate(chunks)
        assert after == sum(chunk.n_positions for chunk in chunks)
        assert (rows.setdefault(seed, row) == row).all()
    assert np.abs(rows[1] - rows[2]).max() > 0.1
    oracle.forget()
    answer = oracle.answer(prompt, [picture(1)], 8)
    assert answer[0] == rows[1].argmax()
    assert len(answer) == 8


def test_two_sequences_have_pictures_of_their_own(oracle: MtmdOracle) -> None:
    oracle.forget()
    prompt = f"see {MARKER} now"
    alone = [oracle.evaluate(oracle.chunks(prompt, [picture(seed)]), sequence=seed)[0] for seed in (0, 1)]
    oracle.forget()
    for seed in (0, 1):
        row, _ = oracle.evaluate(oracle.chunks(prompt, [picture(seed)]), sequence=seed)
        assert np.abs(row - alone[seed]).max() < 1e-3


def test_a_projector_says_what_it_takes(oracle: MtmdOracle) -> None:
    assert (oracle.projector.sees, oracle.projector.hears, oracle.projector.sample_rate) == (True, False, -1)


def test_what_libmtmd_refuses_is_told(oracle: MtmdOracle, kind: str, tmp_path: Path) -> None:
    _, options = KINDS[kind]
    for changes, reason in (
        ({"n_text": options["n_text"] // 2}, "mismatch"),
        ({"n_stored": 1}, "v.blk.1.attn_out.weight"),
        ({"metadata": {"clip.projector_type": "none such"}}, "unknown projector type"),
    ):
        path = write_projector(tmp_path / "mmproj.gguf", kind, **{**options, **changes})
        with captured() as lines:
            refused = Projector.load(str(path), oracle.model, n_threads=1)
        said = "".join(line.text for line in lines if line.is_complaint)
        assert (refused, reason in said) == (None, True), said
    with captured() as lines:
        assert oracle.projector.tokenize(MARKER, []) is None
        assert oracle.projector.tokenize("no place", [Medium.image(picture(1))]) is None
        assert oracle.projector.tokenize(MARKER, [Medium.audio(np.zeros(1000, np.float32))]) is None
        assert oracle.projector.tokenize(MARKER, [Medium.image(picture(1))]) is not None
    assert any("audio" in line.text for line in lines)


def test_a_projector_is_closed_when_nobody_is_in_the_middle_of_a_picture(
    files: tuple[Path, Path], oracle: MtmdOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library gives Python's lock away meanwhile."""
    overtaken = Overtaken(mtmd(), "mtmd_tokenize", "mtmd_free")
    monkeypatch.setattr(projector_module, "mtmd", lambda: overtaken)
    projector = Projector.load(str(files[1]), oracle.model, n_threads=1)
    assert projector is not None
    found = overtaken.play(lambda: projector.tokenize(MARKER, [Medium.image(picture(1))]), projector.close)
    assert ([chunks is not None for chunks in found], overtaken.events) == ([True], ["called", "freed"])
