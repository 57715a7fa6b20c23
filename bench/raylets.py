"""A cluster of Ray on this machine, as large as one that is asked for: each raylet stands for a machine.

``python -m bench.raylets FOLDER N`` prints one line of JSON, the address, and ends with its input; every raylet has a folder of
models of its own, FOLDER/models-0 and so on. The line ``kill N`` on its input kills that raylet as a power cut would.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

OBJECT_STORE_BYTES = 80 << 20


def main(folder: Path, n_nodes: int) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        nodes = [_add(cluster, folder, number) for number in range(n_nodes)]
        print(json.dumps({"address": cluster.address}), flush=True)
        for line in sys.stdin:
            cluster.remove_node(nodes[int(line.split()[1])], allow_graceful=False)
            print("killed", flush=True)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


def _add(cluster, folder: Path, number: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Ray has no types for it
    models = folder / f"models-{number}"
    environ = {"OLLAMA_MODELS": str(models), "PUNA_WARM_SPARE": "0"}
    return cluster.add_node(
        num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, env_vars=environ, wait=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
