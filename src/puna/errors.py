"""Every error Puna raises on purpose.

PunaError
├── BadRequest             the caller sent something that cannot work; the message says what
│   ├── ContextOverflow    the prompt does not fit the context and may not be truncated
│   ├── InvalidName        a model name outside the grammar
│   └── TemplateError      a prompt template is malformed, fails on these messages, or does too much
├── Forbidden              the caller's API key is not good for this
├── NotFound               a model, blob or file that is not there
├── FileFormatError        a GGUF file, manifest or Modelfile is malformed; the message names key or tensor and offset
│   └── MissingTensors     the file lacks tensors its architecture needs
├── UnsupportedModel       the file is sound, but no engine here runs it
├── LoadError              a model could not be loaded
│   ├── OutOfMemory        it did not fit; carries what was asked for
│   └── WorkerUnreachable  an RPC worker cannot be reached, or speaks another version
├── RunnerDied             the runner's process ended or broke its stream
│   ├── NodeLost           the machine of a cluster that computed it is gone, or cannot be reached
│   └── WorkerLost         … since an RPC worker that held some of its layers did
├── Overloaded             the queue is full; try again
├── StoreError             the folder of models cannot be read, written or locked
│   └── DiskFull           … for lack of space; carries how many bytes are missing
├── SourceError            a registry, package index or hub answered with a failure
├── ServerUnreachable      the command line found no server, or lost it in the middle of a reply
└── NativeLibraryError     the tensor library is missing, of an untested version, or broken on this CPU

Each message is written for the person who sees it in the terminal or in an HTTP answer.
"""

from __future__ import annotations

from typing import Any


class PunaError(Exception):
    """Root of the tree; ``str(error)`` is fit to be shown to a user."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own way calls __init__ with the message, which is not what every kind of error is made of.
        return _as_it_was, (type(self), self.args, self.__dict__)


def _as_it_was(kind: type[PunaError], args: tuple[Any, ...], state: dict[str, Any]) -> PunaError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class BadRequest(PunaError):
    pass


class ContextOverflow(BadRequest):
    def __init__(self, n_tokens: int, n_ctx: int) -> None:
        super().__init__(f"the input length exceeds the context length ({n_tokens} tokens, context {n_ctx})")
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class InvalidName(BadRequest):
    pass


class TemplateError(BadRequest):
    pass


class Forbidden(PunaError):
    pass


class NotFound(PunaError):
    pass


class FileFormatError(PunaError):
    pass


class MissingTensors(FileFormatError):
    def __init__(self, names: list[str]) -> None:
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        super().__init__(f"{len(names)} tensor{'s' if len(names) > 1 else ''} missing from the file: {shown}")
        self.names = names


class UnsupportedModel(PunaError):
    pass


class LoadError(PunaError):
    pass


class OutOfMemory(LoadError):
    pass


class WorkerUnreachable(LoadError):
    pass


class RunnerDied(PunaError):
    pass


class NodeLost(RunnerDied):
    pass


class WorkerLost(RunnerDied):
    pass


class Overloaded(PunaError):
    pass


class StoreError(PunaError):
    pass


class DiskFull(StoreError):
    def __init__(self, message: str, n_missing: int) -> None:
        super().__init__(message)
        self.n_missing = n_missing


class SourceError(PunaError):
    pass


class ServerUnreachable(PunaError):
    pass


class NativeLibraryError(PunaError):
    pass
