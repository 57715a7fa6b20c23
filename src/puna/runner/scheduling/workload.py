"""What a loaded model is asked for: completions, or vectors and scores. One interface, an implementation for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np
import numpy.typing as npt

from puna.errors import UnsupportedModel
from puna.runner.scheduling.admission import Room
from puna.runner.scheduling.task import Part, T, W
from puna.wire import CompletionReply, CompletionRequest, EmbeddingReply, EmbeddingRequest, Failed, ImagesRequest

Rows = npt.NDArray[np.float32]


class Workload(ABC, Generic[W, T]):
    """Makes requests of messages, says which may start, and takes what steps have computed of them."""

    streams: bool  # somebody reads what tasks write as they write it, so the steps between have a pace
    takes_whole_texts: bool  # all tokens of a task must be in one step

    @abstractmethod
    def complete(self, request: CompletionRequest, emit: Callable[[CompletionReply], None]) -> W:
        """Errors: BadRequest; UnsupportedModel where the model cannot do it."""

    @abstractmethod
    def embed(self, request: EmbeddingRequest, emit: Callable[[EmbeddingReply | Failed], None]) -> W:
        """Errors: BadRequest; UnsupportedModel where the model cannot do it."""

    def image_tokens(self, request: ImagesRequest) -> list[int]:
        """How many tokens each image takes in a prompt.

        Errors: BadRequest naming the image that is none; UnsupportedModel where the model sees nothing.
        """
        raise UnsupportedModel("images are not supported: the model has nothing to see with")

    @abstractmethod
    def prompts(self, waiting: Sequence[W]) -> list[list[int]]:
        """The tokens of those that wait which may have a prefix in common with those that run."""

    @abstractmethod
    def start_next(self, waiting: deque[W], running: Sequence[T], room: Room) -> T | None:
        """Whoever waits and may start now, taken from the queue."""

    @abstractmethod
    def accept(self, parts: Sequence[Part[T]], outputs: Sequence[Rows]) -> None:
        """Take a step's outputs: for each part the rows that its task asked for. May end tasks."""
