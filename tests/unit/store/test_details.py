from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.api.parameter_count import human_number
from puna.errors import FileFormatError, NotFound
from puna.gguf.writer import GGUFWriter
from puna.store.disk.config import ModelConfig
from puna.store.models.capabilities import capabilities
from puna.store.models.details import FileDetails, read_details
from tests.unit.store.gguf_files import JINJA, write_model


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (12_400, "12K"),
        (22_000_000, "22M"),
        (26_000, "26K"),
        (500_500_000, "500.50M"),
        (134_515_008, "134.52M"),
        (7_000_000_000, "7B"),
        (8_030_261_248, "8.0B"),
        (1_000_000, "1M"),
    ],
)
def test_numbers_of_parameters(count: int, text: str) -> None:
    assert human_number(count) == text


def test_facts_of_a_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "x.gguf", file_type=15, general__size_label="8B", tokenizer__chat_template=JINJA)
    details = read_details(path)
    assert details.architecture == "llama"
    assert details.kind == "model"
    assert details.n_parameters == 128
    assert details.file_type == "Q4_K_M"
    assert details.context_length == 256
    assert details.embedding_length == 32
    assert details.chat_template == JINJA
    assert details.size_label == "8B"


@pytest.mark.parametrize(
    ("number", "name"), [(0, "F32"), (2, "Q4_0"), (1024 + 14, "Q4_K_S"), (999, "unknown"), (None, "unknown")]
)
def test_quantisation_names(tmp_path: Path, number: int | None, name: str) -> None:
    assert read_details(write_model(tmp_path / "x.gguf", file_type=number)).file_type == name


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"general__type": "adapter"}, "adapter"),
        ({"general__type": "mmproj"}, "projector"),
        ({"architecture": "clip"}, "projector"),
        ({"general__type": "model"}, "model"),
    ],
)
def test_kinds(tmp_path: Path, keys: dict[str, Any], kind: str) -> None:
    assert read_details(write_model(tmp_path / "x.gguf", **keys)).kind == kind


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert read_details(write_model(path, file_type=2)).file_type == "Q4_0"
    path.unlink()
    assert read_details(write_model(path, file_type=15, general__size_label="8B")).file_type == "Q4_K_M"


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileFormatError):
        read_details(tmp_path / "x.gguf")
    with pytest.raises(NotFound):
        read_details(tmp_path / "y.gguf")


def found(
    tmp_path: Path, template: str = "", config: ModelConfig | None = None, *, projector: bool = False, **keys: Any
) -> list[str]:
    details: FileDetails = read_details(write_model(tmp_path / "x.gguf", **keys))
    return capabilities(details, template, config or ModelConfig(), has_projector=projector)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ .Prompt }}", ["completion"]),
        ("{{ if .Tools }}{{ .Tools }}{{ end }}", ["completion", "tools"]),
        ("{{- range $.Tools }}{{ . }}{{ end }}", ["completion", "tools"]),
        ("{{/* .Tools */}}{{ .Prompt }}", ["completion"]),
        ('{{ "text .Tools" }}', ["completion"]),
        ("the .Tools of text", ["completion"]),
        ("{{ .ToolsX }}", ["completion"]),
        ("{{ .Prompt }}{{ .Suffix }}", ["completion", "insert"]),
        ("{{ range .Messages }}<think>{{ .Thinking }}</think>{{ .Content }}{{ end }}", ["completion", "thinking"]),
        ("{{ range .Messages }}{{ .Thinking }}{{ end }}", ["completion"]),
    ],
)
def test_capabilities_of_go_templates(tmp_path: Path, template: str, expected: list[str]) -> None:
    assert found(tmp_path, template, tokenizer__chat_template="{{ tools }}") == expected


@pytest.mark.parametrize(
    ("jinja", "expected"),
    [
        (JINJA, ["completion"]),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", ["completion", "tools"]),
        ("text about tools {{ 'tools' }}", ["completion"]),
        ("{{ '<think>' }}", ["completion", "thinking"]),
    ],
)
def test_capabilities_of_jinja_templates(tmp_path: Path, jinja: str, expected: list[str]) -> None:
    assert found(tmp_path, tokenizer__chat_template=jinja) == expected


def test_capabilities_of_files_and_configurations(tmp_path: Path) -> None:
    assert found(tmp_path, llama__pooling_type=1) == ["embedding"]
    assert found(tmp_path, llama__pooling_type=4) == ["rerank"]
    assert found(tmp_path, llama__pooling_type=0xFFFFFFFF) == ["completion"], "written by programs that write every key"
    assert found(tmp_path, llama__pooling_type="4") == ["embedding"], "what it is only the runner can say"
    assert found(tmp_path, projector=True) == ["completion", "vision"]
    assert found(tmp_path, llama__vision__block_count=2) == ["completion", "vision"]
    assert found(tmp_path, llama__audio__block_count=2) == ["completion", "audio"]
    assert found(tmp_path, config=ModelConfig(model_family="gptoss")) == ["completion", "thinking"]
    assert found(tmp_path, config=ModelConfig(capabilities=["image", "completion"])) == ["completion", "image"]
    assert capabilities(None, "", ModelConfig(), has_projector=False) == []


def test_a_file_that_holds_an_encoder_of_images_sees_whatever_its_keys_say(tmp_path: Path) -> None:
    writer = GGUFWriter("llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.add_tensor("v.patch_embd.weight", np.zeros((4, 4), np.float32))
    writer.write(tmp_path / "m.gguf")
    assert read_details(tmp_path / "m.gguf").has_vision


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"clip__vision__block_count": 2}, ["completion", "vision"]),
        ({"clip__has_audio_encoder": True, "clip__audio__block_count": 2}, ["completion", "audio"]),
        ({"clip__has_audio_encoder": True, "clip__vision__block_count": 2}, ["completion", "vision", "audio"]),
        ({}, ["completion", "vision"]),  # of the first converters, which only knew images
    ],
)
def test_a_projector_tells_what_it_is_for(tmp_path: Path, keys: dict[str, Any], expected: list[str]) -> None:
    model = read_details(write_model(tmp_path / "x.gguf"))
    writer = GGUFWriter("clip")
    for key, value in keys.items():
        writer.add(key.replace("__", "."), value)
    writer.write(tmp_path / "p.gguf")
    projector = read_details(tmp_path / "p.gguf")
    assert capabilities(model, "", ModelConfig(), has_projector=True, projector=projector) == expected


TOOLS, THINKS = "{{ tools }}", "{{ '<think>' }}"


@pytest.mark.parametrize(
    ("renderer", "parser", "jinja", "expected"),
    [
        ("qwen3-coder", "qwen3-coder", "", {"tools"}),
        ("qwen3-coder", "", "", {"tools"}),
        ("glm-4.7", "glm-4.7", "", {"tools", "thinking"}),
        ("glm-4.7", "qwen3-coder", THINKS, {"tools"}),
        ("olmo3-think", "olmo3-think", TOOLS, {"thinking"}),
        ("nobody", "qwen3", TOOLS + THINKS, set()),
        ("qwen3-coder", "nobody", TOOLS, set()),
        ("", "qwen3-coder", "", set()),
        ("", "qwen3-coder", TOOLS, {"tools"}),
        ("", "qwen3", TOOLS, {"tools", "thinking"}),
        ("", "passthrough", TOOLS, set()),
        ("", "nobody", TOOLS + THINKS, {"tools", "thinking"}),
    ],
)
def test_what_a_renderer_and_a_parser_can_do_together(
    tmp_path: Path, renderer: str, parser: str, jinja: str, expected: set[str]
) -> None:
    """Only what both the prompt shows and the answer is read for."""
    config = ModelConfig(renderer=renderer, parser=parser)
    assert set(found(tmp_path, config=config, tokenizer__chat_template=jinja)) == {"completion", *expected}
