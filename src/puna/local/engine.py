"""One model for a program without an event loop: ``with Engine("smollm2:135m") as engine``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Self, Unpack

from puna.local.answers import Answer, Chunk, Ranked
from puna.local.asynchronous import AsyncEngine
from puna.local.asynchronous import Stream as AsyncStream
from puna.local.loop import LoopThread
from puna.local.parameters import Chat, Generate, Messages


class Engine:
    """As AsyncEngine, for any thread; several may use it at once, and their requests are computed together.

    The model is loaded when this returns. It is unloaded at the end of the block, by close, or when nobody has this any more.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The process has ended and its memory is free when this returns."""
        self._end()

    def generate(self, prompt: str, **given: Unpack[Generate]) -> Answer:
        """As AsyncEngine.generate."""
        return self._loop.run(self._engine.generate(prompt, **given))

    def chat(self, messages: Messages, **given: Unpack[Chat]) -> Answer:
        """As AsyncEngine.chat."""
        return self._loop.run(self._engine.chat(messages, **given))

    def stream_generate(self, prompt: str, **given: Unpack[Generate]) -> Stream:
        """As generate, piece by piece."""
        return Stream(self._engine.stream_generate(prompt, **given), self._loop)

    def stream_chat(self, messages: Messages, **given: Unpack[Chat]) -> Stream:
        """As chat, piece by piece."""
        return Stream(self._engine.stream_chat(messages, **given), self._loop)

    def generate_many(self, prompts: Sequence[str], **given: Unpack[Generate]) -> list[Answer]:
        """As AsyncEngine.generate_many."""
        return self._loop.run(self._engine.generate_many(prompts, **given))

    def chat_many(self, conversations: Sequence[Messages], **given: Unpack[Chat]) -> list[Answer]:
        """As generate_many, for conversations."""
        return self._loop.run(self._engine.chat_many(conversations, **given))

    def embed(self, texts: str | Sequence[str], *, dimensions: int = 0, truncate: bool = True) -> list[list[float]]:
        """As AsyncEngine.embed."""
        return self._loop.run(self._engine.embed(texts, dimensions=dimensions, truncate=truncate))

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = True) -> list[float]:
        """As AsyncEngine.score."""
        return self._loop.run(self._engine.score(query, documents, truncate=truncate))

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """As AsyncEngine.rerank."""
        return self._loop.run(self._engine.rerank(query, documents, top_n=top_n))


class Stream:
    """An answer piece by piece: ``for chunk in stream``. Who stops before its end closes it, which cancels the rest."""

    def __init__(self, stream: AsyncStream, loop: LoopThread) -> None:
        self._stream = stream
        self._chunks: Generator[Chunk, None, None] = loop.iterate(aiter(stream))

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    @property
    def answer(self) -> Answer:
        """All of it, once it has ended."""
        return self._stream.answer

    def close(self) -> None:
        self._chunks.close()


def _close(loop: LoopThread, engine: AsyncEngine) -> None:
    if loop.is_own_thread:
        threading.Thread(target=_close, args=(loop, engine), daemon=True).start()
        return
    try:
        loop.run(engine.close())
    finally:
        loop.close()
