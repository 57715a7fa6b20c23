"""Ray's machines, and the node of each: an actor that is pinned there, found by its name or started.

The names hold the version: where one of another version runs, it is retired before one of this version is started, on one machine
after the other. Machines that models may be on are those with the resource ``puna`` if any has it, else all.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from puna.cluster.head.nodes import Place, retired
from puna.cluster.rays.actor import NodeActor
from puna.cluster.rays.joining import NAMESPACE, ray_module
from puna.errors import NodeLost

log = logging.getLogger(__name__)

RESOURCE = "puna"
GRACE_S = 30.0
_PREFIX = "puna-node"
_START_TIMEOUT_S = 150.0


class RayMembership:
    """*grace_s*: how long nodes stay without any head."""

    def __init__(self, head: str, grace_s: float = GRACE_S) -> None:
        self._ray = ray_module()
        self._head, self._grace_s = head, grace_s
        self._machines: dict[str, dict[str, Any]] = {}  # by name, as Ray describes them
        self._renewing = asyncio.Lock()

    async def machines(self) -> set[str]:
        try:
            found = await asyncio.to_thread(self._ray.nodes)
        except Exception as error:
            raise NodeLost(f"Ray does not answer: {error}") from error
        alive = [node for node in found if node["Alive"]]
        chosen = [node for node in alive if RESOURCE in node["Resources"]] or alive
        self._machines = {_name(node): node for node in chosen}
        return set(self._machines)

    async def place(self, machine: str, version: str) -> Place:
        try:
            node = self._machines[machine]
            await self._renew(node, version)
            return Place(*await asyncio.to_thread(self._started, node, version))
        except KeyError:
            raise NodeLost(f"the machine {machine} has left the cluster") from None
        except Exception as error:
            raise NodeLost(f"no node can be started on {machine}: {error}") from error

    def _started(self, node: dict[str, Any], version: str) -> tuple[str, int, str]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(NodeActor).options(
            name=f"{_prefix(node)}{version}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        memory = int(node["Resources"].get("memory", 0))
        handle = actor.remote(_name(node), node["NodeManagerAddress"], version, memory, self._grace_s)
        found: tuple[str, int, str] = self._ray.get(handle.place.remote(), timeout=_START_TIMEOUT_S)
        return found

    async def _renew(self, node: dict[str, Any], version: str) -> None:
        """Nodes of other versions finish what they have; one machine after the other, so that the others go on."""
        if not await asyncio.to_thread(self._others, node, version):
            return
        async with self._renewing:
            for name in await asyncio.to_thread(self._others, node, version):
                log.info("%s is retired for one of version %s", name, version)
                handle = self._ray.get_actor(name, NAMESPACE)
                place = Place(*await asyncio.to_thread(self._ray.get, handle.place.remote(), timeout=_START_TIMEOUT_S))

                async def has_gone(name: str = name) -> bool:
                    return name not in await asyncio.to_thread(self._others, node, version)

                await retired(place, self._head, has_gone)

    def _others(self, node: dict[str, Any], version: str) -> list[str]:
        prefix = _prefix(node)
        found = self._ray.util.list_named_actors(all_namespaces=True)  # a head on Ray Serve is in that one's namespace
        names = [actor["name"] for actor in found if actor["namespace"] == NAMESPACE]
        return [name for name in names if name.startswith(prefix) and name != f"{prefix}{version}"]


def _name(node: dict[str, Any]) -> str:
    """As metrics and people call it."""
    return f"{node['NodeManagerAddress']}-{node['NodeID'][:6]}"


def _prefix(node: dict[str, Any]) -> str:
    return f"{_PREFIX}-{node['NodeID']}-"
