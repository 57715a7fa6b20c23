"""A runner that is ready before anybody knows for which model.

It does all that takes time and is the same for every model, then waits until its parent names one. From there on it is a
runner like any other.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def prepare() -> None:
    """Import the engine, open the tensor library, and look at the self-test's verdict.

    What fails here fails again, and is told, when a model is loaded.
    """
    import puna.model.arch.llama  # brings what all architectures share; what is another's own is soon imported
    import puna.runner.engine  # noqa: F401
    from puna.errors import PunaError
    from puna.native.ggml import ggml
    from puna.native.llama import llama
    from puna.native.selftest import verdict

    try:
        ggml()
        llama()
        verdict()
    except PunaError as error:
        log.warning("no model will run: %s", error)
