"""One model for a program without an event loop: ``with Engine("smollm2:135m") as engine``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Self, Unpack

from puna.local.answers import Answer, Chunk, Ranked
from puna.local.asynchronous import AsyncEngine
from puna.local.asynchronous import Stream as AsyncStream
from puna.local.loop import LoopThread
from puna.local.parameters import Chat, Generate, Messages


class Engine:
    """A model and the process that computes it. Any thread may use it, several at once: their requests are computed together.

    *model* is a name, which is pulled where it is not there, or the path of a GGUF file. The settings are those of the
    environment but for what is given here: *n_ctx* tokens that one conversation may have, *parallel* requests that are computed
    at once, *models* the folder of models. *progress* shows bars; by default on a terminal.

    The model is loaded when this returns. It is unloaded at the end of the block, by close, or when nobody has this any more.
    Keywords of requests are in ``help("puna.local.parameters")``.
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
        self._engine = AsyncEngine(model, n_ctx=n_ctx, parallel=parallel, models=models, progress=progress)
        self.model = self._engine.model
        self._loop = LoopThread()
        self._end = weakref.finalize(self, _close, self._loop, self._engine)
        self._end.atexit = False  # threads are over by then; the model's process ends with this one
        try:
            self._loop.run(self._engine.open())
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        return f"<Engine {self.model!r}{'' if self._end.alive else ', closed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Engine cannot be copied or sent to another process: open one there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The process has ended and its memory is free when this returns."""
        self._end()

    def generate(self, prompt: str, **given: Unpack[Generate]) -> Answer:
        """An answer to one prompt; keywords are those of Generate in puna.local.parameters.

        Errors: BadRequest for what the model cannot, or what cannot be; ContextOverflow; RunnerDied.
        """
        return self._loop.run(self._engine.generate(prompt, **given))

    def chat(self, messages: Messages, **given: Unpack[Chat]) -> Answer:
        """The next message of a conversation, which is a text or a list of messages; keywords are those of Chat.

        Errors: as generate.
        """
        return self._loop.run(self._engine.chat(messages, **given))

    def stream_generate(self, prompt: str, **given: Unpack[Generate]) -> Stream:
        """As generate, piece by piece: ``for chunk in engine.stream_generate(prompt)``."""
        return Stream(self._engine.stream_generate(prompt, **given), self._loop)

    def stream_chat(self, messages: Messages, **given: Unpack[Chat]) -> Stream:
        """As chat, piece by piece: ``for chunk in engine.stream_chat(messages)``."""
        return Stream(self._engine.stream_chat(messages, **given), self._loop)

    def generate_many(self, prompts: Iterable[str], **given: Unpack[Generate]) -> list[Answer]:
        """An answer to each prompt, in their order; as many are computed at once as go.

        Errors: as generate, of the first that fails, with its number in a note; the others are given up.
        """
        return self._loop.run(self._engine.generate_many(prompts, **given))

    def chat_many(self, conversations: Iterable[Messages], **given: Unpack[Chat]) -> list[Answer]:
        """As generate_many, for conversations."""
        return self._loop.run(self._engine.chat_many(conversations, **given))

    def embed(self, texts: str | Sequence[str], *, dimensions: int = 0, truncate: bool = True) -> list[list[float]]:
        """A vector of length 1 for each text.

        Errors: UnsupportedModel for a model that makes none; BadRequest for a text without a token.
        """
        return self._loop.run(self._engine.embed(texts, dimensions=dimensions, truncate=truncate))

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[float]:
        """How well each document answers the query, from 0 to 1, in their order.

        Errors: UnsupportedModel for a model that does not rank.
        """
        return self._loop.run(self._engine.score(query, documents, truncate=truncate))

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """The documents that answer the query best, the best first.

        Errors: as score.
        """
        return self._loop.run(self._engine.rerank(query, documents, top_n=top_n))


class Stream:
    """An answer piece by piece: ``for chunk in stream``. Who stops before its end closes it, which cancels the rest."""

    def __init__(self, stream: AsyncStream, loop: LoopThread) -> None:
        self._stream = stream
        self._chunks: Generator[Chunk, None, None] = loop.iterate(stream)

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def answer(self) -> Answer:
        """As of AsyncEngine's streams."""
        return self._stream.answer

    def close(self) -> None:
        self._chunks.close()


def _close(loop: LoopThread, engine: AsyncEngine) -> None:
    if loop.is_gone:
        return  # the model's process ends with the one that opened it
    if loop.is_here:  # where Python happened to collect an engine that nobody has
        threading.Thread(target=_close, args=(loop, engine), name="close", daemon=True).start()
        return
    try:
        loop.run(engine.close())
    finally:
        loop.close()
