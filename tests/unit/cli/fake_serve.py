"""``puna`` with a server that is the tests' own: run as a script, it takes the place of ``python -m puna``.

FAKE_SERVE chooses what ``serve`` does: "die" ends before the first request, "die slowly" some time after it listens no
more, "hang" never listens to signals, "environment" ends with a word about that.
FAKE_PIDS names a file that gets the process id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.api.fake_server import FakeServer
from tests.unit.api.fake_server import serve as serve_fake

from puna.cli import private_server
from puna.cli.main import main
from puna.llm.early import Begun
from puna.server.process import private
from puna.settings import Settings


def serve(settings: Settings, listener: socket.socket, begun: Begun | None = None) -> None:
    pids = [os.getpid()]
    mode = os.environ.get("FAKE_SERVE", "")
    if mode == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)  # as a runner would be
    with Path(os.environ["FAKE_PIDS"]).open("a") as file:
        file.write("".join(f"{pid}\n" for pid in pids))
    if mode == "environment":
        sys.exit(f"PYTHONSAFEPATH={os.environ.get('PYTHONSAFEPATH')}")
    if mode == "die":
        print("the store is on fire", file=sys.stderr)
        sys.exit(3)
    if mode == "die slowly":
        listener.close()
        time.sleep(2)
        sys.exit("the store is on fire")
    time.sleep(0.3)  # requests wait meanwhile
    assert settings.host.port == listener.getsockname()[1]
    serve_fake(FakeServer(), listener)
    while mode == "hang":
        time.sleep(1)


private.serve = serve
vars(private)["begin"] = lambda: None  # nobody would talk to it
private._GRACE_S = 1.0
private_server.SERVE_COMMAND = (sys.executable, __file__, "private-server")
if sys.argv[1] == "private-server":
    private.main(sys.argv[2:])
else:
    main()
