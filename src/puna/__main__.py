"""Entry point of ``puna`` and ``python -m puna``.

A runner is dispatched here, before the command line is imported: it needs none of it and starts faster without.
"""

from __future__ import annotations

import sys


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "runner":
        from puna.runner.main import main as runner_main

        runner_main(sys.argv[2:])
    else:
        from puna.cli.main import main as cli_main

        cli_main()


if __name__ == "__main__":
    main()
