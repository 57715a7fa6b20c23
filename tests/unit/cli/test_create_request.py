from __future__ import annotations

from pathlib import Path

from tests.checkpoints.folder import write_case

from puna.cli.create_request import build
from puna.store.models import modelfile


def test_layers_in_folders_of_their_own_come_along(tmp_path: Path) -> None:
    """Not so what is published beside a model in another form."""
    folder = write_case(tmp_path / "hf", "embedding-gemma")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"another form")
    files = build("m", modelfile.parse("FROM ./hf"), tmp_path)[1]
    assert {"model.safetensors", "2_Dense/model.safetensors", "3_Dense/config.json", "1_Pooling/config.json"} <= set(files)
    assert "onnx/model.safetensors" not in files
