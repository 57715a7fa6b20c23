from __future__ import annotations

from tools import picture


def test_the_picture_is_as_the_code_is_now() -> None:
    """`make docs` draws it."""
    document = picture.DOCUMENT.read_text()
    assert picture.BEGIN in document
    assert document == picture.written(document)


def test_it_shows_every_package_and_what_imports_what() -> None:
    drawn = picture.picture()
    packages = {path.parent.name for path in (picture.ROOT / "src" / "puna").glob("*/__init__.py")}
    assert {name for name in packages if f"{name}[{name}/]" not in drawn} == set()
    assert "  nn --> kvcache" in drawn
    assert "  cli --> cluster" in drawn


def test_arrows_that_others_stand_for_are_left_out() -> None:
    assert picture.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
