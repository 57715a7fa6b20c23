"""pip, in a process that ends with the one that wants it and takes its folder along: ``… pip_process FOLDER ARGUMENTS``.

Whoever is killed cannot tidy up behind itself; standard input, a pipe, ends with it.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys

from puna.guard import exit_with_parent


def main() -> None:
    folder = sys.argv.pop(1)

    def end() -> None:
        for _ in range(2):  # pip goes on meanwhile, and may put something there
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    exit_with_parent(on_end=end)
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
