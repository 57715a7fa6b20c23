"""What a person types, against a real registry, and against stand-ins for the default one and the hub, from a fresh store."""

from __future__ import annotations

import datetime
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from puna.store.names import Name
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.patience import PATIENCE_S, wait_until
from tests.ports import kept_free
from tests.registries import Registry
from tests.tiny import write_llama

Puna = Callable[..., subprocess.CompletedProcess[str]]

INSTALL = "this needs the program docker-registry, a registry of containers: apt-get install docker-registry"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A fresh home, a fresh store, and nobody who listens."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OLLAMA_", "HF_"))}
    kept = {name: value for name, value in kept.items() if not name.lower().endswith("_proxy")}
    with kept_free() as port:
        yield {**kept, "HOME": str(tmp_path), "TERM": "dumb", "OLLAMA_HOST": f"127.0.0.1:{port}"}


@pytest.fixture
def puna(env: dict[str, str], tmp_path: Path) -> Puna:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "puna", *arguments]
        return subprocess.run(
            command, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
        )

    return run


@pytest.fixture
def there(tmp_path: Path) -> Store:
    """Where the registries' model was made."""
    store = Store(tmp_path / "there")
    blob = store.blobs.import_file(write_llama(tmp_path / "tiny.gguf", n_ctx=256))
    options = {"temperature": 0.0, "num_predict": 4, "num_ctx": 128}
    store.create("tiny", Recipe(files={"m.gguf": blob.digest}, parameters=options, template="{{ .Prompt }}"))
    return store


@pytest.fixture
def docker_registry(tmp_path: Path) -> Iterator[str]:
    """Debian's package of the registry that most others come from, on a free port."""
    program = shutil.which("docker-registry")
    assert program, INSTALL
    with kept_free() as port, (tmp_path / "registry.log").open("wb") as log:
        address = f"127.0.0.1:{port}"
        config = tmp_path / "registry.yml"
        config.write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {tmp_path / 'registry'}}}}}\n"
            f"http: {{addr: '{address}'}}\n"
        )
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
        try:
            wait_until(lambda: process.poll() is not None or _answers(port))
            assert process.poll() is None, (tmp_path / "registry.log").read_text()
            yield address
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
    except OSError:
        return False
    return True


def content_of(store: Store, name: str) -> dict[str, bytes]:
    """All that a model consists of, by digest; its manifest under its own."""
    stored = store.manifests.read(Name.parse(name))
    blobs = {layer.digest: store.blobs.path(layer.digest).read_bytes() for layer in stored.manifest.blobs}
    for digest, content in blobs.items():
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == digest
    return {**blobs, stored.digest: store.manifests.content(stored.name)}


@pytest.mark.thorough  # a program of the system
def test_a_real_registry_keeps_a_model_as_it_is(docker_registry: str, puna: Puna, there: Store, tmp_path: Path) -> None:
    name = f"{docker_registry}/me/tiny"
    store = Store(tmp_path / ".ollama" / "models")
    assert puna("create", name, "-f", str(_modelfile(tmp_path))).returncode == 0
    before = content_of(store, name)
    sent = puna("push", name, "--insecure")
    assert (sent.returncode, sent.stdout) == (0, ""), sent.stderr
    assert sent.stderr.splitlines()[0] == "retrieving manifest"
    assert sent.stderr.splitlines()[-2:] == ["pushing manifest", "success"]
    assert puna("search", "tiny", "--registry", docker_registry, "--insecure").stdout.splitlines()[1:] == [name]
    assert puna("rm", name).returncode == 0
    assert not list(store.blobs)
    found = puna("pull", name, "--insecure")
    assert found.returncode == 0, found.stderr
    assert content_of(store, name) == before
    assert puna("run", name, "hello").returncode == 0


def _modelfile(folder: Path) -> Path:
    path = folder / "Modelfile"
    path.write_text("FROM ./tiny.gguf\nPARAMETER num_predict 4\nPARAMETER num_ctx 128\nSYSTEM be kind\n")
    return path


def test_a_short_name_means_the_default_registry(puna: Puna, env: dict[str, str], there: Store, tmp_path: Path) -> None:
    """Over HTTPS and through the proxy of the environment, as its name is written on the certificate."""
    with Registry(host_name="registry.ollama.ai", certificate=_certificate(tmp_path, "registry.ollama.ai")).running() as registry:
        manifest = registry.add(there, "tiny", "library/llama3.2:latest")
        env |= {"HTTPS_PROXY": f"http://{registry.netloc}", "NO_PROXY": "127.0.0.1", "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
        found = puna("pull", "llama3.2")
        assert found.returncode == 0, found.stderr
        assert found.stderr.splitlines()[-1] == "success"
        store = Store(tmp_path / ".ollama" / "models")
        assert store.manifests.content(Name.parse("llama3.2")) == manifest
        n_tokens = len(registry.keys)
        assert n_tokens == 1
        assert (tmp_path / ".ollama" / "id_ed25519.pub").read_text().split()[1] in registry.keys
        assert puna("rm", "llama3.2").returncode == 0
        answer = puna("run", "llama3.2", "hello")
        assert answer.returncode == 0, answer.stderr
        assert "success" in answer.stderr
        missing = puna("pull", "llama3.3")
        assert (missing.returncode, missing.stderr.splitlines()[-1]) == (1, "Error: pull model manifest: file does not exist")


def test_a_model_of_the_hub_runs(puna: Puna, env: dict[str, str], there: Store) -> None:
    with Registry().running() as hub:
        hub.add(there, "tiny", "ann/Tiny-GGUF:Q4_K_M")
        hub.tokens.add("hf_secret")
        env |= {"HF_ENDPOINT": f"http://{hub.netloc}", "HF_TOKEN": "hf_secret"}
        answer = puna("run", "hf.co/ann/Tiny-GGUF:Q4_K_M", "hello")
        assert answer.returncode == 0, answer.stderr
        assert set(hub.host.credentials) == {"Bearer hf_secret"}
        assert hub.storage.credentials == []


def _certificate(folder: Path, name: str) -> Path:
    """A key and a certificate for a name, signed by an authority that ca.pem names."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.pem").write_bytes(private + certificate.public_bytes(Encoding.PEM))
    return folder / "server.pem"
