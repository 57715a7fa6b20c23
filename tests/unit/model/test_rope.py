from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.gguf.writer import GGUFWriter
from puna.ml.tensor import RopeOptions
from puna.model.rope import rope_options


def read(path: Path, **keys: Any) -> RopeOptions:
    writer = GGUFWriter("llama")
    writer.add("llama.context_length", 8192)
    for key, value in keys.items():
        writer.add("llama.rope." + key.replace("__", "."), value)
    writer.write(path / "rope.gguf")
    with GGUFFile.open(path / "rope.gguf") as file:
        return rope_options(file, n_dims=64)


def test_defaults(tmp_path: Path) -> None:
    assert read(tmp_path) == RopeOptions(n_dims=64, original_ctx=8192)


@pytest.mark.parametrize(
    "keys", [{"scaling__factor": 4.0}, {"scaling__type": "linear", "scaling__factor": 4.0}, {"scale_linear": 4.0}]
)
def test_a_factor_without_a_type_is_linear(tmp_path: Path, keys: dict[str, Any]) -> None:
    options = read(tmp_path, **keys)
    assert (options.scale, options.ext_factor) == (0.25, 0.0)


def test_yarn(tmp_path: Path) -> None:
    options = read(tmp_path, scaling__type="yarn", scaling__factor=8.0, scaling__original_context_length=1024)
    assert (options.scale, options.ext_factor, options.original_ctx) == (0.125, 1.0, 1024)


def test_a_factor_of_extrapolation_below_zero_is_none_that_is_stated(tmp_path: Path) -> None:
    for factor, found in ((-1.0, 1.0), (0.0, 0.0), (0.5, 0.5)):
        assert read(tmp_path, scaling__type="yarn", scaling__factor=8.0, scaling__yarn_ext_factor=factor).ext_factor == found


def test_no_scaling_ignores_the_factor(tmp_path: Path) -> None:
    assert read(tmp_path, scaling__type="none", scaling__factor=8.0).scale == 1.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"freq_base": -1.0}, "freq_base"),
        ({"freq_base": float("nan")}, "freq_base"),
        ({"scaling__factor": -2.0}, "factor"),
        ({"dimension_count": 66}, "dimension_count"),
        ({"dimension_count": 7}, "dimension_count"),
        ({"scaling__type": "spiral"}, "spiral"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read(tmp_path, **keys)
