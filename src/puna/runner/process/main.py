"""The runner's process. With ``--channel`` it belongs to a server, and only that can reach it: commands come from
standard input, a socket, replies go back over it, and nothing listens. ``puna runner --model FILE`` is for a person with
curl: it listens on a port of loopback, and answers those who bring the key that it prints.

Knows nothing of computing. It says that it is there before it imports anything heavy: with an empty line of replies, or
with ``{"port": N, "key": KEY}`` on standard output. What comes earlier than it can be understood waits.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from puna import settings
from puna.guard import exit_with_parent
from puna.runner.process.spare import prepare
from puna.runner.transport.inbox import Inbox
from puna.runner.transport.named_model import NamedModel

if TYPE_CHECKING:
    from puna.runner.service import EngineService
    from puna.wire import Discovery, LoadRequest

    MakeEngine = Callable[[Path], EngineService]

_HELLO = b"[]\n"
LEVELS = ("debug", "info", "warning", "error")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("puna runner", description="Serve one model file over HTTP.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="FILE", help="the model, a GGUF file")
    model.add_argument("--spare", action="store_true", help="get ready for any model; implies --channel, which names it")
    parser.add_argument("--channel", action="store_true", help="talk over standard input, a socket, and listen nowhere")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--log-level", choices=LEVELS, help="(default: info, or debug with OLLAMA_DEBUG)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a line of JSON for each step (docs/debugging.md)")
    load = parser.add_argument_group("loading without a POST /load")
    load.add_argument("--load", action="store_true", help="load the model at once")
    load.add_argument("--n-ctx", type=int, help="tokens one sequence may hold")
    load.add_argument("--n-parallel", type=int, help="sequences computed at once")
    load.add_argument("--n-batch", type=int, help="tokens in one step at most")
    load.add_argument("--n-threads", type=int, help="threads (default: physical cores)")
    load.add_argument("--kv-cache-type", choices=("f16", "q8_0", "q4_0"))
    load.add_argument(
        "--host-cache-bytes", type=int, help="memory for prefixes that lose their place in the cache (default: none)"
    )
    load.add_argument("--token-gap-s", type=float, metavar="S", help="how long answers may wait for a token beside prompts")
    load.add_argument("--adapter", dest="adapters", action="append", metavar="FILE", help="a LoRA file; may be repeated")
    load.add_argument("--projector", metavar="FILE", help="what the model sees with, where its own file does not hold it")
    load.add_argument("--image-cache-bytes", type=int, help="memory for images that are encoded (default: none)")
    load.add_argument("--no-mmap", dest="use_mmap", action="store_false", default=None, help="read the file into memory")
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    listener.setblocking(False)
    return listener


def connection_to_parent(fd: int = 0) -> socket.socket | None:
    """Standard input, if it is a socket: a pipe or a terminal has no way back."""
    try:
        return socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
    except OSError:
        return None


def main(argv: Sequence[str] | None = None, make_engine: MakeEngine | None = None) -> None:
    """Run until SIGTERM, SIGINT or the end of the parent, and end the process."""
    args = parse(argv)
    make = make_engine or partial(_make_engine, trace=args.trace)
    signal.signal(signal.SIGTERM, _exit_at_once)
    if args.channel or args.spare:
        _serve_parent(args, make)
    else:
        _serve_person(args, make)
    logging.shutdown()
    os._exit(0)  # threads may be in the middle of native code, and would be when the interpreter is taken down around them


def _serve_parent(args: argparse.Namespace, make: MakeEngine) -> None:
    connection = connection_to_parent()
    if connection is None:
        sys.exit("puna runner: --channel and --spare need a socket as standard input")
    inbox, named = Inbox(), NamedModel()
    exit_with_parent(on_data=inbox.feed)
    connection.sendall(_HELLO)
    _log_to_stderr(args)

    # What takes time to import comes after the greeting.
    from puna.runner.process.discover import discover
    from puna.runner.process.serve import serve_parent
    from puna.runner.process.starting import StartingEngine
    from puna.runner.transport.channel import Channel
    from puna.runner.transport.counters import Counters
    from puna.runner.transport.outbox import Outbox

    is_prepared = threading.Event()

    def make_when_named() -> EngineService:
        try:
            if args.spare:
                prepare()
        finally:
            is_prepared.set()
        return make(named.wait() if args.spare else args.model)

    def devices() -> Discovery:
        is_prepared.wait()  # the library is opened by one thread
        return discover()

    engine = StartingEngine(make_when_named, _load_request(args) if args.load else None)
    outbox = Outbox(connection)
    channel = Channel(engine, outbox, named, Counters(), devices)
    inbox.follow(channel.handle)
    serve_parent(engine, outbox, channel.close)


def _serve_person(args: argparse.Namespace, make: MakeEngine) -> None:
    exit_with_parent()
    try:
        listener = listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        sys.exit(f"puna runner: cannot listen on {args.host}:{args.port}: {error}")
    key = secrets.token_urlsafe(24)
    print(json.dumps({"port": listener.getsockname()[1], "key": key}), flush=True)
    _log_to_stderr(args)

    from puna.runner.process.http_server import serve
    from puna.runner.process.starting import StartingEngine

    serve(StartingEngine(lambda: make(args.model), _load_request(args) if args.load else None), listener, key)


def _log_to_stderr(args: argparse.Namespace) -> None:
    level = args.log_level or ("debug" if settings.load().debug else "info")
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Until there is an engine there is nothing to close."""
    os._exit(0)


def _load_request(args: argparse.Namespace) -> LoadRequest:
    from puna.wire import LoadOptions, LoadRequest

    names = (
        "n_ctx",
        "n_parallel",
        "n_batch",
        "n_threads",
        "kv_cache_type",
        "host_cache_bytes",
        "token_gap_s",
        "use_mmap",
        "adapters",
        "projector",
        "image_cache_bytes",
    )
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return LoadRequest(operation="commit", options=LoadOptions(models=str(settings.load().models), **given))


def _make_engine(model_path: Path, trace: Path | None) -> EngineService:
    from puna.runner.engine import Engine

    return Engine(model_path, settings.load().new_engine, trace)
