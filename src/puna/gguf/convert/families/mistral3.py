"""Mistral Small 3.1 and 3.2, Ministral 3: what of them reads.

YaRN's magnitude may be divided by one of its own, and queries grow with their position; the keys are this architecture's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import head
from puna.gguf.convert.families.llama import LLAMA
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import YARN, Rotation

VISION = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")


def rope(fields: Fields) -> dict[str, Any]:
    rotation = Rotation(fields, head(fields), (YARN,))
    if rotation.kind != YARN:
        return rotation.keys()
    options = rotation.options
    one, all_dim = (options.number(name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    if options.has("attention_factor") or (one and all_dim and one != 1.0):
        raise UnsupportedModel(f"{fields.file}: YaRN with a magnitude of its own cannot be converted for mistral3")
    found = {"rope.freq_base": rotation.base, "rope.dimension_count": rotation.n_dims, **rotation.yarn()}
    if one and all_dim:
        found["rope.scaling.yarn_log_multiplier"] = all_dim
    if growth := options.number("llama_4_scaling_beta", default=0.0):
        found["attention.temperature_scale"] = growth
    return found


MISTRAL3 = replace(
    LLAMA,
    architecture="mistral3",
    expects={**LLAMA.expects, "sliding_window": ()},
    rope=rope,
    made=lambda fields: {},
    unused=VISION,
)
