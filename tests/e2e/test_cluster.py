"""Real Ray: three raylets on this machine stand for three machines, each with a folder of models of its own."""

from __future__ import annotations

import ipaddress
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from bench.cluster import SERVE, Raylets, Result, ask, converse, head, metric, opening, raylets, spread, until

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.patience import wait_until
from tests.ports import kept_free
from tests.processes import is_alive
from tests.tiny import write_llama

pytestmark = pytest.mark.thorough

MODEL = "tiny"
N_NODES = 3
N_CTX = 4096
MOST = 10 * N_CTX  # tokens that an answer may have


@dataclass(frozen=True)
class World:
    folder: Path
    cluster: Raylets
    models: Path
    prefix: httpx.Client
    turns: httpx.Client


# As a head that was installed after the nodes were started.
NEXT_VERSION = """
import sys, puna
puna.__version__ = "0.1.0+next"
sys.argv = ["puna", "serve", "--ray"]
from puna.__main__ import main
main()
"""
# As `serve run puna.cluster:app`, on a port of its own.
ON_SERVE = """
import signal, sys
import ray
from ray import serve
from ray._common.utils import import_attr
ray.init(address="auto", log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(import_attr("puna.cluster:app"))
signal.sigwait({signal.SIGTERM})
serve.shutdown()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two heads on the same nodes: one routes by what replicas hold, the other in turns."""
    folder = tmp_path_factory.mktemp("cluster")
    file = write_llama(folder / "tiny.gguf", n_layers=1, n_embd=64, n_ff=64, n_ctx=N_CTX)
    store = Store(folder / "models")
    blob = store.blobs.import_file(file)
    store.create(MODEL, Recipe(files={"model.gguf": blob.digest}))
    with (
        kept_free() as first,
        kept_free() as second,
        raylets(folder, N_NODES) as cluster,
        head(folder, cluster.address, first, store.root) as prefix,
        head(folder, cluster.address, second, store.root, PUNA_CLUSTER_ROUTE="turns") as turns,
    ):
        for client in (prefix, turns):
            until(lambda client=client: sum(metric(client, "puna_node_up").values()) == N_NODES)  # type: ignore[misc]
        yield World(folder, cluster, store.root, prefix, turns)


def test_a_model_is_started_where_it_is_needed_and_all_nodes_are_shown_at_one_place(world: World) -> None:
    first = Result()
    ask(world.prefix, first, {"model": MODEL, "messages": opening("first"), "options": {"num_predict": 4}})
    assert first.endings == {"answered": 1}
    spread(world.prefix, MODEL, N_NODES)
    shown = world.prefix.get("/api/ps").json()["models"]
    assert len({model["node"] for model in shown if model["name"] == f"{MODEL}:latest"}) == N_NODES
    assert len(metric(world.prefix, "puna_replica_tokens_total")) == N_NODES
    engine = world.prefix.get("/api/engine").json()
    assert len({model["node"] for model in engine["models"]}) == N_NODES
    assert all(model["health"]["status"] == "ready" for model in engine["models"])


def test_routed_by_prefixes_conversations_compute_less_than_in_turns(world: World) -> None:
    spread(world.turns, MODEL, N_NODES)
    results = {
        name: converse(client, MODEL, tag=name, n_conversations=60, n_turns=3)
        for name, client in (("turns", world.turns), ("prefix", world.prefix))
    }
    for name, result in results.items():
        print(f"{name:8} {result.told()}")
        assert result.endings == {"answered": 180}
    assert results["prefix"].n_computed < 0.75 * results["turns"].n_computed


def test_a_client_that_leaves_frees_the_replica(world: World) -> None:
    body = {"model": MODEL, "messages": opening("leaves"), "options": {"num_predict": MOST, "ignore_eos": True}}
    with world.prefix.stream("POST", "/api/chat", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert sum(metric(world.prefix, "puna_replica_requests").values()) >= 1
    until(lambda: sum(metric(world.prefix, "puna_replica_requests").values()) == 0)


def test_ray_serve_runs_the_same_server(world: World) -> None:
    for number in range(N_NODES):  # whichever machine it is started on
        shutil.copytree(world.models, world.folder / f"models-{number}", dirs_exist_ok=True)
    with (
        kept_free() as port,
        head(world.folder, world.cluster.address, port, world.models, ("-c", ON_SERVE, str(port))) as client,
    ):
        until(lambda: sum(metric(client, "puna_node_up").values()) == N_NODES)
        assert client.get("/").text == "Ollama is running"
        result = converse(client, MODEL, tag="on serve", n_conversations=6, n_turns=2)
        assert result.endings == {"answered": 12}
        openai = {"model": MODEL, "messages": opening("openai"), "max_tokens": 5, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=openai) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert len(lines) > 2
        assert lines[-1] == "data: [DONE]"
        # Who leaves is heard of through Ray's proxy, too.
        body = {"model": MODEL, "messages": opening("leaves"), "options": {"num_predict": MOST, "ignore_eos": True}}
        with client.stream("POST", "/api/chat", json=body) as reply:
            next(reply.iter_lines())  # an iterator that nobody keeps hangs up
        until(lambda: sum(metric(client, "puna_replica_requests").values()) == 0)


def test_a_machine_is_lost_under_load_and_every_request_ends(world: World) -> None:
    result, is_lost = Result(), threading.Event()
    n_asked = [0] * 18
    counted: list[float] = []

    def computed() -> float:
        return sum(metric(world.prefix, "puna_runner_tokens_total").values())

    def long(number: int) -> None:
        options = {"num_predict": 600, "ignore_eos": True}
        while not is_lost.is_set():  # one after the other, so that there is work on it whenever it is lost
            n_asked[number] += 1
            ask(world.prefix, result, {"model": MODEL, "messages": opening(f"long {number}"), "options": options})

    threads = [threading.Thread(target=long, args=(number,)) for number in range(len(n_asked))]

    def lose_one() -> None:
        for thread in threads:
            thread.start()
        try:
            until(lambda: min([*metric(world.prefix, "puna_replica_requests").values(), 99]) >= 2)
            counted.append(computed())
            world.cluster.kill(2)
        finally:
            is_lost.set()

    lost = converse(world.prefix, MODEL, tag="lost", n_conversations=60, n_turns=3, at_half=lose_one)
    for thread in threads:
        thread.join(240)
    print(f"long     {result.told()}\nlost     {lost.told()}")
    assert (sum(result.endings.values()), sum(lost.endings.values())) == (sum(n_asked), 180)
    assert set(result.endings) | set(lost.endings) <= {"answered", "error in the middle"}
    assert all("lost in the middle of it" in error for error in result.errors + lost.errors)
    moved = sum(metric(world.prefix, "puna_node_requests_moved_total").values())
    broken = sum(metric(world.prefix, "puna_node_requests_broken_total").values())
    assert broken == result.endings["error in the middle"] + lost.endings["error in the middle"]
    assert moved + broken >= 1
    # Whoever asks now is answered by those that are left.
    until(lambda: sum(metric(world.prefix, "puna_node_up").values()) == N_NODES - 1)
    assert computed() >= counted[0]  # what the lost one had computed stays in the sum
    after = converse(world.prefix, MODEL, tag="after", n_conversations=6, n_turns=2)
    assert after.endings == {"answered": 12}


def test_a_head_of_another_version_replaces_the_nodes_and_breaks_no_request(world: World) -> None:
    result = Result()
    options = {"num_predict": 2000, "ignore_eos": True}
    bodies = [{"model": MODEL, "messages": opening(f"rolling {number}"), "options": options} for number in range(6)]
    threads = [threading.Thread(target=ask, args=(world.prefix, result, body)) for body in bodies]
    for thread in threads:
        thread.start()
    until(lambda: sum(metric(world.prefix, "puna_replica_requests").values()) == 6)
    with kept_free() as port, head(world.folder, world.cluster.address, port, world.models, ("-c", NEXT_VERSION)) as client:
        until(lambda: sum(metric(client, "puna_node_up").values()) == N_NODES - 1)
        for thread in threads:
            thread.join(240)
        assert result.endings == {"answered": 6}
        assert converse(client, MODEL, tag="next", n_conversations=4, n_turns=2).endings == {"answered": 8}
        until(lambda: sum(metric(world.prefix, "puna_node_up").values()) == 0)


def test_a_ray_that_was_started_for_one_machine_listens_on_loopback_alone(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as own:  # short: sockets lie below it
        environ = {"RAY_TMPDIR": own, "HOME": str(tmp_path)}
        with kept_free() as port, head(tmp_path, "", port, tmp_path / "models", SERVE, **environ) as client:
            until(lambda: sum(metric(client, "puna_node_up").values()) == 1)
            started = list(_of(own))
            listening = [c.laddr.ip for p in started for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert len(listening) >= 4
        assert [ip for ip in listening if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback] == []
        wait_until(lambda: not any(map(is_alive, started)))


def _of(folder: str) -> Iterator[psutil.Process]:
    """The processes of a cluster of Ray whose folder that is: it stands in their commands, or their parents' do."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if folder in " ".join(process.cmdline()):
                yield process
                yield from process.children(recursive=True)
