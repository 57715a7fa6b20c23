"""The runner's process: ``puna runner --model FILE``, usable alone with curl.

Knows nothing of computing. It listens before it imports anything heavy: the port is announced as one line
``{"port": N}`` on standard output, and whoever connects earlier than the server runs waits in the socket's queue.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from puna import settings
from puna.runner.guard import exit_with_parent
from puna.runner.inbox import Inbox
from puna.runner.spare import NamedModel, prepare

if TYPE_CHECKING:
    from puna.runner.service import EngineService
    from puna.wire import LoadRequest

    MakeEngine = Callable[[Path], EngineService]

LEVELS = ("debug", "info", "warning", "error")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("puna runner", description="Serve one model file over HTTP.")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="FILE", help="the model, a GGUF file")
    model.add_argument("--spare", action="store_true", help="get ready for any model, to be named on standard input")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--log-level", choices=LEVELS, default="info")
    load = parser.add_argument_group("loading without a POST /load")
    load.add_argument("--load", action="store_true", help="load the model at once")
    load.add_argument("--n-ctx", type=int, help="tokens one sequence may hold")
    load.add_argument("--n-parallel", type=int, help="sequences computed at once")
    load.add_argument("--n-batch", type=int, help="tokens in one step at most")
    load.add_argument("--n-threads", type=int, help="threads (default: physical cores)")
    load.add_argument("--kv-cache-type", choices=("f16", "q8_0", "q4_0"))
    load.add_argument("--attic-bytes", type=int, help="memory for prefixes that lose their place in the cache (default: none)")
    load.add_argument("--token-gap-s", type=float, metavar="S", help="how long answers may wait for a token beside prompts")
    load.add_argument("--adapter", dest="adapters", action="append", metavar="FILE", help="a LoRA file; may be repeated")
    load.add_argument("--no-mmap", dest="use_mmap", action="store_false", default=None, help="read the file into memory")
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    listener.setblocking(False)
    return listener


def main(argv: Sequence[str] | None = None, make_engine: MakeEngine | None = None) -> None:
    """Run until SIGTERM, SIGINT or the end of the parent."""
    args = parse(argv)
    inbox, named = Inbox(), NamedModel()
    if not exit_with_parent(on_data=inbox.feed) and args.spare:
        sys.exit("puna runner: --spare needs a pipe or a socket as its standard input")
    signal.signal(signal.SIGTERM, _exit_at_once)
    try:
        listener = listen(args.host, args.port)
    except (OSError, OverflowError) as error:
        sys.exit(f"puna runner: cannot listen on {args.host}:{args.port}: {error}")
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    # What takes time to import comes after the port.
    from puna.runner.channel import Channel
    from puna.runner.outbox import Outbox, connection_to_parent
    from puna.runner.serve import StartingEngine, serve
    from puna.runner.tally import Tally

    make = make_engine or _make_engine

    def make_when_named() -> EngineService:
        if args.spare:
            prepare()
        return make(named.wait() if args.spare else args.model)

    tally = Tally()
    engine = StartingEngine(make_when_named, _load_request(args) if args.load else None)
    channel = Channel(engine, Outbox(connection_to_parent()), named, tally)
    inbox.follow(channel.handle)
    serve(engine, listener, tally, channel.close)


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Until there is an engine there is nothing to close."""
    os._exit(0)


def _load_request(args: argparse.Namespace) -> LoadRequest:
    from puna.wire import LoadOptions, LoadRequest

    names = ("n_ctx", "n_parallel", "n_batch", "n_threads", "kv_cache_type", "attic_bytes", "token_gap_s", "use_mmap", "adapters")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return LoadRequest(operation="commit", options=LoadOptions(**given))


def _make_engine(model_path: Path) -> EngineService:
    from puna.runner.engine import Engine

    return Engine(model_path, settings.load().new_engine)
