from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.models.dialect import Translation
from tests.models.prenorm import WIDE_HEADS, write_prenorm
from tests.models.row import Row

YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 16.0,
    "rope__scaling__original_context_length": 64,
    "rope__scaling__yarn_beta_fast": 4.0,
    "rope__scaling__yarn_beta_slow": 2.0,
}

# A context so long that the betas which are meant where none are stated tell pairs apart: 15 to 34 of 48.
NO_BETAS: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 16.0,
    "rope__scaling__original_context_length": 4096,
    "rope__scaling__yarn_log_multiplier": 1.0,
}

MISTRAL3 = Row(
    models="Mistral Small 3.1 and 3.2, Ministral 3",
    attends="everything before",
    write=partial(write_prenorm, architecture="mistral3", head_dim=96),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "yarn": {**YARN, "rope__scaling__yarn_log_multiplier": 1.0},
        "yarn-half": {**YARN, "rope__scaling__yarn_log_multiplier": 0.5},
        "yarn-no-betas": NO_BETAS,
        "temperature": {**YARN, "rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.5},
        "tied": {"tied": True},
        "experts": {"n_experts": 8, "n_ff": 256, "expert_feed_forward_length": None},
    },
    shifted_alone={"yarn-half": [{}]},
    worst=WIDE_HEADS,
    note="libllama multiplies shifted keys by YaRN's magnitude a second time, where it is not 1",
)

_RENAMED = {
    "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
    "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
    "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale",
    "attention.temperature_scale": "rope.scaling_beta",
}


def write_as_ancestor(path: Path, **options: Any) -> Path:
    file = Translation(MISTRAL3.write(path, **options))
    file.values = {_RENAMED.get(name, name): value for name, value in file.values.items()}
    file.values["rope.scaling.mscale_all_dim"] = file.values["rope.scaling.mscale"]
    return file.save(path, "mistral3")


ANCESTOR = Row(
    models="the same in files of the ancestor",
    attends=MISTRAL3.attends,
    write=write_as_ancestor,
    norm=MISTRAL3.write,
    variants={"temperature": MISTRAL3.variants["temperature"]},
    worst=WIDE_HEADS,
)
