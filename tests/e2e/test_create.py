"""Models made by ``puna create`` from what people have: a published checkpoint, full-size weights, adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ollama
import psutil
import pytest

from puna.gguf.reader import GGUFFile
from puna.store.models import modelfile
from puna.store.store import Store
from puna.tokenizer.tokenizer import Tokenizer
from tests.e2e.test_first_light import Server, serving
from tests.hf import hf_config, hf_tensors, write_checkpoint
from tests.lora import write_lora
from tests.minilm import NumpyBert, unpack_checkpoint
from tests.oracle import Oracle
from tests.patience import PATIENCE_S, wait_until
from tests.processes import children, command_of
from tests.tiny import write_llama

# A sentence, the same said otherwise, and a sentence about something else that shares its words or its form.
TRIPLES = [
    ("A man is playing a guitar.", "Someone plays music on a stringed instrument.", "A man is repairing a car."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch.", "The dog barks at the mailman."),
    ("How do I reset my password?", "I forgot my login and need a new one.", "How do I bake sourdough bread?"),
    ("The stock market fell sharply today.", "Share prices dropped a lot this afternoon.", "The market sells fresh fish today."),
    ("She is a physician at the hospital.", "She works as a doctor in a clinic.", "She is a painter at the gallery."),
    ("It will rain tomorrow.", "The forecast says wet weather for the next day.", "It will be decided by a vote."),
    ("The children are at school.", "The kids are in class.", "The children's book was a bestseller."),
    ("He bought a new car last week.", "He purchased a vehicle a few days ago.", "He sold his house in the spring."),
    ("The meeting was postponed.", "They moved the conference to a later date.", "The meeting room has blue walls."),
    ("Python is a programming language.", "Software can be written in Python.", "A python is a large snake in the jungle."),
    ("I am very hungry.", "I could eat a whole meal right now.", "I am very tall."),
    ("The bank approved the loan.", "The lender agreed to give the money.", "They sat on the bank of the river."),
    ("The Earth orbits the Sun.", "Our planet goes around its star.", "The sun cream is in the bag."),
    ("This film was boring.", "I found the movie dull.", "This film was shot in Iceland."),
    ("Turn off the lights, please.", "Could you switch the lamps off?", "The suitcase is light."),
    ("The river flooded the village.", "Water rose and covered the small town.", "The village has a famous baker."),
    ("He broke his leg while skiing.", "He was injured on the slopes.", "He broke the world record in swimming."),
    ("We need more time to finish.", "The deadline should be extended.", "We need more salt in the soup."),
    (
        "The museum is closed on Mondays.",
        "You cannot visit the exhibition at the start of the week.",
        "The shop sells paintings.",
    ),
    ("Vaccines prevent disease.", "Immunisation protects people from illness.", "Computers get viruses too."),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def create(server: Server, folder: Path, name: str, modelfile: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "Modelfile").write_text(modelfile)
    command = [sys.executable, "-m", "puna", "create", name, "-f", str(folder / "Modelfile"), *options]
    environ = {**os.environ, "OLLAMA_HOST": server.url}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)


def created(server: Server, folder: Path, name: str, modelfile: str, *options: str) -> str:
    done = create(server, folder, name, modelfile, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "success"
    return done.stderr


def test_a_file_on_disk_becomes_a_model_without_a_copy(server: Server, tmp_path: Path) -> None:
    """Where the file system can: here the blob is another name of the file."""
    path = write_llama(tmp_path / "tiny.gguf", n_ctx=256)
    log = created(server, tmp_path, "linked", "FROM ./tiny.gguf")
    assert "hashing tiny.gguf: 100%" in log
    assert "copying" not in log
    shown = server.client.post("/api/show", json={"model": "linked"}).json()["modelfile"]
    weights = Path(modelfile.parse(shown).last("from"))
    assert weights.samefile(path)
    log = created(server, tmp_path, "again", shown)
    assert "hashing" not in log
    assert f"FROM {weights}" in server.client.post("/api/show", json={"model": "again"}).json()["modelfile"]


def test_a_sentence_encoder_from_its_published_files(server: Server, tmp_path: Path) -> None:
    checkpoint = unpack_checkpoint(tmp_path / "all-MiniLM-L6-v2")
    log = created(server, tmp_path, "minilm", "FROM ./all-MiniLM-L6-v2")
    assert "converting model" in log
    with ollama.Client(server.url) as client:
        assert client.show("minilm").capabilities == ["embedding"]
        details = client.show("minilm").details
        assert details is not None
        assert (details.family, details.quantization_level, details.parameter_size) == ("bert", "F16", "22.57M")
        sentences = [sentence for triple in TRIPLES for sentence in triple]
        vectors = np.array(client.embed("minilm", sentences).embeddings).reshape(len(TRIPLES), 3, -1)
    near, far = (np.einsum("ij,ij->i", vectors[:, 0], vectors[:, i]) for i in (1, 2))
    assert (near > far).all(), [triple for triple, is_wrong in zip(TRIPLES, near <= far, strict=True) if is_wrong]
    tokenizer, definition = Tokenizer(server_model(server, "minilm")), NumpyBert(checkpoint)
    expected = np.stack([definition.embed(tokenizer.encode(sentence)) for sentence, _, _ in TRIPLES])
    tokenizer.close()
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    assert np.einsum("ij,ij->i", vectors[:, 0], expected).min() >= 0.999


def server_model(server: Server, name: str) -> Path:
    """The file that the server gives as the model's origin."""
    modelfile = server.client.post("/api/show", json={"model": name}).json()["modelfile"]
    return Path(next(line for line in modelfile.splitlines() if line.startswith("FROM ")).removeprefix("FROM "))


def test_full_size_weights_become_small_ones(server: Server, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf", seed=7, dtype="f16", n_ctx=512)
    write_checkpoint(tmp_path / "hf", hf_tensors(source), hf_config(source), n_shards=2)
    log = created(server, tmp_path, "small", "FROM ./hf\nPARAMETER num_ctx 512", "--quantize", "q4_K_M")
    assert "quantizing F16 model to Q4_K_M: 100%" in log
    path = server_model(server, "small")
    with GGUFFile.open(path) as file:
        assert file.tensors["blk.0.attn_q.weight"].type.name == "Q4_K"
    assert answer(server, "small")  # its logits are compared with libllama's in tests/parity/test_quantise.py
    environ = {**os.environ, "OLLAMA_HOST": server.url}
    shown = subprocess.run(
        [sys.executable, "-m", "puna", "show", "small"], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "quantization        Q4_K_M" in shown.stdout
    with ollama.Client(server.url) as client:
        with pytest.raises(ollama.ResponseError, match="only supported for F16, BF16 and F32 models"):
            client.create("smaller", from_="small", quantize="q8_0")
        with pytest.raises(ollama.ResponseError, match="unsupported quantization type Q9 - supported types are F32, F16"):
            client.create("smaller", from_="small", quantize="q9")


PROMPT = "the quick brown fox"
COUNT = 24


def answer(server: Server, model: str) -> str:
    options = {"temperature": 0, "num_predict": COUNT, "ignore_eos": True, "num_ctx": 512}
    body = {"model": model, "prompt": PROMPT, "raw": True, "stream": False, "options": options}
    response = server.client.post("/api/generate", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["response"]
    return text


def greedy(path: Path, *adapters: Path) -> str:
    tokenizer = Tokenizer(path)
    with Oracle(path, n_ctx=512, adapters=adapters) as oracle:
        text = tokenizer.decode(oracle.greedy(tokenizer.encode(PROMPT), COUNT), special=False)
    tokenizer.close()
    return text


def test_adapters_over_a_model(server: Server, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf", seed=9, n_ctx=512)
    weights = [f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_q", "attn_v", "ffn_down")]
    paths = [tmp_path / folder / "lora.gguf" for folder in ("one", "two")]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        write_lora(path, model, weights, seed=seed, std=0.2)
    created(server, tmp_path, "plain", "FROM ./m.gguf")
    created(server, tmp_path, "changed", "FROM plain\nADAPTER ./one/lora.gguf\nADAPTER ./two/lora.gguf")
    texts = [greedy(model), greedy(model, paths[0]), greedy(model, *paths)]
    assert len(set(texts)) == 3
    # All have the same weights, so one runner after the other must make way.
    assert answer(server, "changed") == texts[2]
    assert answer(server, "plain") == texts[0]
    created(server, tmp_path, "one", "FROM changed\nADAPTER ./one/lora.gguf")  # adapters are replaced, not added
    assert answer(server, "one") == texts[1]
    assert answer(server, "changed") == texts[2]


def test_an_adapter_for_another_model_is_refused(server: Server, tmp_path: Path) -> None:
    larger = write_llama(tmp_path / "l.gguf", n_layers=3)
    write_llama(tmp_path / "m.gguf", seed=9, n_ctx=512)
    write_lora(tmp_path / "lora.gguf", larger, ["blk.2.attn_q.weight"])
    done = create(server, tmp_path, "wrong", "FROM ./m.gguf\nADAPTER ./lora.gguf")
    assert done.returncode == 1
    assert "adapter lora.gguf: it changes 'blk.2.attn_q.weight', which the model does not have" in done.stderr
    assert server.client.post("/api/show", json={"model": "wrong"}).status_code == 404


def test_a_checkpoint_that_lies_is_an_error_with_names(server: Server, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "m.gguf", dtype="f16")
    tensors = hf_tensors(source)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    write_checkpoint(tmp_path / "hf", tensors, hf_config(source))
    done = create(server, tmp_path, "broken", "FROM ./hf")
    assert done.returncode == 1
    assert "there is no tensor model.layers.1.mlp.up_proj.weight in model.safetensors" in done.stderr


def quantisers(server: Server) -> list[psutil.Process]:
    ours = psutil.Process(server.process.pid)
    return [child for child in children(ours) if "puna.runner.process.quantise" in command_of(child)]


def test_a_client_that_goes_away_ends_the_quantiser(server: Server, tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", n_layers=4, n_embd=512, n_ff=2048, metadata={"general.file_type": 0})
    created(server, tmp_path, "full", "FROM ./m.gguf")
    body = {"model": "small-full", "from": "full", "quantize": "iq4_xs"}  # the slowest kind
    with server.client.stream("POST", "/api/create", json=body) as response:
        wait_until(lambda: quantisers(server))
        (process,) = quantisers(server)
        process.suspend()  # it must not be done before the client has gone
        line = next(line for line in response.iter_lines() if "quantizing F32 model to IQ4_XS" in line)
        assert "error" not in line
        assert quantisers(server) == [process]
    wait_until(lambda: not quantisers(server))
    assert server.client.post("/api/show", json={"model": "small-full"}).status_code == 404


def test_nothing_is_left_behind(server: Server, tmp_path: Path) -> None:
    """After all of the above, every blob belongs to a model or was uploaded."""
    folder = server_model(server, "plain").parent.parent
    assert not list((folder / "tmp").glob("*"))
    assert {model.name for model in Store(folder).list()} >= {"plain:latest", "changed:latest"}
