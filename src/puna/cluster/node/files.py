"""Where a node has the files of a model: in its own folder, where the head has them, or nowhere yet.

A file that a head delivers becomes a blob without a manifest: it goes as such blobs do, when a server or a node that starts finds
it unused. Nobody but a head that knows the key gets here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from puna.cluster.messages import File, Model
from puna.errors import BadRequest, NotFound, StoreError
from puna.llm.load import LoadRequirements
from puna.store.disk.blobs import CHUNK_BYTES, Blobs

STALL_S = 60.0  # without a byte of a file: the head's machine is gone


def find(blobs: Blobs, file: File) -> Path | None:
    """By digest in the node's own folder, else by its path: there it is the same file if it has the same length.

    Errors: BadRequest for a malformed digest; StoreError.
    """
    if file.digest and blobs.has(file.digest):
        return blobs.path(file.digest)
    path = Path(file.path)
    return path if is_same(path, file) else None


def is_same(path: Path, file: File) -> bool:
    """Whether the file of that path is the head's, as far as can be seen from its length: on a folder that they share."""
    try:
        return path.is_file() and path.stat().st_size == file.n_bytes
    except OSError:
        return False


def missing(blobs: Blobs, files: Sequence[File]) -> list[int]:
    """Their places in the list."""
    return [number for number, file in enumerate(files) if find(blobs, file) is None]


def located(blobs: Blobs, model: Model) -> tuple[Path, LoadRequirements]:
    """The weights, and the requirements with this machine's paths.

    Errors: NotFound naming the file.
    """
    paths: dict[str, Path] = {}
    for file in model.files:
        path = find(blobs, file)
        if path is None:
            raise NotFound(f"{file.path} is not on this node")
        paths[file.path] = path
    return paths[model.files[0].path], _with_paths(model.requirements, paths)


def _with_paths(requirements: LoadRequirements, paths: Mapping[str, Path]) -> LoadRequirements:
    options = requirements.options
    options = msgspec.structs.replace(
        options,
        adapters=[str(paths[path]) for path in options.adapters],
        projector=str(paths[options.projector]) if options.projector else "",
    )
    return LoadRequirements(options, requirements.explicit, requirements.num_gpu, requirements.main_gpu, requirements.n_ctx_most)


async def receive(blobs: Blobs, digest: str, n_bytes: int, reader: asyncio.StreamReader) -> None:
    """Make a blob of the bytes that come.

    Errors: BadRequest when they are not what the digest says, too few, or no longer come; DiskFull; StoreError.
    """
    blobs.path(digest)
    # No task, which the end of the loop would cancel as well.
    opening = asyncio.get_running_loop().run_in_executor(None, blobs.writer, n_bytes)
    try:
        writer = await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(StoreError), await opening:
            pass  # begun all the same, in its thread
        raise
    with writer:
        left = n_bytes
        while left:
            try:
                async with asyncio.timeout(STALL_S):
                    data = await reader.read(min(CHUNK_BYTES, left))
            except TimeoutError:
                data = b""
            if not data:
                raise BadRequest(f"{left} bytes of {digest} have not come")
            left -= len(data)
            await asyncio.to_thread(writer.write, data)
        await asyncio.to_thread(writer.commit, digest)
