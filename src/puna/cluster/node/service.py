"""A node's end of the lines to heads: it listens, and does what is asked for with the models of its machine.

Each request is a task of its own, and ends with its line at the latest, which ends when the head says nothing for LOST_AFTER_S:
what a machine without power holds is not held for ever. What a head has not taken is not sent: neither many lines
of one head nor a slow reader among its clients fill anybody's memory.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from puna import __version__, wire
from puna.cluster import messages
from puna.cluster.messages import (
    LOST_AFTER_S,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    WINDOW,
    Answer,
    Ask,
    Cancel,
    Complete,
    Deliver,
    File,
    Held,
    Hold,
    Message,
    Model,
    Opened,
    Report,
    Retire,
    Said,
    Taken,
    Unload,
    decode,
    encode,
    frame,
    read_frame,
    refusal,
)
from puna.cluster.node.files import missing, receive
from puna.cluster.node.node import Node
from puna.cluster.node.replicas import Replica
from puna.errors import BadRequest, Overloaded, PunaError
from puna.store.disk.blobs import CHUNK_BYTES

log = logging.getLogger(__name__)

REPORT_S = 0.25
_MAX_BEHIND = 1 << 16  # bytes for one head that wait to be read
_GREETING_TIMEOUT_S = 10.0


class Service:
    """*name*: the node's. *key*: what heads show. *idle* is called when there has been no line for *grace_s*, and when the node
    has retired and is done.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        key: str,
        *,
        version: str = __version__,
        idle: Callable[[], None] | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self.node, self.name, self.version = node, name, version
        self._key = key
        self._idle, self._grace_s = idle, grace_s
        self._server: asyncio.Server | None = None
        self._lines: set[_Line] = set()
        self._reporting: asyncio.Task[None] | None = None
        self._alone_since: float | None = None
        self.is_retiring = False

    async def open(self, host: str, port: int = 0) -> int:
        """Returns the port."""
        await self.node.open()
        self._server = await asyncio.start_server(self._serve, host, port)
        self._reporting = asyncio.create_task(self._report(), name="reports to heads")
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait({self._reporting})
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.hang_up()
        await self.node.close()

    def retire(self) -> None:
        """Requests that run are finished, others refused: heads ask another node."""
        self.is_retiring = True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                greeting = messages.decode_greeting(await read_frame(reader, MAX_GREETING_BYTES))
            if not hmac.compare_digest(greeting.key.encode(), self._key.encode()):
                log.warning("somebody without the key of this cluster has knocked: %s", writer.get_extra_info("peername"))
            elif isinstance(greeting, Deliver):
                await self._take_delivery(greeting, reader, writer)
            else:
                await self._serve_line(_Line(self, reader, writer, greeting.head))
        except (OSError, TimeoutError, BadRequest) as error:
            log.debug("a connection has ended: %s", error)
        finally:
            writer.close()

    async def _take_delivery(self, delivery: Deliver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await receive(self.node.store.blobs, delivery.digest, delivery.n_bytes, reader)
            writer.write(frame(Answer(id=0, body=b"")))
        except PunaError as error:
            writer.write(frame(refusal(0, error)))
            await writer.drain()
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                while await reader.read(CHUNK_BYTES):
                    pass  # what is on its way would have the system take the answer back

    async def _serve_line(self, line: _Line) -> None:
        line.write(Opened(node=self.name, version=self.version))
        line.write(self._report_for(line))
        self._lines.add(line)
        try:
            await line.serve()
        finally:
            self._lines.discard(line)

    def _report_for(self, line: _Line) -> Report:
        memory, replicas = self.node.memory(), self.node.replicas
        ended, line.n_ended = replicas.ended(line.n_ended), replicas.n_ended
        return Report(
            free=memory.free,
            total=memory.total,
            is_retiring=self.is_retiring,
            replicas=replicas.reports(line.number, line.told),
            ended=ended,
        )

    async def _report(self) -> None:
        while True:
            has_retired = self.is_retiring and not any(line.is_busy for line in self._lines)
            await self.node.replicas.look()
            for line in list(self._lines):
                if not line.is_behind:
                    with suppress(OSError):
                        line.write(self._report_for(line))
            self._check_idle(has_retired)
            await asyncio.sleep(REPORT_S)

    def _check_idle(self, has_retired: bool) -> None:
        """*has_retired*: before it was last told what has been counted, so that all of it was."""
        now = asyncio.get_running_loop().time()
        self._alone_since = None if self._lines else self._alone_since or now
        is_alone = self._alone_since is not None and now - self._alone_since >= self._grace_s
        if self._idle is not None and (is_alone or has_retired):
            self._idle()
            self._idle = None


_numbers = itertools.count()


class _Line:
    """To one head."""

    def __init__(self, service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._service, self._reader, self._writer, self._head = service, reader, writer, head
        self.number = next(_numbers)
        self._node = service.node
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._credits: dict[int, _Credit] = {}
        self._held: dict[int, Replica] = {}  # by the numbers of the Holds
        self.told: dict[Path, set[int]] = {}
        self.n_ended = 0  # replicas that had ended at the last report

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    @property
    def is_behind(self) -> bool:
        """Whether the head reads nothing of what it was sent. It hears later, and then what has changed until then."""
        return self._writer.transport.get_write_buffer_size() > _MAX_BEHIND

    def write(self, message: Message) -> None:
        """Errors: ConnectionResetError."""
        if self._writer.is_closing():
            raise ConnectionResetError("the line is closed")
        self._writer.write(frame(message))

    async def send(self, message: Message) -> None:
        """Waits while the head reads nothing."""
        self.write(message)
        await self._writer.drain()

    def hang_up(self) -> None:
        self._writer.close()

    async def serve(self) -> None:
        try:
            while True:
                body = await read_frame(self._reader, MAX_FRAME_BYTES, LOST_AFTER_S)
                self._heed(messages.decode_command(body))
        except TimeoutError:
            log.warning("the head %s has said nothing for %g s: its requests end", self._head, LOST_AFTER_S)
            self._writer.transport.abort()  # it takes nothing any more
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())

    def _heed(self, command: messages.Command) -> None:
        """Alive has done what it is for when it has come."""
        match command:
            case Ask():
                self._begin(command.id, partial(self._ask, command))
            case Hold():
                self._begin(command.id, partial(self._hold, command))
            case Complete():
                self._credits[command.id] = _Credit()
                self._begin(command.id, partial(self._complete, command))
            case Cancel():
                if (task := self._tasks.get(command.id)) is not None:
                    task.cancel()
            case Taken():
                if (credit := self._credits.get(command.id)) is not None:
                    credit.give(command.weight)
            case Unload():
                self._node.unload(command.key)
            case Retire():
                self._service.retire()

    def _begin(self, number: int, work: Callable[[], Awaitable[None]]) -> None:
        async def to_its_end() -> None:
            try:
                await work()
            except PunaError as error:
                await self.send(refusal(number, error))

        task = asyncio.create_task(to_its_end())
        self._tasks[number] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            self._credits.pop(number, None)
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
                log.error("a request of a head has failed", exc_info=error)
                with suppress(OSError):
                    self.write(refusal(number, PunaError(f"the node has failed: {error}")))

        task.add_done_callback(ended)

    async def _refuse_if_retiring(self, number: int) -> bool:
        if self._service.is_retiring:
            await self.send(refusal(number, Overloaded("the node takes no more requests"), is_declined=True))
        return self._service.is_retiring

    async def _ask(self, ask: Ask) -> None:
        if ask.path == "/find":
            found = await asyncio.to_thread(missing, self._node.store.blobs, decode(list[File], ask.body))
            await self.send(Answer(id=ask.id, body=encode(found)))
            return
        if ask.path == "/occupancy":
            occupancy = await self._node.replicas.occupancy(decode(str, ask.body))
            await self.send(Answer(id=ask.id, body=encode(occupancy)))
            return
        if ask.model is None or ask.path not in _OF_RUNNERS:
            raise BadRequest(f"there is no {ask.path}")
        async with self._place(ask.hold, ask.model) as replica:
            if replica is None:
                await self._decline(ask.id, ask.model)
                return
            with replica.running(self.number) if ask.path in _WORK else nullcontext():
                await self.send(Answer(id=ask.id, body=encode(await _OF_RUNNERS[ask.path](replica, ask.body))))

    async def _hold(self, hold: Hold) -> None:
        if await self._refuse_if_retiring(hold.id):
            return
        async with self._node.place(hold.model) as replica:
            loaded = replica.loaded
            held = Held(n_ctx=loaded.n_ctx, n_parallel=loaded.options.n_parallel, reply=loaded.reply)
            self._held[hold.id] = replica
            try:
                await self.send(Answer(id=hold.id, body=encode(held)))
                await asyncio.get_running_loop().create_future()
            finally:
                del self._held[hold.id]

    @asynccontextmanager
    async def _place(self, hold: int, model: Model) -> AsyncGenerator[Replica | None, None]:
        """What a request is computed by that is held here, or elsewhere; None where it is to ask there. Nobody waits."""
        if (held := self._held.get(hold)) is not None:
            yield held
        elif self._service.is_retiring:
            yield None
        else:
            async with self._node.join(model) as replica:
                yield replica

    async def _decline(self, number: int, model: Model) -> None:
        await self.send(refusal(number, Overloaded(f"{model.name} is not loaded there any more"), is_declined=True))

    async def _complete(self, command: Complete) -> None:
        request, credit, text = command.request, self._credits[command.id], []
        async with self._place(command.hold, command.model) as replica:
            if replica is None:
                await self._decline(command.id, command.model)
                return
            with replica.running(self.number):
                async with aclosing(replica.loaded.runner.complete(request)) as replies:
                    async for reply in replies:
                        if isinstance(reply, wire.Piece):
                            text.append(reply.content)
                            await credit.take(reply.weight)
                        elif isinstance(reply, wire.Done):
                            replica.answered(request, "".join(text), reply)
                        await self.send(Said(id=command.id, reply=reply))


class _Credit:
    """How much of an answer may be sent before the head has taken some of it."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._more = asyncio.Event()

    async def take(self, weight: int) -> None:
        while self._left <= 0:
            self._more.clear()
            await self._more.wait()
        self._left -= weight

    def give(self, weight: int) -> None:
        self._left += weight
        self._more.set()


async def _tokenize(replica: Replica, body: bytes) -> wire.Tokens:
    request = decode(wire.TokenizeRequest, body)
    runner = replica.loaded.runner
    return wire.Tokens(tokens=await runner.tokenize(request.content, add_special=request.add_special, markers=request.markers))


async def _detokenize(replica: Replica, body: bytes) -> wire.Text:
    return wire.Text(content=await replica.loaded.runner.detokenize(decode(wire.Tokens, body).tokens))


async def _images(replica: Replica, body: bytes) -> wire.ImagesReply:
    return wire.ImagesReply(n_tokens=await replica.loaded.runner.image_tokens(decode(wire.ImagesRequest, body)))


async def _embedding(replica: Replica, body: bytes) -> wire.EmbeddingReply:
    return await replica.loaded.runner.embed(decode(wire.EmbeddingRequest, body))


_WORK = ("/embedding",)  # what counts as a request

_OF_RUNNERS: dict[str, Callable[[Replica, bytes], Awaitable[wire.Message]]] = {
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/images": _images,
    "/embedding": _embedding,
}
