"""Opening a projector's file with the class that encodes for its family."""

from __future__ import annotations

import re
from collections.abc import Set
from importlib import import_module

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.metadata import PROJECTOR
from puna.vision.model import VisionModel

# By what a separate projector file states in clip.projector_type or clip.vision.projector_type.
PROJECTORS: dict[str, str] = {
    "gemma3": "puna.vision.arch.gemma3:Gemma3Vision",
    "idefics3": "puna.vision.arch.idefics3:Idefics3Vision",
    "internvl": "puna.vision.arch.internvl:InternVLVision",
    "lfm2": "puna.vision.arch.lfm2:LFM2Vision",
    "resampler": "puna.vision.arch.minicpmv:MiniCPMVVision",
    "mlp": "puna.vision.arch.llava:LlavaVision",
    "mlp_norm": "puna.vision.arch.llava:LlavaVision",
    "pixtral": "puna.vision.arch.pixtral:PixtralVision",
    "gemma4v": "puna.vision.arch.gemma4:Gemma4Vision",
    "llama4": "puna.vision.arch.llama4:Llama4Vision",
    "qwen2vl_merger": "puna.vision.arch.qwen25vl:Qwen2VLVision",
    "qwen2.5vl_merger": "puna.vision.arch.qwen25vl:Qwen25VLVision",
    "qwen3vl_merger": "puna.vision.arch.qwen3vl:Qwen3VLVision",
}

# By the architecture of a file that holds both parts.
ARCHITECTURES: dict[str, str] = {
    "gemma3": "puna.vision.arch.gemma3:Gemma3Vision",
    "lfm2": "puna.vision.arch.lfm2:LFM2Vision",
    "lfm2moe": "puna.vision.arch.lfm2:LFM2Vision",
    "mistral3": "puna.vision.arch.pixtral:PixtralVision",
    "gemma4": "puna.vision.arch.gemma4:Gemma4Vision",
    "llama4": "puna.vision.arch.llama4:Llama4Vision",
    "qwen25vl": "puna.vision.arch.qwen25vl:Qwen25VLVision",
    "qwen35": "puna.vision.arch.qwen3vl:Qwen3VLVision",
    "qwen35moe": "puna.vision.arch.qwen3vl:Qwen3VLVision",
    "qwen3vl": "puna.vision.arch.qwen3vl:Qwen3VLVision",
    "qwen3vlmoe": "puna.vision.arch.qwen3vl:Qwen3VLVision",
    "mllama": "puna.vision.arch.mllama:MLlamaVision",
}

# What an encoder of images need not ask for: what hears, a token's row that the text model has, factors for other devices, and
# bounds of values, which are read from the file, and places that are computed.
HARMLESS = re.compile(r"mm\.a\..+|v\.token_embd\.img_break|resampler\.pos_embed_k|.+\.input_scale|.+\.(in|out)put_(min|max)")
# Of the largest image that a file asks for, which is prepared when it is opened: several times what any encoder was trained with.
MOST_PIXELS = 1 << 25

_LAYER = re.compile(r"v\.blk\.(\d{1,4})\.")


def kind_of(file: GGUFFile) -> str | None:
    """Which class encodes the images of this file, as "module:class"; None where it holds no encoder of images.

    Errors: UnsupportedModel naming a projector that there is no class for, and those there are.
    """
    if file.architecture == PROJECTOR:
        keys = ("clip.vision.projector_type", "clip.projector_type")
        name = next((file.metadata.string(key) for key in keys if key in file.metadata), "mlp")
        if name not in PROJECTORS:
            raise UnsupportedModel(
                f"{file.path}: projector {name!r} is not supported; supported: {', '.join(sorted(PROJECTORS))}"
            )
        return PROJECTORS[name]
    if not any(name.startswith("v.") for name in file.tensors):
        return None
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModel(f"{file.path}: images of a {file.architecture} model are not supported")
    return ARCHITECTURES[file.architecture]


def open_vision(file: GGUFFile, backend: Backend, text: GGUFFile, tokenizer: Tokenizer) -> VisionModel:
    """The eyes of the model *text*, from its own file or a projector's beside it; the backend is the file's.

    Errors: UnsupportedModel, MissingTensors, FileFormatError.
    """
    kind = kind_of(file)
    if kind is None:
        raise UnsupportedModel(f"{file.path} holds no encoder of images")
    module, _, cls = kind.partition(":")
    opened: VisionModel = getattr(import_module(module), cls)(file, backend, text, tokenizer)
    if file.architecture == PROJECTOR and (left := _passed_over(file, backend.taken, opened.n_layers)):
        raise UnsupportedModel(f"{file.path}: {cls} does not compute with {', '.join(left[:5])}")
    width, height = opened.largest()
    if width * height > MOST_PIXELS:
        raise FileFormatError(f"{file.path}: its images may have {width} x {height} pixels, more than {MOST_PIXELS}")
    return opened


def _passed_over(file: GGUFFile, taken: Set[str], n_layers: int) -> list[str]:
    """Tensors of a projector's own file that nobody asked for, though they would change what is encoded; another library may know
    them. Layers behind the last that is wanted are no such.
    """
    names = (name for name in file.tensors if name.startswith(("v.", "mm.", "resampler.")) and name not in taken)
    return [
        name
        for name in names
        if not HARMLESS.fullmatch(name) and not ((layer := _LAYER.match(name)) and int(layer.group(1)) >= n_layers)
    ]
