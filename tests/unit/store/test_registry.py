"""Pulling from a registry on loopback and pushing to it, through everything that goes wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpcore
import numpy as np
import pytest

from puna.errors import BadRequest, DiskFull, NotFound, PunaError, SourceError, StoreError, UnsupportedModel
from puna.gguf.writer import GGUFWriter
from puna.store.disk import partial
from puna.store.disk.manifests import CONFIG_TYPE, LAYER_PREFIX, MANIFEST_TYPE
from puna.store.disk.partial import PARTIAL
from puna.store.names import Name
from puna.store.progress import Cancelled, Progress
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.registry.challenge import Challenge
from puna.store.sources.registry.client import Registry as Client
from puna.store.sources.registry.identity import Identity
from puna.store.sources.registry.place import Place
from puna.store.sources.web import download, http, retry
from puna.store.sources.web.http import Answer, Http
from puna.store.store import Store
from tests.patience import PATIENCE_S, wait_until
from tests.registries import CHUNK_BYTES, Registry
from tests.splitting import split
from tests.unit.store.faults import failing_at

N_ROWS = 4096  # of 32 numbers: half a megabyte
PART_BYTES = 100_000
LATE_BYTES = 8 * CHUNK_BYTES  # what a server may have sent when the other side has just gone


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BASE_S", 0.001)
    monkeypatch.setattr(retry, "LONGEST_S", 0.05)
    monkeypatch.setattr(download, "MIN_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(download, "NOTE_S", 0.0)


SILENT = ("stalled", "trickle", "silent")


def not_for_long(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing, or little, is given up soon. Elsewhere nobody is: what is slow by chance would be fetched twice."""
    if fault in SILENT:
        monkeypatch.setattr(retry, "STALL_S", 0.5)
        monkeypatch.setattr(http, "SILENCE_S", 1.0)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry().running() as running:
        yield running


def write_large(path: Path, seed: int = 0) -> Path:
    """A model file of half a megabyte that no two seeds share."""
    writer = GGUFWriter("llama")
    for key, value in {"llama.block_count": 1, "llama.context_length": 256, "llama.embedding_length": 32}.items():
        writer.add(key, value)
    writer.add_tensor("token_embd.weight", np.random.default_rng(seed).random((N_ROWS, 32), dtype=np.float32))
    writer.write(path)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(key_path=tmp_path / "home" / "id_ed25519")


@pytest.fixture
def there(tmp_path: Path) -> Store:
    """Where the registry's models were made."""
    store = Store(tmp_path / "there")
    blob = store.blobs.import_file(write_large(tmp_path / "model.gguf"))
    store.create("m", Recipe(files={"m.gguf": blob.digest}, system="be kind", template="{{ .Prompt }}", licenses=("mine",)))
    return store


@pytest.fixture
def here(tmp_path: Path, elsewhere: Elsewhere) -> Store:
    return Store(tmp_path / "here", elsewhere=elsewhere)


class Served(NamedTuple):
    reference: str
    manifest: bytes


@pytest.fixture
def served(registry: Registry, there: Store) -> Served:
    return Served(f"{registry.netloc}/library/m", registry.add(there, "m", "library/m:latest"))


def pull(store: Store, reference: str, **options: Any) -> list[Progress]:
    lines: list[Progress] = []
    store.pull(reference, lines.append, insecure=True, **options)
    return lines


def assert_whole(here: Store, there: Store, served: Served) -> None:
    """The model is byte for byte what the registry has."""
    name = Name.parse(served.reference)
    assert here.manifests.content(name) == served.manifest
    for layer in here.manifests.read(name).manifest.blobs:
        content = here.blobs.path(layer.digest).read_bytes()
        assert content == there.blobs.path(layer.digest).read_bytes()
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == layer.digest
    assert not unfinished(here)


def unfinished(store: Store) -> list[str]:
    return sorted(name for name in os.listdir(store.blobs.folder) if len(name) != 71)


def test_a_model_is_the_same_here_as_there(registry: Registry, here: Store, there: Store, served: Served) -> None:
    lines = pull(here, served.reference)
    assert_whole(here, there, served)
    statuses = list(dict.fromkeys(line.status for line in lines))
    layers = here.get(served.reference).manifest
    assert layers is not None
    moved = [f"pulling {layer.digest[7:19]}" for layer in (*layers.layers, layers.config)]
    assert statuses == ["pulling manifest", *moved, "verifying sha256 digest", "writing manifest", "success"]
    for layer in layers.blobs:
        of_layer = [line for line in lines if line.digest == layer.digest]
        assert {line.total for line in of_layer} == {layer.size}
        done = [line.completed for line in of_layer]
        assert done == sorted(done)
        assert done[-1] == layer.size
    assert here.get(served.reference).system == "be kind"


def test_only_what_is_missing_is_fetched(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """Also layers that came with another model, or under another name."""
    pull(here, served.reference)
    n_before = registry.n_bytes_sent
    pull(here, served.reference)
    assert registry.n_bytes_sent == n_before
    there.create("n", Recipe(base="m", system="be brief"))
    registry.add(there, "n", "library/n:latest")
    pull(here, f"{registry.netloc}/library/n")
    assert registry.n_bytes_sent - n_before < 5000
    assert here.get(f"{registry.netloc}/library/n").system == "be brief"


def test_what_a_new_version_no_longer_uses_goes(registry: Registry, here: Store, there: Store, served: Served) -> None:
    pull(here, served.reference)
    old = here.digests_of(Name.parse(served.reference))
    there.create("m", Recipe(base="m", system="be brief"))
    registry.add(there, "m", "Library/M:latest")
    lines = pull(here, served.reference.replace("library/m", "Library/M"))
    assert [line.status for line in lines][-2:] == ["removing unused layers", "success"]
    assert len(list(here.list())) == 1
    assert here.get(served.reference).system == "be brief"
    gone = [digest for digest in old if not here.blobs.has(digest)]
    assert len(gone) == 2  # the old system text and the old configuration


SURVIVED = [
    *("manifest 429", "manifest 500", "manifest dropped", "manifest moved", "token expires", "blob 500", "blob direct"),
    *("429", "500", "503", "short", "dropped", "stalled", "trickle", "silent", "no ranges", "another part", "longer"),
    *("not HTTP", "compressed", "link expired"),
]


@pytest.mark.parametrize("fault", SURVIVED)
def test_a_fault_that_passes_is_survived(
    registry: Registry, here: Store, there: Store, served: Served, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_for_long(fault, monkeypatch)
    registry.spoil(fault, after=0 if fault.startswith("manifest") else 2)
    pull(here, served.reference)
    assert [item.n_left for item in registry.faults] == [0], "it never happened"
    assert_whole(here, there, served)
    assert registry.storage.credentials == []


@pytest.mark.parametrize("fault", ["short", "dropped"])
def test_a_server_that_never_sends_a_part_in_one_piece(
    registry: Registry, here: Store, there: Store, served: Served, fault: str
) -> None:
    """As long as something comes each time, it is asked for the rest."""
    registry.spoil(fault, 10_000)
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.n_bytes_sent <= sum(map(len, registry.blobs.values())) + LATE_BYTES


FATAL = [
    ("manifest garbage", "pull model manifest: what came is no manifest"),
    ("manifest too large", "sent more than 4194304 bytes where a short answer was expected"),
    ("manifest 500", "pull model manifest: max retries exceeded: .* answered 500: oh no"),
    ("token refused", "unauthorized: access denied"),
    ("no challenge", "unauthorized: access denied"),
    ("blob 404", "file does not exist"),
    ("blob 500", "max retries exceeded: .* answered 500"),
    ("redirect loop", r"maximum redirects exceeded \(10\)"),
    ("redirect to nowhere", "sent a redirect to nowhere"),
    ("redirect inwards", r"169.254.169.254 \(169.254.169.254\) is not connected to: 127.0.0.1 must not lead to machines nearer"),
    ("silent", "max retries exceeded: .* said nothing for"),
    ("another part", "max retries exceeded: bytes from .* were asked for, but these came"),
    ("another size", "should have .* bytes, but has .* where it is served"),
    ("link expired", "max retries exceeded: the link to .* has expired"),
    ("damaged", "digest mismatch, file must be downloaded again: want sha256:.*, got sha256:"),
]


@pytest.mark.parametrize(("fault", "message"), FATAL)
def test_a_fault_that_stays_is_named_and_the_next_pull_goes_on(
    registry: Registry, here: Store, there: Store, served: Served, fault: str, message: str
) -> None:
    """Nothing of the model is there before it is whole, and nothing that came is fetched twice."""
    registry.spoil(fault, 10_000, after=3 if fault in ("silent", "another part", "link expired") else 0)
    with pytest.MonkeyPatch.context() as patch:
        not_for_long(fault, patch)
        with pytest.raises(SourceError, match=message):
            pull(here, served.reference)
    with pytest.raises(NotFound):
        here.get(served.reference)
    whole = {name for name in os.listdir(here.blobs.folder) if len(name) == 71} if here.blobs.folder.exists() else set()
    for name in whole:
        assert f"sha256-{hashlib.sha256((here.blobs.folder / name).read_bytes()).hexdigest()}" == name
    registry.faults.clear()
    n_here = sum(os.stat(here.blobs.folder / name).st_size for name in whole)
    n_before, n_all = registry.n_bytes_sent, sum(len(content) for content in registry.blobs.values())
    if here.root.exists():
        here.prune()
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.n_bytes_sent - n_before <= n_all - n_here + LATE_BYTES
    if fault in ("silent", "another part", "link expired"):
        assert registry.n_bytes_sent - n_before <= n_all - 3 * PART_BYTES + LATE_BYTES
    assert registry.storage.credentials == []


def test_a_wrong_digest_never_enters_the_store(registry: Registry, here: Store, served: Served) -> None:
    """Nor does it stay beside it."""
    registry.spoil("damaged", 10_000)
    with pytest.raises(SourceError, match="digest mismatch"):
        pull(here, served.reference)
    assert not list(here.blobs)
    assert not unfinished(here)


def test_no_credentials_reach_another_host(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """The object store that has the blobs looks for them, and so does a token server that is not the registry."""
    pull(here, served.reference)
    assert registry.host.credentials
    assert registry.keys == {here_key(here)}
    assert registry.storage.seen
    registry.spoil("realm elsewhere", 10_000)
    registry.tokens.clear()
    with pytest.raises(SourceError, match="unauthorized: access denied"):
        pull(here, served.reference)
    assert any(path.startswith("/token?service=registry&scope=x") for _, path in registry.storage.seen)
    assert registry.storage.credentials == []


def test_a_registry_that_knows_no_signatures_is_asked_as_anybody_would(
    registry: Registry, here: Store, there: Store, served: Served
) -> None:
    registry.knows_signatures = False
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.tokens == {"anybodys"}


@pytest.mark.parametrize(
    ("base", "target", "is_followed"),
    [
        ("https://a.example/v2/", "https://b.example/x", True),
        ("https://a.example/v2/", "/x y", True),
        ("https://a.example/v2/", "http://a.example/x", False),
        ("https://a.example/v2/", "file:///etc/passwd", False),
        ("http://a.example/v2/", "http://b.example/x", True),
    ],
)
def test_redirects_stay_protected(base: str, target: str, is_followed: bool) -> None:
    answer = Answer(base, httpcore.Response(307, headers=[("Location", target)]))
    if is_followed:
        assert answer.location().startswith(base[:5])
        assert " " not in answer.location()
    else:
        with pytest.raises(SourceError, match="without protection"):
            answer.location()


def test_tokens_are_asked_for_over_protected_connections() -> None:
    """A registry cannot have them sent in the clear."""
    with Http("a.example") as client:
        place = Place("https://a.example", "me/m", "latest")
        asked = Client(client, place, Identity(Path("/nowhere")))
        with pytest.raises(SourceError, match=r"wants a token from http://a.example/token, without protection"):
            asked._new_token(Challenge("http://a.example/token"))


def here_key(store: Store) -> str:
    return store._elsewhere.key_path.with_name("id_ed25519.pub").read_text().split()[1]


def test_the_key_is_made_once_and_is_what_openssh_reads(registry: Registry, here: Store, served: Served) -> None:
    pull(here, served.reference)
    path = here._elsewhere.key_path
    assert path.stat().st_mode & 0o777 == 0o600
    if shutil.which("ssh-keygen"):
        told = subprocess.run(["ssh-keygen", "-y", "-f", path], capture_output=True, text=True, check=True).stdout
        assert told.split()[:2] == ["ssh-ed25519", here_key(here)]
    content = path.read_bytes()
    registry.tokens.clear()
    pull(here, served.reference)
    assert path.read_bytes() == content


def test_a_cancelled_pull_goes_on_where_it_was(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """And a start of the server in between leaves what was fetched."""
    registry.seconds_per_chunk = 0.002

    def report(line: Progress) -> None:
        if line.total > 10 * PART_BYTES // 2 and line.completed > 2 * PART_BYTES:
            raise Cancelled

    with pytest.raises(Cancelled):
        here.pull(served.reference, report, insecure=True)
    assert [name for name in unfinished(here) if PARTIAL.fullmatch(name)]
    Store(here.root).prune()
    n_before, registry.seconds_per_chunk = registry.n_bytes_sent, 0
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.n_bytes_sent - n_before < sum(map(len, registry.blobs.values())) - PART_BYTES


def test_two_pulls_of_one_thing_share_one_download(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """Whether they are threads of one server or two servers on one folder."""
    registry.seconds_per_chunk = 0.05
    others = [here, Store(here.root, elsewhere=here._elsewhere), Store(here.root, elsewhere=here._elsewhere)]
    lines: list[list[Progress]] = []
    threads = [threading.Thread(target=lambda store=store: lines.append(pull(store, served.reference))) for store in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(lines) == 3
    assert_whole(here, there, served)
    assert registry.n_bytes_sent == sum(map(len, registry.blobs.values()))
    for seen in lines:
        assert seen[-1].status == "success"
        done = [line.completed for line in seen if line.total > PART_BYTES]
        assert any(0 < n < N_ROWS * 128 for n in done), "who waits is told how far it is"


PULLING = """
import sys
from pathlib import Path
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.web import download
from puna.store.store import Store
download.MIN_PART_BYTES, download.NOTE_S = 100_000, 0.0
root, key, reference = sys.argv[1:]
Store(Path(root), elsewhere=Elsewhere(key_path=Path(key))).pull(reference, insecure=True)
"""


def test_a_killed_pull_is_taken_up_by_the_next_process(registry: Registry, here: Store, there: Store, served: Served) -> None:
    registry.seconds_per_chunk = 0.02
    arguments = [sys.executable, "-c", PULLING, str(here.root), str(here._elsewhere.key_path), served.reference]
    process = subprocess.Popen(arguments)
    try:
        wait_until(lambda: process.poll() is not None or fetched(here) > 2 * PART_BYTES)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    n_fetched, n_before, registry.seconds_per_chunk = fetched(here), registry.n_bytes_sent, 0
    here.prune()
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.n_bytes_sent - n_before <= sum(map(len, registry.blobs.values())) - n_fetched + LATE_BYTES


def fetched(store: Store) -> int:
    """What the parts' files say."""
    n_bytes = 0
    for path in store.blobs.folder.glob("*-partial-*"):
        try:
            n_bytes += json.loads(path.read_bytes())["Completed"]
        except (OSError, ValueError):
            continue
    return n_bytes


def test_what_ollama_began_is_taken_up(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """The layout of unfinished blobs is the same: a sparse file, and a file per part that says how much of it is there."""
    weights = there.get("m").model_path
    content, name = weights.read_bytes(), weights.name
    here.blobs.folder.mkdir(parents=True)
    half = len(content) // 2
    (here.blobs.folder / f"{name}-partial").write_bytes(content[:half] + bytes(len(content) - half))
    states = [(0, 0, half, half), (1, half, len(content) - half, 0)]
    for number, offset, size, completed in states:
        state = {"N": number, "Offset": offset, "Size": size, "Completed": completed}
        (here.blobs.folder / f"{name}-partial-{number}").write_text(json.dumps(state) + "\n")
    pull(here, served.reference)
    assert_whole(here, there, served)
    assert registry.n_bytes_sent == sum(map(len, registry.blobs.values())) - half


@pytest.mark.parametrize(
    "state", ["", "{", '{"N":0,"Offset":0,"Size":10,"Completed":0}', '{"N":0,"Offset":0,"Size":-1,"Completed":0}']
)
def test_parts_that_make_no_sense_are_forgotten(
    registry: Registry, here: Store, there: Store, served: Served, state: str
) -> None:
    weights = there.get("m").model_path
    here.blobs.folder.mkdir(parents=True)
    (here.blobs.folder / f"{weights.name}-partial").write_bytes(bytes(weights.stat().st_size))
    (here.blobs.folder / f"{weights.name}-partial-0").write_text(state)
    pull(here, served.reference)
    assert_whole(here, there, served)


def test_room_is_asked_for_before_anything_is_fetched(
    registry: Registry, here: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is missing is said; what has come before counts as room."""

    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    n_all = sum(len(content) for content in registry.blobs.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(n_all, 1000, n_all - 1000))
    with pytest.raises(DiskFull, match=rf"1000 more bytes are needed \({n_all} wanted") as refusal:
        pull(here, served.reference)
    assert refusal.value.n_missing == 1000
    assert registry.n_bytes_sent == 0
    assert not here.blobs.folder.exists() or not os.listdir(here.blobs.folder)


def _failure(store: Store, reference: str, index: int) -> StoreError | None:
    """What a pull ends with when the disk is full from its n-th change on."""
    try:
        with failing_at(index, errno.ENOSPC, store.root):
            pull(store, reference)
    except StoreError as error:
        return error
    return None


def test_a_disk_that_fills_at_any_write(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """The pull says that the disk is full, what is here stays whole, and with room again it goes on to its end."""
    here.create("own", Recipe(files={"m.gguf": here.blobs.add(there.get("m").model_path.read_bytes()).digest}, system="x"))
    own = here.get("own")
    other = write_large(here.root.parent / "other.gguf", 5)
    there.create("o", Recipe(files={"m.gguf": there.blobs.import_file(other).digest}, system="y"))
    registry.add(there, "o", "library/o:latest")
    reference = f"{registry.netloc}/library/o"
    index = 0
    while (failure := _failure(here, reference, index)) is not None:
        assert isinstance(failure, DiskFull)
        assert here.get("own") == own
        with pytest.raises(NotFound):
            here.get(reference)
        index += 7 if index > 30 else 1
        assert index < 300
    assert index > 10
    assert_whole(here, there, Served(reference, there.manifests.content(Name.parse("o"))))


def test_names_that_may_not_be_pulled(registry: Registry, here: Store, served: Served) -> None:
    with pytest.raises(BadRequest, match="insecure protocol http"):
        here.pull(f"http://{served.reference}")
    with pytest.raises(SourceError, match="pull model manifest: file does not exist"):
        pull(here, f"{registry.netloc}/library/none")
    with pytest.raises(SourceError, match=r"pull model manifest: .* cannot be reached"):
        pull(here, "127.0.0.1:9/library/none")
    here.pull(f"http://{served.reference}", insecure=True)


def test_a_chosen_name(registry: Registry, here: Store, there: Store, served: Served) -> None:
    """It belongs to this model, or to none."""
    assert here.pull(served.reference, name="mine", insecure=True).name == "mine:latest"
    assert here.manifests.content(Name.parse("mine")) == served.manifest
    here.create("own", Recipe(base="mine", system="x"))
    before = here.get("own")
    with pytest.raises(BadRequest, match="there is a model own:latest already"):
        pull(here, served.reference, name="own")
    assert here.get("own") == before


def test_a_base_that_is_not_here_is_pulled(registry: Registry, here: Store, there: Store, served: Served) -> None:
    here.pull(served.reference, insecure=True)
    assert here.create("child", Recipe(base=served.reference, system="x")).parent == here.get(served.reference).name


def manifest_of(*layers: dict[str, Any], config: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": layers}).encode()


def layer_of(registry: Registry, kind: str, content: bytes, size: int | None = None, **more: Any) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    registry.blobs[digest] = content
    return {"mediaType": kind, "digest": digest, "size": len(content) if size is None else size, **more}


@pytest.mark.parametrize(
    ("kind", "size", "error", "message"),
    [
        (LAYER_PREFIX + "system", 20 << 20, SourceError, "the layer system has 20971520 bytes, more than 16777216"),
        (LAYER_PREFIX + "tensor", 4, UnsupportedModel, "consists of single tensors"),
        (LAYER_PREFIX + "system", -1, SourceError, "has the size -1"),
        (LAYER_PREFIX + "system", 3, SourceError, "should have 3 bytes, but has 4"),
    ],
)
def test_manifests_that_are_refused(
    registry: Registry, here: Store, kind: str, size: int, error: type[PunaError], message: str
) -> None:
    config = layer_of(registry, CONFIG_TYPE, b"{}")
    registry.manifests["library/odd", "latest"] = manifest_of(layer_of(registry, kind, b"text", size), config=config)
    with pytest.raises(error, match=message):
        pull(here, f"{registry.netloc}/library/odd")
    assert not here.list()


# What registries of containers hold.


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("application/vnd.docker.ai.gguf.v3", {}),
        ("application/vnd.cncf.model.weight.v1.raw", {"annotations": {"org.cncf.model.filepath": "deep/Model-Q8.gguf"}}),
        ("application/vnd.oci.image.layer.v1.tar", {"annotations": {"org.opencontainers.image.title": "model.gguf"}}),
    ],
)
@pytest.mark.parametrize("has_index", [False, True])
def test_containers_that_hold_a_gguf_file(
    registry: Registry, here: Store, there: Store, kind: str, more: dict[str, Any], has_index: bool
) -> None:
    content = there.get("m").model_path.read_bytes()
    model = layer_of(registry, kind, content, **more)
    license_layer = layer_of(registry, "application/vnd.docker.ai.license", b"for all")
    config = layer_of(registry, "application/vnd.docker.ai.model.config.v0.1+json", b'{"config":{"format":"gguf"}}')
    manifest = manifest_of(model, license_layer, config=config)
    if has_index:
        entry = {"mediaType": MANIFEST_TYPE, "digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}", "size": len(manifest)}
        registry.manifests["ai/tiny", "inner"] = manifest
        manifest = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    registry.manifests["ai/tiny", "1B"] = manifest
    pull(here, f"{registry.netloc}/ai/tiny:1B")
    found = here.get(f"{registry.netloc}/ai/tiny:1b")
    assert found.model_path.read_bytes() == content
    assert (found.licenses, found.family) == (("for all",), "llama")
    assert found.manifest is not None
    assert {layer.media_type for layer in found.manifest.layers} == {LAYER_PREFIX + "model", LAYER_PREFIX + "license"}
    n_before = registry.n_bytes_sent
    assert pull(here, f"{registry.netloc}/ai/tiny:1B")[-1].status == "success"
    assert registry.n_bytes_sent == n_before


def test_containers_that_hold_none(registry: Registry, here: Store) -> None:
    layer = layer_of(registry, "application/vnd.oci.image.layer.v1.tar+gzip", b"tar")
    registry.manifests["library/busybox", "latest"] = manifest_of(layer, config=layer_of(registry, "x/y", b"{}"))
    with pytest.raises(SourceError, match=r"holds no GGUF file, only application/vnd.oci.image.layer.v1.tar"):
        pull(here, f"{registry.netloc}/library/busybox")
    two = [layer_of(registry, "application/vnd.docker.ai.gguf.v3", text) for text in (b"a", b"b")]
    registry.manifests["library/two", "latest"] = manifest_of(*two, config=layer_of(registry, "x/y", b"{}"))
    with pytest.raises(SourceError, match="holds 2 GGUF files"):
        pull(here, f"{registry.netloc}/library/two")


# Pushing.


def push(store: Store, reference: str) -> list[Progress]:
    lines: list[Progress] = []
    store.push(reference, lines.append, insecure=True)
    return lines


@pytest.fixture
def mine(registry: Registry, there: Store, elsewhere: Elsewhere) -> Served:
    """A model that is to go to the registry."""
    reference = f"{registry.netloc}/me/m"
    there._elsewhere = elsewhere
    there.copy("m", reference)
    return Served(reference, there.manifests.content(Name.parse(reference)))


@pytest.mark.parametrize("redirects", [False, True])
def test_what_was_pushed_is_pulled_the_same(registry: Registry, here: Store, there: Store, mine: Served, redirects: bool) -> None:
    registry.redirects_uploads = redirects
    lines = push(there, mine.reference)
    statuses = list(dict.fromkeys(line.status for line in lines))
    assert statuses[0] == "retrieving manifest"
    assert statuses[-2:] == ["pushing manifest", "success"]
    assert all(re.fullmatch("pushing [0-9a-f]{12}", status) for status in statuses[1:-2])
    assert registry.manifests["me/m", "latest"] == mine.manifest
    assert registry.types["me/m", "latest"] == MANIFEST_TYPE
    pull(here, mine.reference)
    assert_whole(here, there, mine)
    assert registry.storage.credentials == []


def test_only_what_the_registry_lacks_is_sent(registry: Registry, there: Store, mine: Served) -> None:
    push(there, mine.reference)
    n_uploads = len([1 for method, path in registry.host.seen if method == "PATCH"])
    push(there, mine.reference)
    assert len([1 for method, path in registry.host.seen if method == "PATCH"]) == n_uploads
    there.create(f"{registry.netloc}/me/child", Recipe(base=mine.reference, system="new"))
    push(there, f"{registry.netloc}/me/child")
    assert len([1 for method, path in registry.host.seen if method == "PATCH"]) == n_uploads + 2


def test_a_layer_of_another_repository_is_mounted(registry: Registry, there: Store, mine: Served) -> None:
    push(there, mine.reference)
    weights = there.get("m").model_path
    there.create(f"{registry.netloc}/me/child", Recipe(base=mine.reference, system="new"))
    blobs, digest = dict(registry.blobs), f"sha256:{weights.name.removeprefix('sha256-')}"

    class Hidden(dict[str, bytes]):
        """Blobs that only a mount finds."""

        def get(self, key: str, default: Any = None) -> Any:
            return None if key == digest else super().get(key, default)

    registry.blobs = Hidden(blobs)
    push(there, f"{registry.netloc}/me/child")
    assert any(method == "POST" and f"mount=sha256%3A{digest[7:]}&from=me%2Fm" in path for method, path in registry.host.seen)


@pytest.mark.parametrize("fault", ["upload dropped", "upload 500", "upload forgotten", "commit 500", "token expires"])
def test_a_push_survives_what_passes(registry: Registry, here: Store, there: Store, mine: Served, fault: str) -> None:
    registry.spoil(fault, 1, after=1 if fault != "token expires" else 4)
    push(there, mine.reference)
    assert [item.n_left for item in registry.faults] == [0], "it never happened"
    pull(here, mine.reference)
    assert_whole(here, there, mine)


def test_pushes_that_fail(registry: Registry, there: Store, mine: Served) -> None:
    lines: list[Progress] = []
    with pytest.raises(NotFound, match=r"model '.*/me/none:latest' not found"):
        there.push(f"{registry.netloc}/me/none", lines.append, insecure=True)
    assert [line.status for line in lines] == ["retrieving manifest", "couldn't retrieve manifest"]
    registry.spoil("token refused", 10_000)
    with pytest.raises(SourceError, match="unauthorized: access denied"):
        push(there, mine.reference)
    registry.faults.clear()
    registry.spoil("upload 500", 10_000)
    with pytest.raises(SourceError, match=r"max retries exceeded: .* answered 500"):
        push(there, mine.reference)
    assert not registry.manifests


def test_a_push_can_be_cancelled(registry: Registry, there: Store, mine: Served) -> None:
    def report(line: Progress) -> None:
        if line.completed > PART_BYTES:
            raise Cancelled

    with pytest.raises(Cancelled):
        there.push(mine.reference, report, insecure=True)
    assert not registry.manifests


def test_a_model_in_parts_becomes_one_file(registry: Registry, here: Store, there: Store, tmp_path: Path) -> None:
    """With all else that its manifest names; asked for again, nothing is fetched as long as that manifest stays."""
    whole = write_large(tmp_path / "whole.gguf", 7)
    store = Store(tmp_path / "parts-there")
    blob = store.blobs.import_file(whole)
    store.create("m", Recipe(files={"m.gguf": blob.digest}, system="be kind", parameters={"top_k": 3}, licenses=("MIT",)))
    manifest = json.loads(registry.add(store, "m", "ann/Big-GGUF:Q4"))
    layers = []
    for path in split(whole, 2, tmp_path / "parts"):
        digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        registry.blobs[digest] = path.read_bytes()
        layers.append({"mediaType": LAYER_PREFIX + "model", "digest": digest, "size": path.stat().st_size})
    manifest["layers"] = [*layers, *(layer for layer in manifest["layers"] if layer["mediaType"] != LAYER_PREFIX + "model")]
    registry.manifests["ann/Big-GGUF", "Q4"] = json.dumps(manifest).encode()
    name = f"{registry.netloc}/ann/Big-GGUF:Q4"
    pull(here, name)
    model = here.get(name)
    assert model.file is not None
    assert model.file.n_splits == 1
    assert model.model_path.read_bytes() == whole.read_bytes()
    assert (model.system, model.parameters, model.licenses) == ("be kind", {"top_k": 3}, ("MIT",))
    n_before = registry.n_bytes_sent
    pull(here, name)
    assert registry.n_bytes_sent == n_before


def test_a_blob_that_is_finished_between_two_looks_is_not_fetched_again(
    registry: Registry, here: Store, there: Store, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may finish it just before this one would begin."""
    weights = there.get("m").model_path
    real = partial.begin
    here.blobs.folder.mkdir(parents=True)

    def begin(blobs: Any, digest: str, *rest: Any) -> Any:
        if digest == weights.name.replace("-", ":") and not blobs.has(digest):
            shutil.copy(weights, blobs.path(digest))
        return real(blobs, digest, *rest)

    monkeypatch.setattr(partial, "begin", begin)
    pull(here, served.reference)
    assert registry.n_bytes_sent < weights.stat().st_size
    assert_whole(here, there, served)
