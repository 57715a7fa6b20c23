"""What the turns of one row gave one contender, and the figures made of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bench.load.answers import Answer


@dataclass
class Sample:
    """Of one turn, or of several added up. Times in seconds."""

    first_token_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between texts of one answer
    n_answers: int = 0
    n_tokens: int = 0
    n_texts: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    foreign_cpu_s: float = 0.0  # what everything else on the machine took meanwhile
    problems: list[str] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)  # figures of this row only, one per turn

    def add(self, other: Sample) -> None:
        for name, value in vars(other).items():
            if isinstance(value, list):
                getattr(self, name).extend(value)
            elif isinstance(value, dict):
                for key, values in value.items():
                    self.extra.setdefault(key, []).extend(values)
            else:
                setattr(self, name, getattr(self, name) + value)

    def note(self, **figures: float) -> None:
        for name, value in figures.items():
            self.extra.setdefault(name, []).append(value)

    def figures(self) -> dict[str, float]:
        found = {
            "answers": float(self.n_answers),
            "prompt_tokens": float(self.n_prompt_tokens),
            "computed_prompt_tokens": float(self.n_prompt_tokens - self.n_cached_tokens),
            "wall_s": self.wall_s,
            "client_cpu_share": self.client_cpu_s / self.wall_s if self.wall_s else 0.0,
            "server_cpu_share": self.server_cpu_s / self.wall_s if self.wall_s else 0.0,
            "foreign_cpu_share": self.foreign_cpu_s / self.wall_s if self.wall_s else 0.0,
        }
        if self.n_texts:
            found["tokens_per_s"] = self.n_tokens / self.wall_s
            found["tokens_per_text"] = self.n_tokens / self.n_texts
        for name, values in (("first_token", self.first_token_s), ("gap", self.gaps_s)):
            if values:
                found[f"{name}_p50_s"], found[f"{name}_p95_s"] = (float(v) for v in np.percentile(values, (50, 95)))
        return found | {name: (max if "_max" in name else statistics.median)(values) for name, values in self.extra.items()}


def sample_of(answers: Iterable[Answer]) -> Sample:
    sample = Sample()
    for answer in answers:
        if answer.problem:
            sample.problems.append(answer.problem)
        elif not answer.was_aborted:
            sample.n_answers += 1
            sample.first_token_s.append(answer.first_token_s)
            sample.gaps_s += answer.gaps
            sample.n_tokens += answer.n_tokens
            sample.n_texts += len(answer.times)
            sample.n_prompt_tokens += answer.n_prompt_tokens
            sample.n_cached_tokens += answer.n_cached_tokens
    return sample
