from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from puna.runner.tasks.text import Emit, TextStream


def run(pieces: list[bytes], stop: list[str]) -> tuple[str, bool]:
    """Feed pieces until the stream stops; everything it gave, and whether it stopped."""
    stream = TextStream(stop)
    given_text = ""
    for piece in pieces:
        emit = stream.feed(piece)
        given_text += emit.text
        if emit.stopped:
            assert stream.finish() == ""
            return given_text, True
    return given_text + stream.finish(), stream.stopped


def naive(data: bytes, stop: list[str]) -> tuple[str, bool]:
    """The same from the whole text at once."""
    text = data.decode("utf-8", errors="replace")
    begins = [text.find(s) for s in stop if s and s in text]
    return (text[: min(begins)], True) if begins else (text, False)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in pairwise(edges)]


few_letters = st.text("ab\u00e9\u20ac\U0001f600", max_size=25)
stops = st.lists(st.text("ab\u00e9\u20ac\U0001f600", max_size=5), max_size=4)
places = st.lists(st.integers(0, 200), max_size=30)
broken = st.lists(
    st.sampled_from(
        [b"a", b"b", b"\xc3", b"\xa9", b"\xe2\x82\xac", b"\xe2\x82", b"\xff", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xc0\x80"]
    )
).map(b"".join)


@given(few_letters, stops, places)
@example("abcd", ["bc", "abce"], [1, 2, 3])
@example("aab", ["ab"], [1, 2])
@example("aaab", ["aab", "b"], [])
def test_any_cut_gives_what_the_whole_text_gives(text: str, stop: list[str], at: list[int]) -> None:
    data = text.encode()
    assert run(cut(data, at), stop) == naive(data, stop)


@given(st.one_of(broken, st.binary(max_size=30)), stops, places)
def test_any_cut_of_broken_bytes_gives_what_decoding_the_whole_gives(data: bytes, stop: list[str], at: list[int]) -> None:
    assert run(cut(data, at), stop) == naive(data, stop)


@given(st.text(max_size=40), stops, places)
def test_characters_are_never_broken(text: str, stop: list[str], at: list[int]) -> None:
    stream, position = TextStream(stop), 0
    for piece in cut(text.encode(), at):
        emitted = stream.feed(piece).text
        assert text.startswith(emitted, position)  # so there is no U+FFFD that was not in the text
        position += len(emitted)


@given(few_letters, stops, places)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stop: list[str], at: list[int]) -> None:
    stream, fed, given_text = TextStream(stop), b"", ""
    for piece in cut(text.encode(), at):
        fed += piece
        emit = stream.feed(piece)
        given_text += emit.text
        if emit.stopped:
            return
        whole = fed.decode("utf-8", errors="ignore")  # what is complete so far
        held = whole[len(given_text) :]
        assert not held or any(s.startswith(held) and s != held for s in stop) or any(s in held for s in stop)


@pytest.mark.parametrize(
    ("pieces", "stop", "emitted"),
    [
        (["hello", "world"], ["world"], [("hello", False), ("", True)]),
        (["hello", "wor"], ["or"], [("hell", False), ("ow", True)]),
        (["Hello", " there", "!"], ["!"], [("Hello", False), (" there", False), ("", True)]),
        (["Hello", " the", "re!"], ["there!"], [("Hello", False), (" ", False), ("", True)]),
        (["hello", " wor"], ["llo w"], [("he", False), ("", True)]),
        (["a<", "b"], ["</s>"], [("a", False), ("<b", False)]),
        (["x", "", "y"], [""], [("x", False), ("", False), ("y", False)]),
        (["END"], ["D", "END"], [("", True)]),
        (["abcd", "x"], ["bcd", "abcde"], [("", False), ("a", True)]),
        (["abcd", "e"], ["bcd", "abcde"], [("", False), ("", True)]),
        (["\n", "\n", "\n"], ["\n\n"], [("", False), ("", True), ("", True)]),
    ],
)
def test_what_each_piece_emits(pieces: list[str], stop: list[str], emitted: list[tuple[str, bool]]) -> None:
    stream = TextStream(stop)
    assert [stream.feed(piece.encode()) for piece in pieces] == [Emit(*e) for e in emitted]


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u20ac", "\U0001f600"])
def test_a_character_is_emitted_with_its_last_byte(character: str) -> None:
    stream = TextStream()
    data = character.encode()
    for i in range(len(data) - 1):
        assert stream.feed(data[i : i + 1]) == Emit("", False)
    assert stream.feed(data[-1:]) == Emit(character, False)
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("pieces", "emitted", "rest"),
    [
        ([b"a\xffb", b"c"], ["a\ufffdb", "c"], ""),
        ([b"\xe2\x82", b"(x"], ["", "\ufffd(x"], ""),
        ([b"\xf0\x9f", b"\x98"], ["", ""], "\ufffd"),
        ([b"\x80", b"ok"], ["\ufffd", "ok"], ""),
        ([b"\xc3", b"\xc3\xa9"], ["", "\ufffd\u00e9"], ""),
    ],
)
def test_a_bad_byte_costs_nothing_but_itself(pieces: list[bytes], emitted: list[str], rest: str) -> None:
    stream = TextStream()
    assert [stream.feed(piece).text for piece in pieces] == emitted
    assert stream.finish() == rest


@pytest.mark.parametrize(
    ("pieces", "stop", "rest", "stopped"),
    [
        ([b"a<|im"], ["<|im_end|>"], "<|im", False),
        ([b"abcd"], ["bcd", "abcde"], "a", True),
        ([b"x\xe2\x82"], ["\ufffd"], "", True),
        ([b"done"], ["other"], "", False),
    ],
)
def test_the_end_releases_what_was_held(pieces: list[bytes], stop: list[str], rest: str, stopped: bool) -> None:
    stream = TextStream(stop)
    for piece in pieces:
        stream.feed(piece)
    assert stream.finish() == rest
    assert stream.stopped is stopped
    assert stream.finish() == ""


def test_a_long_repetitive_stop_costs_linear_time() -> None:
    stop = "a" * 50_000 + "b"
    stream = TextStream([stop])
    assert "".join(stream.feed(b"a" * 10_000).text for _ in range(20)) == "a" * 150_000
    assert stream.feed(b"b") == Emit("", True)


@pytest.mark.parametrize(
    ("stops", "pieces", "matched"),
    [
        (["END"], ["a E", "ND b"], "END"),
        (["END", "a"], ["xEN", "Da"], "END"),
        (["ENDING", "END"], ["ENDING"], "END"),  # what a longer one would have been is not known when the shorter is there
        (["ENDING", "END"], [*"ENDING"], "END"),
        (["bc", "abcd"], ["ab", "cx"], "bc"),
        (["bc", "abcd"], ["ab", "cd"], "abcd"),
        (["END"], ["EN"], ""),
    ],
)
def test_it_is_known_which_stop_sequence_ended_the_text(stops: list[str], pieces: list[str], matched: str) -> None:
    stream = TextStream(stops)
    for piece in pieces:
        stream.feed(piece.encode())
    stream.finish()
    assert stream.stop_sequence == matched
