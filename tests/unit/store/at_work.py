"""Processes that change one store at once, some of which are killed: run as ``python -m tests.unit.store.at_work``.

The parent imports everything, then forks: so a process costs milliseconds, and is a process nevertheless. What is chosen
follows from the seed; when the system switches between the processes does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx  # noqa: F401 - with what it needs, before the processes part
import pytest

from puna.errors import NotFound
from puna.store.creating.create import create
from puna.store.disk.partial import PARTIAL
from puna.store.names import Name
from puna.store.progress import Progress, silent
from puna.store.recipe import Recipe
from puna.store.sources.packages import pypi
from puna.store.sources.packages.pip import Wheel
from puna.store.sources.web import download
from puna.store.store import Store
from tests.patience import PATIENCE_S
from tests.registries import Registry
from tests.unit.store.faults import watching
from tests.unit.store.gguf_files import write_model

KEEPER = "keeper"
PACKAGE = "tiny-model"
REGISTRY = Registry(needs_token=False)


class CopyingPip:
    """Stands in for pip: the package index is a folder."""

    links = Path()

    def __init__(self, folder: Path, on_bytes: Callable[[int, int], None]) -> None:
        self._folder = folder
        self._on_bytes = on_bytes

    def resolve(self, wanted: Wheel) -> Wheel:
        found = max(self._wheels(wanted))
        return Wheel(wanted.package, found.name.split("-")[1], hashlib.sha256(found.read_bytes()).hexdigest())

    def download(self, wheel: Wheel) -> Path:
        (found,) = self._wheels(wheel)
        self._on_bytes(1, found.stat().st_size)
        return Path(shutil.copy(found, self._folder))

    def _wheels(self, wheel: Wheel) -> list[Path]:
        return list(self.links.glob(f"{wheel.package.replace('-', '_')}-{wheel.version or '*'}-*.whl"))


class Worker:
    """One process's work: names are its own, but for the keeper's; weights and texts are everybody's."""

    def __init__(self, folder: Path, number: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store(folder / "models")
        self.weights = sorted((folder / "weights").iterdir())
        self.number = number
        self.journal = folder / f"journal-{number}"

    def note(self, what: str, name: str) -> None:
        """Names stand in the journal before and after they are changed, so that a kill between leaves them open."""
        with self.journal.open("a") as file:
            file.write(f"{what} {name}\n")

    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            step = self.random.choice([self.bring, self.bring, self.derive, self.upload, self.copy, self.delete, self.delete])
            self.look()
            step(f"w{self.number}-{self.random.randrange(3)}")
            self.look()
            if self.random.random() < 0.2:
                Store(self.store.root).prune()
            if self.random.random() < 0.2:
                self.pull()

    def look(self) -> None:
        """The keeper is there at any time, whoever replaces it, and so is what nobody but this worker changes."""
        for name in (KEEPER, *(name for name, what in states(self.journal).items() if what == "is" and name != KEEPER)):
            model = self.store.get(name)
            assert model.manifest is not None
            if name != KEEPER:
                lacking = [layer for layer in model.manifest.blobs if self.store.blobs.n_bytes(layer.digest) != layer.size]
                assert not lacking, f"{name} is damaged: {lacking}"

    def pause(self, _: Progress) -> None:
        time.sleep(self.random.random() * 0.003)

    def text(self) -> str:
        return f"text {self.random.randrange(3)}"

    def changing(self, name: str, action: Callable[[], object], after: str = "is") -> None:
        self.note("open", name)
        action()
        self.note(after, name)

    def bring(self, name: str) -> None:
        def action() -> None:
            with self.store.work() as work:
                blob = self.store.blobs_of(work).import_file(self.random.choice(self.weights))
                self.pause(Progress(""))
                create(self.store, work, Name.parse(name), Recipe(files={"m.gguf": blob.digest}, system=self.text()), self.pause)

        self.changing(name, action)

    def derive(self, name: str) -> None:
        name = self.random.choice([name, KEEPER])
        recipe = Recipe(base=KEEPER, system=self.text(), licenses=(self.text(),) if self.random.random() < 0.2 else ())
        self.changing(name, lambda: self.store.create(name, recipe, self.pause))

    def upload(self, name: str) -> None:
        content = self.random.choice(self.weights).read_bytes()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self.store.expects(digest):
            with self.store.upload(len(content)) as writer:
                writer.write(content[:1000])
                self.pause(Progress(""))
                writer.write(content[1000:])
                writer.commit(digest)
        self.pause(Progress(""))
        recipe = Recipe(files={"m.gguf": digest}, system=self.text())
        self.changing(name, lambda: self.store.create(name, recipe, self.pause))

    def copy(self, name: str) -> None:
        self.changing(name, lambda: self.store.copy(KEEPER, name))

    def delete(self, name: str) -> None:
        def action() -> None:
            try:
                self.store.delete(name)
            except NotFound:
                return

        self.changing(name, action, "gone")

    def pull(self) -> None:
        if self.random.random() < 0.5:
            self.store.pull(f"pypi:{PACKAGE}=={self.random.choice([1, 2])}.0", self.pause)
        else:
            self.store.pull(f"{REGISTRY.netloc}/library/m:{self.random.choice([1, 2])}", self.pause, insecure=True)


def states(journal: Path) -> dict[str, str]:
    """What a worker was told last of each name that it changed: it is there, it is gone, or nothing yet."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return {name: what for what, name in (line.split() for line in lines)}


def age(folder: Path, hours: int = 2) -> None:
    """Make everything look old: what is at work is told from locks, not from clocks."""
    then = time.time() - hours * 3600
    for parent, folders, files in os.walk(folder):  # which passes over what has just gone
        for name in (*folders, *files) if os.path.basename(parent) in ("blobs", "tmp") else ():
            with suppress(FileNotFoundError):
                os.utime(os.path.join(parent, name), (then, then), follow_symlinks=False)


def forked(action: Callable[[], object]) -> int:
    """Run in a process of its own; returns its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        action()
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, seed: int, n_workers: int, n_steps: int, n_kills: int) -> list[str]:
    """Run workers, kill some, and return what went wrong."""
    rng = random.Random(seed)
    problems: list[str] = []
    running = {forked(lambda i=i: Worker(folder, i, seed * 1000 + i).run(n_steps)): i for i in range(n_workers)}  # type: ignore[misc]
    deadline = time.monotonic() + PATIENCE_S
    while running:
        age(folder / "models")
        if n_kills and rng.random() < 0.3:
            n_kills -= 1
            victim = rng.choice(sorted(running))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            number = running.pop(victim)
            running[forked(lambda i=number: Worker(folder, i, rng.randrange(1 << 30)).run(n_steps))] = number  # type: ignore[misc]
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                number = running.pop(child)
                problems += [f"worker {number} failed"] if status else []
        if time.monotonic() > deadline:
            for child in running:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            problems.append(f"workers {sorted(running.values())} never ended")
            break
        time.sleep(rng.random() * 0.05)
    return problems


def interleavings(folder: Path, first: int, n: int) -> list[str]:
    """So many short runs, each in a copy of the store, with what went wrong in each and the seed that it followed from."""
    problems: list[str] = []
    for seed in range(first, first + n):
        copy = folder / f"seed-{seed}"
        shutil.copytree(folder / "models", copy / "models", symlinks=True)
        (copy / "weights").symlink_to(folder / "weights")
        found = main(copy, seed, n_workers=4, n_steps=5, n_kills=6) + after_a_run(copy)
        problems += [f"seed {seed}: {problem}" for problem in found]
        shutil.rmtree(copy)
    return problems


def after_a_run(folder: Path) -> list[str]:
    """What is wrong when all are done: with what was acknowledged, and with what a prune leaves."""
    root = folder / "models"
    problems = damage(root)
    told: dict[str, str] = {}
    for journal in folder.glob("journal-*"):
        told |= states(journal)
    there = {model.name.removesuffix(":latest") for model in Store(root).list()}
    problems += [f"{name} was acknowledged and is not there" for name, what in told.items() if what == "is" and name not in there]
    problems += [f"{name} was deleted and is there" for name, what in told.items() if what == "gone" and name in there]
    age(root, 48)
    Store(root).prune()
    return problems + damage(root) + orphans(root)


def pull_first(store: Store, folder: Path) -> None:
    store.pull(f"pypi:{PACKAGE}==1.0")


def pull_second(store: Store, folder: Path) -> None:
    store.pull(f"pypi:{PACKAGE}==2.0")


def pull_blobs(store: Store, folder: Path) -> None:
    store.pull(f"{REGISTRY.netloc}/library/m:1", insecure=True)


def pull_other_blobs(store: Store, folder: Path) -> None:
    store.pull(f"{REGISTRY.netloc}/library/m:2", insecure=True, name="chosen")


def bring(store: Store, folder: Path) -> None:
    with store.work() as work:
        blob = store.blobs_of(work).import_file(max((folder / "weights").iterdir()))
        create(store, work, Name.parse("new"), Recipe(files={"m.gguf": blob.digest}, system="new"), silent)


def upload(store: Store, folder: Path) -> None:
    content = max((folder / "weights").iterdir()).read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if not store.expects(digest):
        with store.upload() as writer:
            writer.write(content)
            writer.commit(digest)
    store.create("new", Recipe(files={"m.gguf": digest}))


def replace(store: Store, folder: Path) -> None:
    store.create(KEEPER, Recipe(base=KEEPER, system="replaced"))


def copy(store: Store, folder: Path) -> None:
    store.copy(KEEPER, "other")


def delete(store: Store, folder: Path) -> None:
    store.delete("other")


def prune(store: Store, folder: Path) -> None:
    store.prune()


STEPS = (pull_blobs, pull_other_blobs, bring, upload, replace, copy, pull_first, pull_second, delete, prune)
MAX_CHANGES = 200


def crash_everywhere(folder: Path) -> list[str]:
    """Do each step in a process that is killed before its first change, before its second, and so on."""
    problems: list[str] = []
    for step in STEPS:
        for index in range(MAX_CHANGES):
            root = folder / f"{step.__name__}-{index}"
            shutil.copytree(folder / "models", root, symlinks=True)
            status = os.waitpid(forked(lambda s=step, r=root, i=index: _dying(s, r, folder, i)), 0)[1]  # type: ignore[misc]
            problems += [f"{root.name}: {problem}" for problem in after_a_crash(root)]
            shutil.rmtree(root)
            if status == 0:
                break
            if not os.WIFSIGNALED(status):
                problems.append(f"{root.name}: failed")
        else:
            problems.append(f"{step.__name__} never ends")
        if index < 3:
            problems.append(f"{step.__name__} makes only {index} changes")
        step(Store(folder / "models"), folder)
    return problems


def _dying(step: Callable[[Store, Path], None], root: Path, folder: Path, index: int) -> None:
    n_left = index

    def on_change(*_: str) -> None:
        nonlocal n_left
        if n_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        n_left -= 1

    with watching(root, on_change):
        step(Store(root), folder)


def after_a_crash(root: Path) -> list[str]:
    """What is wrong when the next server starts, and when it starts an hour later."""
    problems = damage(root)
    Store(root).prune()
    problems += damage(root)
    problems += [f"{path.name} was left" for path in root.rglob("*") if is_unfinished(path) and not PARTIAL.match(path.name)]
    age(root, 48)  # what was fetched of a blob waits a day for the next try
    Store(root).prune()
    problems += damage(root) + orphans(root)
    return problems


def is_unfinished(path: Path) -> bool:
    name = path.name
    is_blob = name.startswith("sha256-")
    return (
        (is_blob and len(name) != 71) or name.startswith(".work-") or (name.startswith(".") and name != ".lock") or name == "tmp"
    )


def damage(root: Path) -> list[str]:
    """Models that lack a blob, or whose blobs are not what their names say."""
    store = Store(root)
    found, problems = store.manifests.all()
    texts = [str(problem) for problem in problems]
    for item in found:
        for layer in item.manifest.blobs:
            path = store.blobs.path(layer.digest)
            if not path.is_file():
                texts.append(f"{item.name.display} lacks {layer.kind} {layer.digest}")
            elif f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}" != layer.digest:
                texts.append(f"{item.name.display} has a damaged {layer.kind}")
    return texts


def orphans(root: Path) -> list[str]:
    """Blobs that no model uses, and unfinished files."""
    store = Store(root)
    unused = set(store.blobs) - store.manifests.used()
    return [f"{digest} is an orphan" for digest in unused] + [
        f"{path.name} was left" for path in root.rglob("*") if is_unfinished(path)
    ]


def serve_models(folder: Path) -> None:
    """Two models that share their weights with nobody, cut into several parts on their way."""
    there = Store(folder / "there")
    for seed in (1, 2):
        blob = there.blobs.import_file(write_model(folder / f"served-{seed}.gguf", seed=100 + seed))
        there.create(f"m:{seed}", Recipe(files={"m.gguf": blob.digest}, system=f"text {seed}"))
        REGISTRY.add(there, f"m:{seed}", f"library/m:{seed}")


if __name__ == "__main__":
    pytest.MonkeyPatch().setattr(pypi, "Pip", CopyingPip)
    pytest.MonkeyPatch().setattr(download, "MIN_PART_BYTES", 500)
    root = Path(sys.argv[1])
    CopyingPip.links = root / "links"
    serve_models(root)
    with REGISTRY.running():
        numbers = [int(text) for text in sys.argv[2:]]
        found = {0: crash_everywhere, 2: interleavings, 4: main}[len(numbers)](root, *numbers)  # type: ignore[operator]
        print(json.dumps(found))
