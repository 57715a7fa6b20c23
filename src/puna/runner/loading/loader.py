"""The way of one model file into memory and out of it again: launched, loading, ready; or error, with the reason.

Asked for as operations: fit measures as often as somebody likes, alloc tries whether the memory is there, commit takes it, after
which the weights are read, and close gives it back. One thread at a time; the state may be looked at from any.
"""

from __future__ import annotations

from pathlib import Path

from puna.errors import BadRequest, OutOfMemory
from puna.runner.loading.load import Loaded, allocate, measure, read_weights
from puna.runner.loading.model_file import ModelFile
from puna.wire import Health, LoadOptions, LoadReply, LoadRequest

LAUNCHED = Health(status="launched")


class Loader:
    """``model`` is there from commit on, though its weights are not before the state is ready."""

    def __init__(self, path: Path, new_engine: bool | None = None) -> None:
        """*new_engine*: which engine must be used; None: whichever supports the file."""
        self.model: Loaded | None = None
        self.state = LAUNCHED  # its status, progress and error
        self._file = ModelFile(path)
        self._new_engine = new_engine

    @property
    def takes_requests(self) -> bool:
        """Also while weights are read: requests wait for them."""
        return self.state.status in ("ready", "loading")

    def load(self, request: LoadRequest) -> LoadReply:
        """Fit, alloc or commit. Memory that does not suffice is a reply, not an error.

        Errors: BadRequest when there is a model already; those of measure and allocate.
        """
        if self.model is not None:
            raise BadRequest("model already loaded")
        try:
            if request.operation == "fit":
                return self._fit(request.options)
            loaded, reply = self._allocate(request.options)
        except OutOfMemory as error:
            return LoadReply(success=False, error=str(error))
        if request.operation == "alloc":
            # The memory was there; commit takes it again. Between the two the layout may still change.
            loaded.close()
        else:
            self.model, self.state = loaded, Health(status="loading")
        return reply

    def _fit(self, options: LoadOptions) -> LoadReply:
        memory, choice = measure(self._file, options, self._new_engine)
        return LoadReply(success=True, memory=memory, engine=choice.engine, engine_reason=choice.reason)

    def _allocate(self, options: LoadOptions) -> tuple[Loaded, LoadReply]:
        loaded = allocate(self._file, options, self._new_engine)
        return loaded, LoadReply(
            success=True,
            memory=loaded.memory(),
            n_ctx=loaded.limits.n_ctx,
            engine=loaded.choice.engine,
            engine_reason=loaded.choice.reason,
        )

    def read_weights(self) -> None:
        """The last part of a commit, which takes long. Errors: whatever it is that keeps them from being read."""
        assert self.model is not None
        read_weights(self.model, self._advance)
        self.state = Health(status="ready", progress=1.0)

    def _advance(self, share: float) -> None:
        self.state = Health(status="loading", progress=share)

    def fail(self, error: BaseException) -> None:
        """The model is of no use any more; its memory is kept until close."""
        self.state = Health(status="error", error=str(error) or type(error).__name__)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()
        self._file.close()
        self.model, self.state = None, LAUNCHED
