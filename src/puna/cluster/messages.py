"""What a head and a node say to one another, over one TCP connection per pair: frames of msgpack, their lengths before them.

A head is a server that clients speak to; a node holds models. The first frame shows the key that both got through Ray; until
then a node reads next to nothing. Ask, Complete and Hold are answered under their numbers: Ask by Answer or Refused; Complete
by Said, the last of which carries Done or Failed, or by Refused; Hold by Answer, and the model stays until Cancel. Reports
come unasked, and so does Alive, from the head: an end that hears nothing for LOST_AFTER_S takes the other for lost. An Ask or a
Complete names the Hold of the same line that keeps its model loaded. One without, whose request is held at another node, is
served by a model that is loaded as it is, or declined: it waits for nobody, so no two nodes wait for one another. What is asked
of a runner is what `puna.wire` says, by the same paths; beside these a node knows

=======  ==========  ============================================
/find    list[File]  list[int]: which of them it has not got
=======  ==========  ============================================

and tells ``/occupancy`` of the model whose key it is sent.

Nothing here is encrypted, as nothing of Ray's is: the network between machines must be one that others do not reach.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec

from puna import errors, wire
from puna.errors import BadRequest, PunaError
from puna.llm.load import LoadRequirements

M = TypeVar("M")

LOST_AFTER_S = 15.0  # without a byte from the other end, whose machine may have lost its power: nobody says so then
ALIVE_S = 3.0
MAX_FRAME_BYTES = 1 << 30
MAX_GREETING_BYTES = 1 << 12
WINDOW = 1 << 16  # characters of one answer that may be on their way to a head which has not taken them
_LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class File(Message, frozen=True):
    path: str  # where the head has it
    n_bytes: int
    digest: str = ""  # sha256:…, if it is a blob

    @property
    def key(self) -> str:
        return self.digest or self.path


class Model(Message, frozen=True):
    """A model, and what a request wants it to be loaded with. Paths in the requirements are those of *files*."""

    key: str  # equal for the same weights, whichever head says it
    name: str
    files: list[File]  # the weights first
    requirements: LoadRequirements
    digest: str = ""  # of its manifest; empty for a bare file
    keep_alive: float | None = None
    leaves_pinned: bool = False


class Open(Message, frozen=True, tag="open"):
    key: str
    head: str
    version: str


class Deliver(Message, frozen=True, tag="deliver"):
    """In place of Open: so many bytes of a file follow, and then one Answer or Refused comes back."""

    key: str
    digest: str
    n_bytes: int


class Ask(Message, frozen=True, tag="ask"):
    id: int
    path: str
    body: bytes
    model: Model | None = None
    hold: int = 0


class Hold(Message, frozen=True, tag="hold"):
    """The model is loaded if need be, and stays until this is cancelled."""

    id: int
    model: Model


class Complete(Message, frozen=True, tag="complete"):
    id: int
    model: Model
    request: wire.CompletionRequest
    hold: int = 0


class Cancel(Message, frozen=True, tag="cancel"):
    id: int


class Taken(Message, frozen=True, tag="taken"):
    """The reader has taken pieces of so many characters: as many more may come."""

    id: int
    weight: int


class Unload(Message, frozen=True, tag="unload"):
    key: str


class Retire(Message, frozen=True, tag="retire"):
    """The node takes no more requests, and ends once it has none."""


class Alive(Message, frozen=True, tag="alive"):
    """The head is there, and so are its requests. TCP would not do to ask for that by itself: it does not while anything is
    unacknowledged, as reports are by a machine without power, and it answers for a process that hangs.
    """


Command = Alive | Ask | Hold | Complete | Cancel | Taken | Unload | Retire


class Held(Message, frozen=True):
    """The answer to Hold."""

    n_ctx: int
    n_parallel: int
    reply: wire.LoadReply | None


class ReplicaReport(Message, frozen=True):
    """A loaded model. Keys are packed (puna.cluster.routing.keys), and what has changed since the report before."""

    key: str
    name: str
    state: str
    digest: str = ""
    n_others: int = 0  # requests that it has of other heads
    n_parallel: int = 1
    n_ctx: int = 0
    seconds_left: float = 0.0
    is_pinned: bool = False
    reply: wire.LoadReply | None = None
    run: str = ""  # of its runner; whatever else ran there before or comes later has another
    health: wire.Health | None = None
    added: bytes = b""
    removed: bytes = b""


class Ended(Message, frozen=True):
    """A replica that is no more, and how its runner was last."""

    run: str
    key: str
    name: str
    digest: str
    health: wire.Health


class Report(Message, frozen=True, tag="report"):
    free: int  # bytes that models may still take
    total: int
    is_retiring: bool = False
    replicas: list[ReplicaReport] = []
    ended: list[Ended] = []  # since the report before


class Opened(Message, frozen=True, tag="opened"):
    node: str
    version: str


class Answer(Message, frozen=True, tag="answer"):
    id: int
    body: bytes


class Said(Message, frozen=True, tag="said"):
    id: int
    reply: wire.CompletionReply


class Refused(Message, frozen=True, tag="refused"):
    id: int
    kind: str  # the name of an error of puna.errors
    message: str
    is_declined: bool = False  # another node would do it


Reply = Opened | Report | Answer | Said | Refused

_commands: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Command)
_greetings: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Open | Deliver)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], body: bytes) -> M:
    """Errors: BadRequest."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error


def decode_command(body: bytes) -> Command:
    """Errors: BadRequest."""
    return _decoded(_commands, body)  # type: ignore[no-any-return]


def decode_greeting(body: bytes) -> Open | Deliver:
    """Errors: BadRequest."""
    return _decoded(_greetings, body)  # type: ignore[no-any-return]


def decode_reply(body: bytes) -> Reply:
    """Errors: BadRequest."""
    return _decoded(_replies, body)  # type: ignore[no-any-return]


def _decoded(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error


def frame(message: Message) -> bytes:
    body = encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_frame(reader: asyncio.StreamReader, most: int = MAX_FRAME_BYTES, silence_s: float | None = None) -> bytes:
    """Errors: ConnectionError when the other end is gone or says too much; TimeoutError when not a byte comes for *silence_s*."""
    n_bytes = int.from_bytes(await _exactly(reader, _LENGTH_BYTES, silence_s), "big")
    if n_bytes > most:
        raise ConnectionError(f"a message of {n_bytes} bytes is more than {most}")
    return await _exactly(reader, n_bytes, silence_s)


async def _exactly(reader: asyncio.StreamReader, n_bytes: int, silence_s: float | None) -> bytes:
    """Piece by piece: a long message over a slow line is no silence."""
    found = bytearray()
    while len(found) < n_bytes:
        async with asyncio.timeout(silence_s):
            data = await reader.read(n_bytes - len(found))
        if not data:
            raise ConnectionResetError("the connection was closed")
        found += data
    return bytes(found)


def refusal(number: int, error: PunaError, *, is_declined: bool = False) -> Refused:
    return Refused(id=number, kind=type(error).__name__, message=str(error), is_declined=is_declined)


def error_of(refused: Refused) -> PunaError:
    """What was raised on the other machine."""
    kind = getattr(errors, refused.kind, PunaError)
    if not (isinstance(kind, type) and issubclass(kind, PunaError)):
        kind = PunaError
    error = kind.__new__(kind)
    Exception.__init__(error, refused.message)  # some of them make their text of numbers, and the text is here already
    return error
