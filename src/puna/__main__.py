"""Entry point of ``puna`` and ``python -m puna``.

Runners, the search for devices, the processes that render templates or read images, and the server of one command are dispatched
here, before the command line is imported: they need none of it and start faster without.
"""

from __future__ import annotations

import gc
import sys

# Nothing that is imported becomes garbage: looking for some after every 700 objects takes a tenth of the time to import.
_OBJECTS_PER_COLLECTION = 120_000


def main() -> None:
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    if len(sys.argv) > 1 and sys.argv[1] == "runner":
        from puna.runner.process.main import main as runner_main

        runner_main(sys.argv[2:])
    elif len(sys.argv) > 1 and sys.argv[1] == "discover":
        from puna.runner.process.discover import main as discover_main

        discover_main()
    elif len(sys.argv) > 1 and sys.argv[1] == "render":
        from puna.prompt.worker import main as render_main

        render_main()
    elif len(sys.argv) > 1 and sys.argv[1] == "private-server":
        from puna.server.process.private import main as server_main

        server_main(sys.argv[2:])
    elif len(sys.argv) > 1 and sys.argv[1] == "decode":
        from puna.vision.images.worker import main as decode_main

        decode_main()
    else:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command line takes it back when there is something to end
        from puna.cli.main import main as cli_main

        cli_main()


if __name__ == "__main__":
    main()
