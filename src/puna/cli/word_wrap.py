"""Word wrap for text that arrives in pieces.

Everything is shown at once; when the word being written turns out too long for the line, its beginning is taken back
and moved to the next line. Knows only of widths, not of what is written.
"""

from __future__ import annotations

from collections.abc import Callable

from puna.cli.terminal import char_width, text_width

_TAB = "        "


class WordWrap:
    """Turns pieces of text into what to write on a terminal that has so many *columns* now."""

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._width = 0
        self._column = 0
        self._word = ""  # what of the current word is on the screen

    def feed(self, text: str) -> str:
        self._width = max(self._columns() - 1, 1)  # the last column stays free: terminals differ in what happens after it
        if self._column > self._width:  # it has become narrower, and nobody knows where the word is now
            self._word = ""
        return "".join(map(self._place, text.replace("\t", _TAB)))

    def _place(self, char: str) -> str:
        if char == "\n":
            self._column, self._word = 0, ""
            return char
        if char == " ":
            return self._place_space()
        width = char_width(char)
        if self._column + width <= self._width:
            self._column += width
            self._word += char
            return char
        return self._break_before(char, width)

    def _place_space(self) -> str:
        self._word = ""
        if self._column >= self._width:
            self._column = 0
            return "\n"
        self._column += 1
        return " "

    def _break_before(self, char: str, width: int) -> str:
        word, word_width = self._word, text_width(self._word)
        if word_width >= self._column or width == 2 or word_width + width > self._width:  # no better place than here
            self._column, self._word = width, char
            return "\n" + char
        self._column, self._word = word_width + width, word + char
        take_back = f"\x1b[{word_width}D\x1b[K" if word_width else ""
        return f"{take_back}\n{word}{char}"
