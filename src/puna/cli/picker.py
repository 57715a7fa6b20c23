"""Have a person pick one of several lines: with the arrow keys, or by number on a terminal that cannot draw.

Knows nothing of what the lines mean.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from puna.cli.terminal import can_draw, printable

_SPARE_LINES = 3  # of the screen, for the title and what stands above
_MARK, _NO_MARK = "❯ ", "  "


def pick(title: str, labels: Sequence[str]) -> int | None:
    """The index of the label that was picked; None when the person wants none of them."""
    labels = [printable(label) for label in labels]
    try:
        return _by_keys(title, labels) if can_draw(sys.stdout) else _by_number(title, labels)
    except (KeyboardInterrupt, EOFError):
        print()
        return None


def _by_number(title: str, labels: Sequence[str]) -> int:
    print(title)
    for number, label in enumerate(labels, start=1):
        print(f"{number:3d}  {label}")
    while True:
        text = input("Number: ").strip()
        if text.isascii() and text.isdigit() and 1 <= int(text) <= len(labels):
            return int(text) - 1


def _by_keys(title: str, labels: Sequence[str]) -> int | None:
    from prompt_toolkit.application import Application
    from prompt_toolkit.data_structures import Point
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout import FormattedTextControl, HSplit, Layout, Window
    from prompt_toolkit.layout.dimension import Dimension

    at = 0
    keys = KeyBindings()

    def move(*names: str, by: int) -> None:
        def moved(event: KeyPressEvent) -> None:
            nonlocal at
            at = (at + by) % len(labels)

        for name in names:
            keys.add(name)(moved)

    def end(*names: str, picks: bool) -> None:
        for name in names:
            keys.add(name)(lambda event: event.app.exit(result=at if picks else None))

    move("up", "c-p", "k", by=-1)
    move("down", "c-n", "j", "tab", by=1)
    end("enter", picks=True)
    end("escape", "c-c", "c-d", "q", picks=False)

    def lines() -> StyleAndTextTuples:
        return [("bold" if i == at else "", f"{_MARK if i == at else _NO_MARK}{text}\n") for i, text in enumerate(labels)]

    control = FormattedTextControl(lines, focusable=True, show_cursor=False, get_cursor_position=lambda: Point(0, at))
    # as high as it has lines, but never higher than the screen: a list that is longer scrolls
    window = Window(control, height=lambda: Dimension(max=max(app.output.get_size().rows - _SPARE_LINES, 1)))
    head = Window(FormattedTextControl(title), height=1)
    app: Application[int | None] = Application(Layout(HSplit([head, window])), key_bindings=keys, erase_when_done=True)
    app.ttimeoutlen = 0.1  # how long Escape waits for what would make it another key
    return app.run()
