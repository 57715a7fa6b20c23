"""One model for a program with an event loop: ``async with AsyncEngine("smollm2:135m") as engine``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack
from weakref import WeakSet

from starlette.exceptions import HTTPException

from puna import wire
from puna.api.generate import ChatRequest, GenerateRequest
from puna.errors import BadRequest, NotFound, PunaError, UnsupportedModel
from puna.llm.launch import for_one_model
from puna.local.answers import Answer, Chunk, Ranked, answer_of, chunk_of
from puna.local.batch import in_order
from puna.local.parameters import Chat, Generate, Messages, chat_request, embedding_inputs, generate_request, listed
from puna.local.progress import pull_progress
from puna.server.answering.embedding import Embedded
from puna.server.apis.collecting import AnswerBuilder, collect
from puna.server.apis.ranking import best_first, probabilities
from puna.server.checking.models import open_model
from puna.server.checking.request import EmbeddingRequest, InferenceRequest
from puna.server.http.caller import Caller
from puna.server.http.request_id import new_id
from puna.server.pipeline import Pipeline
from puna.server.running import at_work, pipeline_of, scheduler_of, store_of
from puna.settings import FOREVER, load
from puna.store.sources.reference import is_reference

_KEEPS = -1  # for ever, as the API says it


class AsyncEngine:
    """A model and the process that computes it, owned by this object.

    *model* is a name, which is pulled where it is not there, or the path of a GGUF file. The settings are those of the
    environment but for what is given here: *n_ctx* tokens that one conversation may have, *parallel* requests that are computed
    at once, *models* the folder of models. *progress* shows bars; by default on a terminal.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        n_ctx: int | None = None,
        parallel: int | None = None,
        models: str | Path | None = None,
        progress: bool | None = None,
    ) -> None:
        given = {
            "context_length": _count("n_ctx", n_ctx),
            "num_parallel": _count("parallel", parallel),
            "models": Path(models).expanduser() if models else None,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        # A queue that is full protects a server from strangers; a program only waits for what it has asked itself.
        self._settings = replace(load(), keep_alive=FOREVER, max_queue=sys.maxsize, **changes)
        self.model = _reference(model)
        self._shows_progress = sys.stderr is not None and sys.stderr.isatty() if progress is None else progress
        self._stack = AsyncExitStack()
        self._opened: Pipeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: WeakSet[Stream] = WeakSet()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model!r}{'' if self._opened else ', closed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an {type(self).__name__} cannot be copied or sent to another process: open one there")

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Pull the model if need be, and load it.

        Errors: what pulling and loading raise; PunaError where it is open.
        """
        if self._loop is not None:
            raise PunaError("the engine is open")
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        launcher = for_one_model(has_spare=settings.warm_spare)
        pipeline = pipeline_of(settings, store_of(settings), scheduler_of(settings, launcher), launcher)
        try:
            await self._stack.enter_async_context(at_work(pipeline, launcher))
            self._opened = pipeline
            await self._load(pipeline)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """The process has ended and its memory is free when this returns."""
        if self._loop is None:
            return
        self._check_loop()
        self._opened = None
        try:
            for stream in [*self._streams]:
                await stream.end()
            await self._stack.aclose()
        finally:
            self._loop = None

    async def generate(self, prompt: str, **given: Unpack[Generate]) -> Answer:
        """An answer to one prompt; see Generate for what may be given.

        Errors: BadRequest for what the model cannot, or what cannot be; ContextOverflow; RunnerDied.
        """
        return await self._answer(generate_request(self.model, prompt, given, _KEEPS))

    async def chat(self, messages: Messages, **given: Unpack[Chat]) -> Answer:
        """The next message of a conversation.

        Errors: as generate.
        """
        return await self._answer(chat_request(self.model, messages, given, _KEEPS))

    def stream_generate(self, prompt: str, **given: Unpack[Generate]) -> Stream:
        """As generate, piece by piece."""
        return self._stream(generate_request(self.model, prompt, given, _KEEPS))

    def stream_chat(self, messages: Messages, **given: Unpack[Chat]) -> Stream:
        """As chat, piece by piece."""
        return self._stream(chat_request(self.model, messages, given, _KEEPS))

    async def generate_many(self, prompts: Iterable[str], **given: Unpack[Generate]) -> list[Answer]:
        """An answer to each prompt, in their order; as many are computed at once as go.

        Errors: as generate, of the first that fails, with its number in a note; the others are given up.
        """

        async def one(prompt: str) -> Answer:
            return await self.generate(prompt, **given)

        return await in_order(one, listed(prompts, "prompts"), shows=self._shows_progress)

    async def chat_many(self, conversations: Iterable[Messages], **given: Unpack[Chat]) -> list[Answer]:
        """As generate_many, for conversations."""

        async def one(messages: Messages) -> Answer:
            return await self.chat(messages, **given)

        return await in_order(one, listed(conversations, "conversations"), shows=self._shows_progress)

    async def embed(self, texts: str | Sequence[str], *, dimensions: int = 0, truncate: bool = True) -> list[list[float]]:
        """A vector of length 1 for each text.

        Errors: UnsupportedModel for a model that makes none; BadRequest for a text without a token.
        """
        inputs = embedding_inputs([texts] if isinstance(texts, str) else texts, "texts")
        if not inputs:
            return []
        embedded = await self._embed(wire.EmbeddingRequest(inputs=inputs, dimensions=dimensions, truncate=truncate))
        return embedded.reply.embeddings

    async def score(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[float]:
        """How well each document answers the query, from 0 to 1, in their order.

        Errors: UnsupportedModel for a model that does not rank.
        """
        inputs = embedding_inputs(documents, "documents")
        if not isinstance(query, str):
            raise TypeError(f"a query is a text, not {type(query).__name__}")
        if not inputs:
            return []
        return probabilities((await self._embed(wire.EmbeddingRequest(inputs=inputs, query=query, truncate=truncate))).reply)

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """The documents that answer the query best, the best first.

        Errors: as score.
        """
        documents, top_n = listed(documents, "documents"), _count("top_n", top_n)
        scores = await self.score(query, documents)
        return [Ranked(index, scores[index], documents[index]) for index in best_first(scores, top_n)]

    @property
    def _pipeline(self) -> Pipeline:
        if self._opened is None:
            raise PunaError("the engine is closed: use it in a with block, or open it")
        self._check_loop()
        return self._opened

    def _check_loop(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            raise PunaError("an engine belongs to the event loop that opened it")

    async def _load(self, pipeline: Pipeline) -> None:
        try:
            model = await open_model(pipeline.store, _caller(), self.model)
        except NotFound:
            if self.model.startswith("/"):
                raise
            if _looks_like_a_file(self.model):
                raise NotFound(f"no such GGUF file, and no model of that name: {self.model}") from None
            with pull_progress(shows=self._shows_progress) as report:
                model = await asyncio.to_thread(pipeline.store.pull, self.model, report)
        if "completion" in model.capabilities:
            await pipeline.load(await pipeline.plan(_inference(generate_request(self.model, "", {}, _KEEPS))))
        else:
            await pipeline.embed(self._embedding(wire.EmbeddingRequest(inputs=[])))

    async def _answer(self, request: ChatRequest | GenerateRequest) -> Answer:
        pipeline = self._pipeline
        return answer_of(await collect(pipeline.answer(await pipeline.plan(_inference(request)))))

    def _stream(self, request: ChatRequest | GenerateRequest) -> Stream:
        builder = AnswerBuilder()
        stream = Stream(self._chunks(request, builder), builder)
        self._streams.add(stream)
        return stream

    async def _chunks(self, request: ChatRequest | GenerateRequest, builder: AnswerBuilder) -> AsyncGenerator[Chunk, None]:
        pipeline = self._pipeline
        async with aclosing(pipeline.answer(await pipeline.plan(_inference(request)))) as parts:
            async for part in parts:
                builder.add(part)
                chunk = chunk_of(part)
                if chunk is not None:
                    yield chunk

    async def _embed(self, texts: wire.EmbeddingRequest) -> Embedded:
        try:
            found = await self._pipeline.embed(self._embedding(texts))
        except HTTPException as error:
            raise UnsupportedModel(f"{self.model}: {error.detail}") from error
        assert found is not None, "there are inputs"
        return found

    def _embedding(self, texts: wire.EmbeddingRequest) -> EmbeddingRequest:
        return EmbeddingRequest(_caller(), self.model, texts, keep_alive=FOREVER)


class Stream:
    """An answer piece by piece: ``async for chunk in stream``. Who stops before its end closes it, which cancels the rest."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None], builder: AnswerBuilder) -> None:
        self._chunks, self._builder = chunks, builder
        self._has_lost_its_engine = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            if self._has_lost_its_engine:
                raise PunaError("the engine was closed before the answer had ended") from None
            raise

    @property
    def answer(self) -> Answer:
        """All of it, once it has ended.

        Errors: PunaError before that, and for what was closed early.
        """
        if not self._builder.has_ended:
            raise PunaError("the answer has not ended: it is whole when the stream was read to its end")
        return answer_of(self._builder.complete)

    async def aclose(self) -> None:
        await self._chunks.aclose()

    async def end(self) -> None:
        """The engine is closed: who reads on is told."""
        self._has_lost_its_engine = not self._builder.has_ended
        with suppress(RuntimeError):  # somebody waits for a chunk, and is told by what loses its process
            await self._chunks.aclose()


def _inference(request: ChatRequest | GenerateRequest) -> InferenceRequest:
    return InferenceRequest(_caller(), request)


def _caller() -> Caller:
    return Caller(is_local=True, may_manage=True, salt="", request_id=new_id(), began_ns=time.monotonic_ns())


def _reference(model: str | Path) -> str:
    """What names the model: the absolute path where it is a file.

    Errors: NotFound for what can only be a path, and no file is there.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return str(path.absolute())  # a link keeps its name: what it leads to need not end so
    if isinstance(model, Path) or model.startswith(("./", "../", "/", "~")):
        raise NotFound(f"no such GGUF file{'; the name of one ends in .gguf' if path.exists() else ''}: {model}")
    return model


def _looks_like_a_file(model: str) -> bool:
    """Rather than like a model in a registry: those that are called so are found with their host in front."""
    first, _, rest = model.partition("/")
    return model.lower().endswith(".gguf") and not (rest and "." in first) and not is_reference(model)


def _count(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if value is not None and value < 0:
        raise BadRequest(f"{name} must not be negative: {value}")
    return value
