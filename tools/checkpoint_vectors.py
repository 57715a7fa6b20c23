"""Writes what tests/checkpoints expects: logits that the authors' program (transformers, with torch) computes,
and tokens (tokenizers).

Run it where both are installed, which tests need neither of: ``python tools/checkpoint_vectors.py [name ...]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.checkpoints.cases import CASES, ROWS, STRIDE, TOKENS, Case  # noqa: E402  # after the path that leads there
from tests.checkpoints.weights import in_few_bits, picture, random_weights  # noqa: E402
from tests.checkpoints.words import CUTS, MARKS, TEXTS, of_bytes, of_characters  # noqa: E402

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def main(names: list[str]) -> None:
    target = ROOT / "tests" / "checkpoints" / "vectors"
    target.mkdir(exist_ok=True)
    for name in names or [*CASES, "words"]:
        if name == "words":
            (target / "words.json").write_text(json.dumps(words(), ensure_ascii=False, separators=(",", ":")) + "\n")
            continue
        found = vectors(CASES[name])
        (target / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        spread = np.std(found["logits"])
        print(f"{name}: {len(found['shapes'])} tensors, logits of size {spread:.3}")


def vectors(case: Case) -> dict[str, Any]:
    """The shapes of all tensors, by the names that the program publishes them under, and rows of logits; of an encoder the
    vector of the whole text.
    """
    torch, transformers, safetensors = (import_module(name) for name in ("torch", "transformers", "safetensors.numpy"))
    cls = getattr(transformers, case.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stated = {key: value for key, value in case.config.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(stated))
        config = cls.config_class.from_pretrained(folder)
        cls(config).save_pretrained(folder / "made")
        made = safetensors.load_file(folder / "made" / "model.safetensors")
        shapes = {tensor: list(values.shape) for tensor, values in sorted(made.items())}
        for tensor, shape in shapes.items():
            if case.turned and tensor.endswith(case.turned):
                shapes[tensor] = [*shape[:-2], shape[-1], shape[-2]]
        weights = random_weights(shapes, less_one=case.less_one, short_queries=case.short_queries)
        weights = {name: few_bits(case, name, values, torch) for name, values in weights.items()}
        safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model, report = cls.from_pretrained(folder, output_loading_info=True, **options)
        missing = {key: value for key, value in report.items() if value}
        if missing:
            raise SystemExit(f"{case.model}: not loaded as it was written: {missing}")
        with torch.no_grad():
            output = model.eval()(torch.tensor([TOKENS]))
            rows_of_picture = looked_at(model, case, torch) if case.pixels[0] else None
        if hasattr(output, "logits"):
            rows = output.logits[0].numpy()[ROWS]
        else:  # an encoder, pooled by the mean
            rows = output.last_hidden_state[0].numpy().mean(0, keepdims=True)
            if case.dense:
                width = rows.shape[1]
                more = {"2_Dense/linear.weight": [case.dense, width], "3_Dense/linear.weight": [width, case.dense]}
                shapes |= more
                for layer in random_weights(more).values():
                    rows = rows @ layer.T
    found = {"shapes": shapes, "logits": [[float(f"{value:.6g}") for value in row[::STRIDE]] for row in rows]}
    if rows_of_picture is not None:
        found["rows"] = [[float(f"{value:.6g}") for value in row] for row in rows_of_picture]
    return found


def looked_at(model: Any, case: Case, torch: Any) -> Any:
    """The rows that the encoder makes of a picture, which is normalised and cut as the published processors do."""
    values = picture(*case.pixels).astype(np.float32) / 255
    if case.model.startswith("Gemma3"):
        return model.get_image_features(_channels_first(values, [0.5] * 3, [0.5] * 3, torch)).pooler_output[0].numpy()
    pixels = _channels_first(values, CLIP_MEAN, CLIP_STD, torch)
    if case.model.startswith("Mistral3"):
        sizes = torch.tensor([pixels.shape[2:]])
        return model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output[0].numpy()
    patch, merge, frames = case.config["vision_config"]["patch_size"], 2, 2
    if patch == 16:
        pixels = _channels_first(values, [0.5] * 3, [0.5] * 3, torch)
    _, _, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    film = pixels.repeat(frames, 1, 1, 1).reshape(1, frames, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    flat = film.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, 3 * frames * patch * patch)
    seen = model.model.visual(flat, grid_thw=torch.tensor([[1, rows, columns]]))
    return torch.cat([seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])], -1).numpy()


def _channels_first(values: Any, mean: list[float], std: list[float], torch: Any) -> Any:
    return torch.tensor(((values - np.array(mean)) / np.array(std)).astype(np.float32)).permute(2, 0, 1)[None]


def words() -> dict[str, list[list[int]]]:
    """The tokens of all texts, by the kind of tokenizer."""
    library = import_module("tokenizers")
    files = {kind: of_bytes(kind) for kind in CUTS} | {kind: of_characters(kind) for kind in MARKS}
    found = {}
    for kind, content in files.items():
        tokenizer = library.Tokenizer.from_str(json.dumps(content))
        found[kind] = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    return found


def few_bits(case: Case, name: str, values: Any, torch: Any) -> Any:
    """The numbers that what is published in few bits stands for, by the library's own decoders."""
    parts = in_few_bits(case, name, values)
    if f"{name}_blocks" in parts:
        decode = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
        blocks, scales = (torch.tensor(parts[f"{name}_{part}"]) for part in ("blocks", "scales"))
        return decode(blocks, scales, dtype=torch.float32).contiguous().numpy()
    if name in parts:
        scale = next(part for key, part in parts.items() if key.startswith(f"{name}_scale"))
        numbers = torch.tensor(parts[name]).view(torch.float8_e4m3fn).to(torch.float32)
        spread = torch.tensor(scale.reshape(scale.shape or (1, 1)))
        height, width = case.config["quantization_config"].get("weight_block_size") or (
            -(-numbers.shape[0] // spread.shape[0]),
            numbers.shape[1],
        )
        spread = spread.repeat_interleave(height, 0).repeat_interleave(width, 1)[: numbers.shape[0], : numbers.shape[1]]
        return (numbers * spread).contiguous().numpy()
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
