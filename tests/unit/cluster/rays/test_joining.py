from __future__ import annotations

import os
import subprocess
import sys

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


def test_a_cluster_that_was_named_and_is_not_there_is_an_error_and_none_is_started() -> None:
    program = (
        "import ray\n"
        "def init(address, **_): raise ConnectionError(address)\n"
        "ray.init = init\n"
        "from puna.cluster.rays.joining import join; join()"
    )
    done = run(program, RAY_ADDRESS="192.0.2.1:6379")
    assert "192.0.2.1:6379: no cluster of Ray can be reached there" in done.stderr
