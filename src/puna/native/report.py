"""What is known of the tensor library and of this machine: ``python -m puna.native.report [--json] [--facts]``.

The verdict of the self-test, and with --facts the processor and the memory, a build that is under way, and how the compiled
library compares with the prebuilt one where there are both. ``puna doctor`` shows it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from puna.errors import NativeLibraryError
from puna.native import build, cpu, pace, providers, selftest
from puna.native.kernels.library import in_words
from puna.native.providers import Provider, chosen


def report(*, with_facts: bool, cache_dir: Path | None = None, command: Sequence[str] = selftest.COMMAND) -> dict[str, Any]:
    """All that is known, as JSON; a library that does not work is part of it (``error``)."""
    answer: dict[str, Any] = {}
    if with_facts:
        answer |= {"cpu": cpu.facts().as_json(), "build": build.report()}
    try:
        provider = chosen()
        answer["library"] = {"kind": provider.kind, "package": provider.package, "folder": str(provider.folder)}
        answer["verdict"] = asdict(selftest.verdict(cache_dir, command))
        answer["products"] = in_words()
        if with_facts:
            answer["faster"] = _faster(provider)
    except NativeLibraryError as error:
        answer["error"] = str(error)
    return answer


def _faster(used: Provider) -> dict[str, float] | None:
    """How many times as fast as the prebuilt library the compiled one is; None where there are not both."""
    has_both = providers.prebuilt() and (providers.compiled() or providers.installed())
    return pace.compared("compiled", "prebuilt") if has_both and used.kind != "named" else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m puna.native.report", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--facts", action="store_true", help="add what is known of the processor and memory")
    arguments = parser.parse_args()
    answer = report(with_facts=arguments.facts)
    if arguments.json:
        print(json.dumps(answer))
    else:
        _print(answer)
    is_sound = "verdict" in answer and all(c["status"] != "broken" for c in answer["verdict"]["combinations"])
    return 0 if is_sound else 1


def _print(answer: dict[str, Any]) -> None:
    for name, value in answer.get("cpu", {}).items():
        print(f"{name}: {' '.join(value) if isinstance(value, (list, tuple)) else value}")
    if "error" in answer:
        print(f"error: {answer['error']}")
        return
    print(f"ggml {answer['verdict']['version']} in {answer['library']['folder']}")
    for item in answer["verdict"]["combinations"]:
        if item["status"] != "unsupported":
            print(f"{item['buffer_type']:14} {item['tensor_type']:8} {item['status']} {item['reason']}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
