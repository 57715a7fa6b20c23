"""Every sampler against libllama's function of that name, on the same logits and the same text.

What is compared is what is left of a row before a token is drawn: the tokens and their probabilities. Where libllama
draws for itself (XTC, mirostat), the chance is taken out of it, or its choice is followed.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.native.library import opened
from puna.sample.breakers import breakers_of
from puna.sample.choice import distribution, sample_batch
from puna.sample.dry import Breakers
from puna.sample.sampler import Sampler
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import SAMPLERS, SamplingOptions
from tests.oracle import Oracle
from tests.tiny import write_llama


class TokenData(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class TokenDataArray(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("is_sorted", ctypes.c_bool),
    ]


FUNCTIONS = {
    "llama_sampler_init_top_k": "p i",
    "llama_sampler_init_top_p": "p fz",
    "llama_sampler_init_min_p": "p fz",
    "llama_sampler_init_typical": "p fz",
    "llama_sampler_init_temp": "p f",
    "llama_sampler_init_xtc": "p ffzu",
    "llama_sampler_init_top_n_sigma": "p f",
    "llama_sampler_init_mirostat": "p iuffi",
    "llama_sampler_init_mirostat_v2": "p uff",
    "llama_sampler_init_penalties": "p iifff",
    "llama_sampler_init_dry": "p pffiipz",
    "llama_sampler_apply": "v pp",
    "llama_sampler_accept": "v pi",
    "llama_sampler_free": "v p",
}
LIB = opened().bind("llama", FUNCTIONS, {}, {})
Row = npt.NDArray[np.float32]
Chances = dict[int, float]
N_VOCAB = 2000


class Theirs:
    """libllama's samplers, one after the other."""

    def __init__(self, *samplers: int) -> None:
        self._samplers = samplers

    def accept(self, token: int) -> None:
        for sampler in self._samplers:
            LIB.llama_sampler_accept(sampler, token)

    def apply(self, row: Row) -> tuple[Chances, int]:
        """What they leave, and the token that the last one has chosen, if it chooses."""
        data = (TokenData * len(row))(*[TokenData(i, float(x), 0.0) for i, x in enumerate(row)])
        array = TokenDataArray(data, len(row), -1, False)
        for sampler in self._samplers:
            LIB.llama_sampler_apply(sampler, ctypes.addressof(array))
        left = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
        chosen = array.data[array.selected].id if array.selected >= 0 else -1
        logits = np.array([logit for _, logit in left], np.float64)
        weights = np.exp(logits - logits.max())
        return {token: w for (token, _), w in zip(left, weights / weights.sum(), strict=True) if w > 0}, chosen

    def close(self) -> None:
        for sampler in self._samplers:
            LIB.llama_sampler_free(sampler)


def ours(row: Row, sampler: Sampler) -> Chances:
    ids, probs = distribution(row, sampler)
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


def agree(found: Chances, wanted: Chances) -> None:
    """libllama computes in single precision: a token at a threshold may be in one and out of the other."""
    differing = found.keys() ^ wanted.keys()
    edge = min([*found.values(), *wanted.values()])
    assert len(differing) <= 1, (len(found), len(wanted))
    assert all(max(found.get(t, 0), wanted.get(t, 0)) <= 1.001 * edge for t in differing)
    for token in found.keys() & wanted.keys():
        assert found[token] == pytest.approx(wanted[token], rel=2e-3 + 2 * edge * len(differing), abs=1e-9)


def rows(n: int, spread: float = 3.0) -> list[Row]:
    rng = np.random.default_rng(5)
    return [(rng.standard_normal(N_VOCAB) * spread).astype(np.float32) for _ in range(n)]


OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 1}
INIT: dict[str, Callable[..., int]] = {
    "top_k": lambda k: LIB.llama_sampler_init_top_k(k),
    "top_p": lambda p: LIB.llama_sampler_init_top_p(p, 0),
    "min_p": lambda p: LIB.llama_sampler_init_min_p(p, 0),
    "typical_p": lambda p: LIB.llama_sampler_init_typical(p, 0),
    "temperature": lambda t: LIB.llama_sampler_init_temp(t),
    "top_n_sigma": lambda n: LIB.llama_sampler_init_top_n_sigma(n),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("top_k", k) for k in (2, 40, 1500)],
        *[("top_p", p) for p in (0.1, 0.5, 0.95)],
        *[("min_p", p) for p in (0.5, 0.05, 0.001)],
        *[("typical_p", p) for p in (0.1, 0.5, 0.95)],
        *[("temperature", t) for t in (0.2, 0.9, 3.0)],
        *[("top_n_sigma", n) for n in (0.5, 1.0, 2.5)],
    ],
)
@pytest.mark.parametrize("spread", [0.7, 3.0])
def test_one_step(name: str, value: float, spread: float) -> None:
    theirs = Theirs(INIT[name](value))
    for row in rows(5, spread):
        agree(ours(row, Sampler(SamplingOptions(**OFF | {name: value}))), theirs.apply(row)[0])
    theirs.close()


CHAIN = {"top_n_sigma": 2.5, "top_k": 200, "typical_p": 0.97, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7}


@pytest.mark.parametrize("seed", range(12))
def test_many_steps_in_any_order(seed: int) -> None:
    order = random.Random(seed).sample(list(CHAIN), k=random.Random(seed).randint(2, len(CHAIN)))
    theirs = Theirs(*(INIT[name](CHAIN[name]) for name in order))
    for row in rows(4, 2.0):
        options = SamplingOptions(**OFF | CHAIN | {"samplers": tuple(order)})
        agree(ours(row, Sampler(options)), theirs.apply(row)[0])
    theirs.close()


def test_by_default_the_order_is_theirs() -> None:
    theirs = Theirs(*(INIT[name](CHAIN[name]) for name in SAMPLERS if name in CHAIN))
    for row in rows(10, 2.0):
        agree(ours(row, Sampler(SamplingOptions(**OFF | CHAIN))), theirs.apply(row)[0])
    theirs.close()


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("top_k", [0, 50])
def test_xtc(threshold: float, top_k: int) -> None:
    """With probability 1 it is done each time."""
    theirs = Theirs(INIT["top_k"](top_k or N_VOCAB), LIB.llama_sampler_init_xtc(1.0, threshold, 0, 1))
    n_cut = 0
    for row in rows(12, 4.0):
        options = SamplingOptions(**OFF | {"xtc_probability": 1.0, "xtc_threshold": threshold, "top_k": top_k})
        found = ours(row, Sampler(options))
        agree(found, theirs.apply(row)[0])
        n_cut += (top_k or N_VOCAB) - len(found)
    assert n_cut > 0 or threshold > 0.1
    assert not n_cut or threshold <= 0.5
    theirs.close()


@pytest.mark.parametrize("window", [3, 64, 500])
def test_penalties(window: int) -> None:
    options = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    theirs = Theirs(LIB.llama_sampler_init_penalties(N_VOCAB, window, 1.3, 0.2, 0.4))
    sampler = Sampler(SamplingOptions(**OFF | options | {"repeat_last_n": window}))
    for number, row in enumerate(rows(120)):
        if number % 30 == 0:
            agree(ours(row, sampler), theirs.apply(row)[0])
        for token in (number % 7, number * 31 % N_VOCAB):
            theirs.accept(token)
            sampler.accept(token)
    theirs.close()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizer, Oracle]]:
    path: Path = write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf", n_layers=1, n_embd=64, n_ff=64)
    tokenizer = Tokenizer(path)
    with Oracle(path) as oracle:
        yield tokenizer, oracle
    tokenizer.close()


REPEATING = (
    'the fox: the "quick" fox\nthe fox: the "quick" fox, the fox: the lazy dog\n and the fox: the' + " na na na na na na" * 4
)
DRY_CASES = [
    (0.8, 1.75, 2, 400, ("\n", ":", '"', "*")),
    (0.8, 1.75, 2, 400, ()),
    (1.5, 1.2, 1, 30, ("\n",)),
    (0.5, 3.0, 0, 50, ("x", " quick", "fox, the", "e ")),
    (2.0, 1.0, 3, 17, ("the lazy",)),
    (0.8, 1.75, 4, 3, ()),
]


@pytest.mark.parametrize(("multiplier", "base", "allowed", "window", "breakers"), DRY_CASES)
@pytest.mark.parametrize("how", ["one by one", "as a prompt"])
def test_dry(
    vocabulary: tuple[Tokenizer, Oracle],
    multiplier: float,
    base: float,
    allowed: int,
    window: int,
    breakers: Sequence[str],
    how: str,
) -> None:
    tokenizer, oracle = vocabulary
    texts = (ctypes.c_char_p * max(len(breakers), 1))(*[text.encode() for text in breakers])
    theirs = Theirs(
        LIB.llama_sampler_init_dry(
            oracle.vocab, multiplier, base, allowed, window, ctypes.addressof(texts) if breakers else None, len(breakers)
        )
    )
    options = {
        "dry_multiplier": multiplier,
        "dry_base": base,
        "dry_allowed_length": allowed,
        "dry_penalty_last_n": window,
        "dry_sequence_breakers": tuple(breakers),
    }
    sampler = Sampler(SamplingOptions(**OFF | options), breakers=breakers_of(tokenizer, breakers))
    text = tokenizer.encode(REPEATING)
    row = rows(1)[0][: tokenizer.n_tokens]
    begin = 0 if how == "one by one" else len(text) // 2
    for token in text[:begin]:
        theirs.accept(token)
    sampler.accept_many(text[:begin])
    n_changed = 0
    for token in text[begin:]:
        theirs.accept(token)
        sampler.accept(token)
        agree(ours(row, sampler), theirs.apply(row)[0])
        n_changed += bool((sampler.rescored(row) != row).any())
    assert (n_changed > 0) == (window > allowed)
    theirs.close()


def test_a_long_text_is_followed_as_one_that_came_at_once() -> None:
    """Random texts of few tokens: what is kept up to date token by token is what the whole text gives; beyond the window, too."""
    rng = random.Random(3)
    for window in (5, 40, 1 << 40):
        options = SamplingOptions(
            **OFF | {"dry_multiplier": 1.0, "dry_penalty_last_n": window if window < 1000 else -1, "dry_base": 1.1}
        )
        breakers: Breakers = {3: [(3,)], 2: [(1, 2), (0, 1, 2)]}
        step = Sampler(options, breakers=breakers)
        text: list[int] = []
        for number in range(1500):
            token = rng.choice([0, 0, 1, 1, 2, 3] if number % 100 > 50 else [0, 1, 0, 1])
            text.append(token)
            step.accept(token)
            if number % 37 == 0:
                whole = Sampler(options, breakers=breakers)
                whole.accept_many(text)
                row = np.zeros(5, np.float32)
                np.testing.assert_array_equal(step.rescored(row), whole.rescored(row))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(5.0, 0.1), (2.0, 0.5)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_mirostat(version: int, tau: float, eta: float, temperature: float) -> None:
    """Its choice is made ours, step by step: then what is left to choose from stays the same."""
    init = (
        LIB.llama_sampler_init_mirostat(N_VOCAB, 9, tau, eta, 100)
        if version == 1
        else LIB.llama_sampler_init_mirostat_v2(9, tau, eta)
    )
    theirs = Theirs(INIT["temperature"](temperature), init)
    options = {
        "mirostat": version,
        "mirostat_tau": tau,
        "mirostat_eta": eta,
        "temperature": temperature,
        "top_k": 3,
        "top_p": 0.1,
    }
    sampler = Sampler(SamplingOptions(**OFF | options))
    sizes = []
    for row in rows(40, 2.0):
        wanted, chosen = theirs.apply(row)
        found = ours(row, sampler)
        agree(found, wanted)
        sampler.surprised(chosen, wanted[chosen])
        sampler.accept(chosen)
        sizes.append(len(found))
    assert len(set(sizes)) > 10, "the target was not pursued"
    theirs.close()


def test_mirostat_brings_the_surprise_to_its_target() -> None:
    """Without following anybody: over many tokens the surprise is tau bits on average."""
    for version in (1, 2):
        sampler = Sampler(SamplingOptions(**OFF | {"mirostat": version, "mirostat_tau": 3.0, "mirostat_eta": 0.2}))
        surprises = []
        for row in rows(400, 2.0):
            chances = ours(row, sampler)
            (token,) = sample_batch([row], [sampler])
            assert isinstance(token, int)
            surprises.append(-np.log2(chances[token]))
            sampler.accept(token)
        assert np.mean(surprises[100:]) == pytest.approx(3.0, abs=0.4)
