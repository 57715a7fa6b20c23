from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from puna import wire
from puna.cluster.head.description import described
from puna.cluster.head.scheduler import ClusterScheduler
from puna.cluster.messages import WINDOW
from puna.cluster.routing.demand import Demand
from puna.cluster.routing.keys import keys_of
from puna.cluster.routing.router import in_turn
from puna.errors import LoadError, NodeLost, NotFound, OutOfMemory, Overloaded, RunnerDied
from puna.llm.load import LoadRequirements
from puna.server.labels import FILE_LABEL, Labels
from puna.server.placing.loaded import State
from puna.settings import FOREVER
from tests.patience import PATIENCE_S
from tests.unit.cluster.fleet import Scripted, Told, ask, fleet, requirements, until
from tests.unit.llm.scripted import events, requests_to, wait_for_event


def test_a_request_is_answered_by_a_node(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            told = await ask(head, machines.script())
            assert (told.text, told.error) == ("Hello world", None)
            assert told.done is not None
            await until(lambda: [running.node for running in head.models.running()] == ["a"])

    asyncio.run(play())


def test_what_has_not_begun_to_answer_goes_elsewhere_when_its_node_is_lost(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script(pieces=["from b"])
            machines.script(node="a", hang_at_piece=0)
            request = asyncio.create_task(ask(head, model))
            await wait_for_event(tmp_path / "a.model", "complete")
            await machines.lose("a")
            told = await request
            assert (told.text, told.error) == ("from b", None)
            assert dict(head.n_moved) == {"a": 1}
            assert not head.n_broken

    asyncio.run(play())


def test_what_was_in_the_middle_of_its_answer_ends_with_one_error_that_says_so(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script(n_pieces=5, hang_at_piece=3)
            told = Told()
            request = asyncio.create_task(ask(head, model, told=told))
            await until(lambda: told.n_pieces == 3)
            await machines.lose("a")
            await request
            assert (told.text, told.done) == ("x x x ", None)
            assert isinstance(told.error, NodeLost)
            assert "lost in the middle of it, after 3 pieces" in str(told.error)
            assert dict(head.n_broken) == {"a": 1}
            assert len(requests_to(tmp_path / "model", "complete")) == 1

    asyncio.run(play())


def test_a_runner_that_crashes_is_not_tried_on_the_next_machine(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            told = await ask(head, machines.script(die_at_piece=0))
            assert type(told.error) is RunnerDied
            assert "unexpectedly stopped" in str(told.error)
            assert len(requests_to(tmp_path / "model", "complete")) == 1

    asyncio.run(play())


def test_a_node_that_says_nothing_is_lost(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script()
            machines.script(node="a", hang_at_piece=0)
            request = asyncio.create_task(ask(head, model))
            await wait_for_event(tmp_path / "a.model", "complete")
            reporting, line = machines.machines_["a"].service._reporting, head.nodes["a"].line
            assert reporting is not None
            assert line is not None
            line.lost_after_s = 0.5
            reporting.cancel()  # its connections stay open, as those of a machine without power do
            told = await request
            assert told.text == "Hello world"
            assert dict(head.n_moved) == {"a": 1}

    asyncio.run(play())


def test_without_any_node_the_error_says_so(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head(patience_s=0.2) as head:
            await machines.lose("a")
            await until(lambda: not head.nodes.usable())
            told = await ask(head, machines.script())
            assert isinstance(told.error, NodeLost)

    asyncio.run(play())


def test_a_node_that_comes_back_is_used_again(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model = machines.script()
            assert (await ask(head, model)).text
            await machines.lose("a")
            await until(lambda: not head.nodes.usable())
            await machines.add("a")
            assert (await ask(head, model)).text == "Hello world"

    asyncio.run(play())


def test_who_leaves_early_cancels_the_request_on_its_node(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model = machines.script(n_pieces=100_000, piece_delay_s=0.01)
            async with head.acquire(model, requirements()) as acquired:
                replies = acquired.runner.complete(wire.CompletionRequest(prompt="why"))
                await anext(replies)
                await replies.aclose()
                await wait_for_event(tmp_path / "model", "cancelled")
            assert events(tmp_path / "model")[-1][1] < 100_000
            await until(lambda: all(replica.n_busy == 0 for replica in head.models.replicas()))

    asyncio.run(play())


def test_what_a_reader_does_not_take_is_not_sent_to_the_head(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            piece, n_pieces = "y" * 1024, 400
            model = machines.script(pieces=[piece] * n_pieces)
            async with head.acquire(model, requirements()) as acquired:
                replies = acquired.runner.complete(wire.CompletionRequest(prompt="why"))
                assert await anext(replies) == wire.Piece(content=piece)
                assert (await ask(head, model)).n_pieces == n_pieces  # others on the same line are not kept waiting
                node = head.nodes["a"]
                assert node.line is not None
                waiting = [mailbox for mailbox in node.line._open.values() if len(mailbox._replies) > 1]
                assert [len(mailbox._replies) <= WINDOW // 1024 + 1 for mailbox in waiting] == [True]
                rest = [reply async for reply in replies]
                assert len(rest) == n_pieces  # the other pieces, and the last message

    asyncio.run(play())


def test_conversations_go_where_their_beginning_is(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b", "c") as machines, machines.head() as head:
            model = machines.script()
            for name in "abc":
                machines.script(node=name, pieces=[f"from {name}"], cache_cells=100000)
            await everywhere(head, model)
            told: dict[int, list[str]] = {}
            prompts = {number: f"conversation {number} " * 40 for number in range(9)}
            for _ in range(4):
                for number, prompt in prompts.items():
                    answer = (await ask(head, model, prompt)).text
                    told.setdefault(number, []).append(answer)
                    prompts[number] = f"{prompt}{answer} and then? " + "more " * 20
            assert all(len(set(answers)) == 1 for answers in told.values())
            assert {answers[0] for answers in told.values()} == {"from a", "from b", "from c"}

    asyncio.run(play())


def test_another_head_knows_what_replicas_hold(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b", "c") as machines, machines.head() as head, machines.head(route=in_turn) as other:
            model, prompt = machines.script(), "a long conversation " * 40
            for name in "abc":
                machines.script(node=name, pieces=[f"from {name}"], cache_cells=100000)
            await everywhere(head, model)
            first = (await ask(other, model, prompt)).text
            node = first.removeprefix("from ")
            await until(lambda: len(head.nodes[node].replicas[str(model.model_path)].keys) > 0)
            assert {(await ask(head, model, prompt)).text for _ in range(4)} == {first}

    asyncio.run(play())


async def everywhere(head: ClusterScheduler, model: Scripted) -> None:
    """The model is loaded on all nodes."""
    head.models.know(model, described(model, requirements(), None))
    known = head.models.known(str(model.model_path))
    assert known is not None
    for _ in head.nodes.usable():
        await head._start_another(known.model)
    await until(lambda: sum(replica.is_usable for replica in head.models.replicas()) == len(head.nodes))


def test_a_model_goes_where_its_memory_is(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path) as machines:
            await machines.add("a", limit=4000)
            await machines.add("b", limit=12000)
            await machines.add("c", limit=10000)
            async with machines.head() as head:
                first, second = machines.script("first", needs=8000), machines.script("second", needs=7000)
                third = machines.script("third", needs=3000)
                for model in (first, second, third):
                    assert (await ask(head, model)).error is None
                await until(lambda: len(head.models.running()) == 3)
                placed = {Path(replica.key).name: replica.node.name for replica in head.models.replicas()}
                assert placed["first"] == "b"
                assert set(placed.values()) <= {"a", "b", "c"}

    asyncio.run(play())


def test_a_node_that_finds_no_room_is_passed_over_and_the_last_one_says_why(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script()
            machines.script(node="a", out_of_memory=True)
            assert (await ask(head, model)).text == "Hello world"
            await until(lambda: [running.node for running in head.models.running()] == ["b"])
            told = await ask(head, machines.script("huge", out_of_memory=True))
            assert isinstance(told.error, OutOfMemory)
            broken = await ask(head, machines.script("broken", exit_at_load=3))
            assert isinstance(broken.error, RunnerDied | LoadError)

    asyncio.run(play())


def test_a_queue_brings_another_replica_and_quiet_takes_it_away(tmp_path: Path) -> None:
    async def play() -> None:
        demand = lambda: Demand(start_after_s=0.0, drain_after_s=0.0)  # noqa: E731
        async with fleet(tmp_path, "a", "b") as machines, machines.head(demand=demand) as head:
            gate = tmp_path / "gate"
            model = machines.script(gate=str(gate))
            options = requirements(n_parallel=1)
            requests = [asyncio.create_task(ask(head, model, f"why {n}", options=options)) for n in range(3)]
            await until(lambda: sum(replica.is_usable for replica in head.models.replicas()) == 2)
            gate.touch()
            assert all(told.error is None for told in await asyncio.gather(*requests))
            await until(lambda: len(list(head.models.replicas())) == 1)
            assert (await ask(head, model, options=options)).error is None

    asyncio.run(play())


def test_a_node_that_retires_finishes_what_it_has_and_takes_no_more(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script(pieces=["from b"])
            gate = tmp_path / "gate"
            machines.script(node="a", n_pieces=50, gate=str(gate))
            running = asyncio.create_task(ask(head, model))
            await wait_for_event(tmp_path / "a.model", "complete")
            machines.machines_["a"].service.retire()
            # At once, and so before the head has heard of it, too.
            assert {(await ask(head, model)).text for _ in range(3)} == {"from b"}
            assert not machines.machines_["a"].is_idle.is_set()
            gate.touch()
            told = await running
            assert (told.n_pieces, told.error) == (50, None)
            await until(machines.machines_["a"].is_idle.is_set)
            assert not head.n_moved

    asyncio.run(play())


def test_numbers_of_all_nodes_are_at_one_place(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script(n_pieces=3, cache_cells=64)
            machines.script(node="a", hang_at_piece=0)
            request = asyncio.create_task(ask(head, model, "why " * 100))
            await wait_for_event(tmp_path / "a.model", "complete")
            await machines.lose("a")
            assert (await request).error is None
            await until(lambda: told(head).get(("puna_replica_prefix_keys", "b")))
            found = told(head)
            assert found["puna_node_up", "b"] == 1
            assert found["puna_node_memory_free_bytes", "b"] > 0
            assert found["puna_node_requests_moved_total", "a"] == 1
            assert found["puna_replica_requests", "b"] == 0

    asyncio.run(play())


def told(head: ClusterScheduler) -> dict[tuple[str, str], float]:
    """Values by name and node."""
    (collector,) = head.collectors
    return {(sample.name, sample.labels["node"]): sample.value for family in collector.collect() for sample in family.samples}


def test_a_node_that_has_retired_is_not_started_again_by_an_older_head(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            machine = machines.machines_["a"]
            machine.service.retire()
            await until(machine.is_idle.is_set)
            await until(lambda: [node.name for node in head.nodes.usable()] == ["b"])
            n_asked = len(machines.versions)
            await machine.service.close()
            await until(lambda: head.nodes["a"].line is None)
            await asyncio.sleep(1.5)  # more than it takes to look again
            assert len(machines.versions) == n_asked
            assert (await ask(head, machines.script())).error is None
            await machines.lose("a")

    asyncio.run(play())


def test_loads_of_another_head_count_and_ones_own_count_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head, machines.head() as other:
            gate = tmp_path / "gate"
            model = machines.script(gate=str(gate))
            requests = [asyncio.create_task(ask(other, model)) for _ in range(2)]
            key = str(model.model_path)
            await until(lambda: key in head.nodes["a"].replicas and head.nodes["a"].replicas[key].n_busy == 2)
            assert other.nodes["a"].replicas[key].n_busy == 2
            gate.touch()
            assert all(told.error is None for told in await asyncio.gather(*requests))
            await until(lambda: head.nodes["a"].replicas[key].n_busy == other.nodes["a"].replicas[key].n_busy == 0)

    asyncio.run(play())


def test_who_has_its_place_is_answered_while_another_model_waits_for_that(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", max_loaded_models=1) as machines, machines.head() as head:
            first, second = machines.script("first"), machines.script("second")
            async with head.acquire(first, requirements()) as acquired:
                other = asyncio.create_task(ask(head, second))
                await until(lambda: State.DRAINING in {shown.state for shown in head.models.shown()})
                request = wire.CompletionRequest(prompt="why")
                async with asyncio.timeout(PATIENCE_S):
                    assert isinstance([reply async for reply in acquired.runner.complete(request)][-1], wire.Done)
                    assert await acquired.runner.tokenize("why")
            assert (await other).text == "Hello world"

    asyncio.run(play())


def test_a_request_counts_once_among_those_that_may_wait(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", max_queue=4) as machines, machines.head() as head:
            gate = tmp_path / "gate"
            gate.touch()
            model, options = machines.script(gate=str(gate)), requirements(n_parallel=1)
            first = asyncio.create_task(ask(head, model, options=options))
            await wait_for_event(tmp_path / "model", "complete")
            found = [await first, *await asyncio.gather(*(ask(head, model, options=options) for _ in range(5)))]
            assert [told.error for told in found] == [None] * 6
            gate.unlink()
            many = [asyncio.create_task(ask(head, model, options=options)) for _ in range(9)]
            await until(lambda: sum(task.done() for task in many) == 4)
            gate.touch()
            errors = [told.error for told in await asyncio.gather(*many)]
            assert [type(error) for error in errors if error] == [Overloaded] * 4

    asyncio.run(play())


def test_a_node_whose_places_are_taken_is_passed_over(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path) as machines:
            await machines.add("a", limit=100000, max_loaded_models=1)
            await machines.add("b", limit=50000, max_loaded_models=1)
            async with machines.head() as head:
                for name, node in (("first", "a"), ("second", "b")):
                    async with head.acquire(machines.script(name), requirements(), FOREVER):
                        pass
                    await until(partial(is_full, head, node))
                told = await ask(head, machines.script("third"))
                assert isinstance(told.error, Overloaded)
                assert "places are taken" in str(told.error)

    asyncio.run(play())


def is_full(head: ClusterScheduler, node: str) -> bool:
    return any(replica.reported and replica.reported.is_pinned for replica in head.nodes[node].replicas.values())


def test_a_node_that_has_refused_a_model_is_not_taken_for_one_that_has_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script()
            machines.script(node="a", out_of_memory=True)
            async with head.acquire(model, requirements()):
                await until(lambda: [replica.node.name for replica in head.models.replicas()] == ["b"])
                assert not head.nodes["a"].replica(str(model.model_path)).is_there

    asyncio.run(play())


def test_a_model_that_was_loaded_anew_has_its_new_context_at_once(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            model = machines.script()
            assert (await ask(head, model)).error is None
            await until(lambda: [running.n_ctx for running in head.models.running()] == [128])
            async with head.acquire(model, LoadRequirements(wire.LoadOptions(n_ctx=512))) as acquired:
                assert acquired.n_ctx == 512

    asyncio.run(play())


def test_a_request_goes_where_its_context_is(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script()
            machines.script(node="a", pieces=["from a"], cache_cells=100000)
            machines.script(node="b", pieces=["from b"], cache_cells=100000)
            await everywhere(head, model)
            wide = LoadRequirements(wire.LoadOptions(n_ctx=512))
            prompt = "a long conversation " * 40
            async with head.acquire(model, wide) as acquired:
                (wider,) = [replica for replica in head.models.replicas() if replica.n_ctx == 512]
                (narrow,) = [replica for replica in head.models.replicas() if replica.n_ctx == 128]
                narrow.keys.update(keys_of(wire.CompletionRequest(prompt=prompt)))  # it would be the better one but for that
                replies = [reply async for reply in acquired.runner.complete(wire.CompletionRequest(prompt=prompt))]
                assert replies[0] == wire.Piece(content=f"from {wider.node.name}")

    asyncio.run(play())


def test_who_looks_on_keeps_no_model(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head, machines.head() as other:
            model = machines.script()
            assert (await ask(head, model)).error is None
            (loaded,) = machines.machines_["a"].service.node.loaded()
            await until(lambda: loaded.n_users == 0)
            begun, expires = len(requests_to(tmp_path / "model", "complete")), loaded.idle_until
            for one in (head, other):
                await until(one.models.shown)
                (shown,) = one.models.shown()
                assert isinstance(await shown.process.occupancy(), wire.Occupancy)
            assert loaded.idle_until == expires
            assert len(requests_to(tmp_path / "model", "complete")) == begun
            head.unload(model.model_path)
            await until(lambda: not machines.machines_["a"].service.node.loaded())
            with pytest.raises(NotFound, match="is not loaded"):
                await shown.process.occupancy()

    asyncio.run(play())


def knows_two(head: ClusterScheduler) -> bool:
    return len([replica for replica in head.models.replicas() if replica.reported and replica.reported.state == "ready"]) == 2


def test_what_another_head_has_asked_for_has_its_name_in_the_numbers_and_a_file_has_none(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head, machines.head() as other:
            named = replace(machines.script("named"), digest="0123")
            for model in (named, machines.script("secret")):
                assert (await ask(other, model)).error is None
            for one in (head, other):
                await until(partial(knows_two, one))
                (collector,) = one.collectors
                samples = [sample for family in collector.collect() for sample in family.samples]
                assert {sample.labels["model"] for sample in samples if "model" in sample.labels} == {"named", FILE_LABEL}
            assert {Labels().of(model) for model, _ in head.models.runners()} == {"named", FILE_LABEL}

    asyncio.run(play())


def test_another_replica_stays_whatever_the_last_request_wanted_for_its_own(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            model = machines.script()
            async with head.acquire(model, requirements(), 0.0):
                known = head.models.known(str(model.model_path))
                assert known is not None
                await head._start_another(known.model)
                (loaded,) = machines.machines_["b"].service.node.loaded()
                await until(lambda: loaded.n_users == 0)
                assert loaded.state is State.READY

    asyncio.run(play())
