"""What is done of images between two steps: a part of the one that the oldest request waits for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Protocol

from puna.runner.images.encoding import Encoder, Encoding
from puna.runner.images.image import Image
from puna.runner.images.in_sequence import looked_at_next, next_wanted, past
from puna.runner.images.kept import KeptImages
from puna.runner.images.storing import Storing
from puna.runner.scheduling.task import Task

log = logging.getLogger(__name__)

UNHURRIED_S = 0.25  # where nothing else can be computed; those who come or leave meanwhile wait for it
LEAST_PART = 0.25  # of the time between two tokens, however long the step took
_POLL_S = 0.05


class Aborting(Protocol):
    def abort(self) -> None: ...
    def clear_abort(self) -> None: ...


class ImageTurns:
    """Belongs to the engine's thread, but for abort."""

    def __init__(
        self, encoder: Encoder, kept: KeptImages, host: Aborting, target_s: float, storing: Storing | None = None
    ) -> None:
        """*target_s*: how long those who decode may wait for their next token; *storing*: for what is looked at."""
        self.encoding = Encoding(encoder)
        self.storing = storing
        self._kept = kept
        self._host = host
        self._target_s = target_s

    def seconds(self, running: Sequence[Task], step_s: float, *, is_idle: bool) -> float:
        """For the turn after a step that took so long. Who decodes waits no longer than for a step; who has only prompts
        computed, for as long again as that took.
        """
        if is_idle:
            return UNHURRIED_S
        is_read = any(task.n_generated and not task.is_paused for task in running)
        left = self._target_s - step_s if is_read else step_s
        return min(max(left, LEAST_PART * self._target_s), UNHURRIED_S)

    def turn(self, running: Sequence[Task], step_s: float, *, is_idle: bool) -> None:
        """Store or encode for so long; *is_idle*: nothing else can be computed until that is done. Never raises."""
        waiting = [task for task in sorted(running, key=_age) if not (task.is_done or task.is_cancelled)]
        wanted = {id(image): image for task in waiting if (image := next_wanted(task.images, task.n_computed, task.n_looked_at))}
        self._fail(waiting)
        seconds = self.seconds(running, step_s, is_idle=is_idle)
        if self._store(waiting, seconds):
            return
        images = [image for image in wanted.values() if image.problem is None]
        if not any(image is self.encoding.image and image.pieces is not None for image in images):
            self.encoding.drop()  # nobody waits for it any more, or nobody did for a moment, and it was not kept
            if not images:
                return
            if not self._begin(images, is_idle=is_idle):
                return
        if self._advance(seconds):
            self._kept.spare(image for task in waiting for image in past(task.images, task.n_computed, task.n_looked_at))
        self._fail(waiting)

    def _store(self, waiting: Sequence[Task], seconds: float) -> bool:
        """What cross attention keeps of an image that is encoded; False where nobody waits for that."""
        if self.storing is None:
            return False
        for task in waiting:
            images = looked_at_next(task.images, task.n_computed, task.n_looked_at)
            is_encoded = all(at.image.rows is not None for at in images)
            if not is_encoded or task.is_paused or task.is_done or self.storing.is_stored(task.slot, images):
                continue
            try:
                self.storing.advance(task.slot, images, seconds)
            except BaseException as error:
                log.exception("an image could not be stored")
                task.fail(error)
            return True
        return False

    def _begin(self, images: Sequence[Image], *, is_idle: bool) -> bool:
        """The first that is prepared; the first of all is prepared again meanwhile, so that later ones do not keep it waiting."""
        ready = next((image for image in images if image.pieces is not None), None)
        if ready is not images[0]:
            asked = self._kept.ask_for_pieces(images[0])
            if ready is None and is_idle:
                wait([asked], timeout=_POLL_S)
        if ready is not None:
            self.encoding.begin(ready)
        return ready is not None

    def _advance(self, seconds: float) -> bool:
        """Whether the image is encoded now."""
        image = self.encoding.image
        assert image is not None
        try:
            rows = self.encoding.advance(seconds)
        except BaseException as error:
            log.exception("an image could not be encoded")
            image.problem = error
            self.encoding.drop()
            return False
        finally:
            self._host.clear_abort()
        if rows is None:
            return False
        self._kept.encoded(image, rows)
        return True

    def _fail(self, waiting: Sequence[Task]) -> None:
        """Those whose images cannot be encoded."""
        for task in waiting:
            image = next_wanted(task.images, task.n_computed, task.n_looked_at)
            if image is not None and image.problem is not None and not task.is_done:
                task.fail(image.problem)

    def abort(self) -> None:
        """The part that is computed now is not worth finishing; any thread."""
        self._host.abort()


def _age(task: Task) -> tuple[bool, int]:
    """Who gave way goes on later than those who did not."""
    return task.is_paused, task.order
