from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; "  # as where the extra is not installed


def run(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **environ}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=120, check=False)


def test_nothing_but_the_start_of_a_cluster_needs_ray() -> None:
    modules = "puna.cluster, puna.cluster.head.scheduler, puna.cluster.node.service, puna.cluster.rays.head, puna.cli.app"
    assert run(f"{WITHOUT_RAY} import {modules}").returncode == 0


@pytest.mark.parametrize(
    "program",
    ["from puna.cli.serve import serve; serve(ray=True)", "import puna.cluster; puna.cluster.app"],
    ids=["puna", "serve"],
)
def test_without_ray_it_says_what_to_install(program: str) -> None:
    done = run(f"{WITHOUT_RAY} {program}")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("a cluster needs Ray: pip install 'puna[cluster]'")


@pytest.mark.parametrize(("given", "wanted"), [({}, "0"), ({"RAY_USAGE_STATS_ENABLED": "1"}, "1")])
def test_ray_reports_its_use_only_where_somebody_has_asked_for_it(given: dict[str, str], wanted: str) -> None:
    program = (
        "from puna.cluster.rays.joining import ray_module; ray_module(); import os; print(os.environ['RAY_USAGE_STATS_ENABLED'])"
    )
    assert run(program, **given).stdout.strip() == wanted


@pytest.fixture
def named() -> Iterator[str]:
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def joined(named: str, init: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """With a Ray that does *init* when somebody joins it, and is on another machine, too."""
    program = (
        "import ray\n"
        "from ray._private import services\n"
        "services.canonicalize_bootstrap_address = lambda _: __import__('os').environ['RAY_ADDRESS']\n"  # and not another of ours
        f"def init(address, **_): {init}\n"
        "ray.init = init\n"
        "ray.nodes = lambda: [{'Alive': True, 'NodeManagerAddress': address} for address in ('127.0.0.1', '192.0.2.1')]\n"
        "from puna.cluster.rays.joining import join; join()"
    )
    return run(program, RAY_ADDRESS=named, **environ)


@pytest.mark.parametrize(("mode", "is_told"), [("", True), ("token", False)])
def test_a_cluster_that_was_named_and_is_not_there_is_an_error_and_none_is_started(named: str, mode: str, is_told: bool) -> None:
    said = joined(named, "raise ConnectionError(address)", RAY_AUTH_MODE=mode).stderr
    assert f"{named}: no cluster of Ray can be reached there" in said
    assert ("reached with RAY_AUTH_MODE=token" in said) == is_told


def test_where_nobody_listens_ray_is_not_left_to_try() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # no port of others, and nobody listens
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        done = joined(address, "print('tries')")
    assert f"{address}: no cluster of Ray can be reached there" in done.stderr
    assert "tries" not in done.stdout


def test_without_the_clusters_token_it_says_where_that_is(named: str) -> None:
    done = joined(named, "raise ray.exceptions.AuthenticationError('no token')", RAY_AUTH_MODE="token")
    assert f"PunaError: {named}: the cluster's token is not here: bring ~/.ray/auth_token" in done.stderr


@pytest.mark.parametrize(("mode", "is_told"), [("", True), ("token", False)])
def test_what_lies_open_in_a_cluster_of_several_machines_is_said(named: str, mode: str, is_told: bool) -> None:
    done = joined(named, "pass", RAY_AUTH_MODE=mode)
    assert done.returncode == 0
    assert "may run programs on its machines (192.0.2.1)" in done.stderr
    assert ("have Ray ask for a token" in done.stderr) == is_told
