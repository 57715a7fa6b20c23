"""Entries and slash commands of the interactive session, without a terminal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.api.fake_server import FakeServer

from puna.api.client import Client
from puna.cli.entry import Entry, read_entry
from puna.cli.line_editor import LineHistory
from puna.cli.session import Session
from puna.cli.slash_commands import LeaveSession, SlashCommands
from puna.errors import NotFound, PunaError


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["hello "], Entry("hello", False)),
        (["/set verbose"], Entry("/set verbose", True)),
        (['"""one', "two", 'three"""'], Entry("one\ntwo\nthree", False)),
        (['"""', "/bye", '"""'], Entry("/bye", False)),
        (['"""one line"""'], Entry("one line", False)),
        (['"""', "", "  indented", '"""  '], Entry("  indented", False)),
        (["/set system Be kind"], Entry("/set system Be kind", True)),
        (['/set system """Be', 'kind"""'], Entry("/set system Be\nkind", True)),
        (['say """ this'], Entry('say """ this', False)),
        (['""""quoted""""'], Entry('"quoted"', False)),
    ],
)
def test_entries(lines: list[str], entry: Entry) -> None:
    waiting = iter(lines)
    asked: list[bool] = []

    def read_line(more: bool) -> str:
        asked.append(more)
        return next(waiting)

    assert read_entry(read_line) == entry
    assert asked == [False] + [True] * (len(lines) - 1)
    assert next(waiting, None) is None


def test_an_image_at_the_beginning_is_no_command(tmp_path: Path) -> None:
    """As terminals write one that is dropped on them."""
    (tmp_path / "a cat.png").write_bytes(b"")
    for line in (f"{tmp_path}/a cat.png what is this?", f"{tmp_path}/a\\ cat.png".replace("\\\\", "\\")):
        assert read_entry(lambda _, line=line: line) == Entry(line, False)  # type: ignore[misc]
    missing = f"{tmp_path}/none.png what is this?"
    assert read_entry(lambda _: missing) == Entry(missing, True)
    command = f"/set system {tmp_path}/a cat.png"
    assert read_entry(lambda _: command) == Entry(command, True)


def test_system_messages() -> None:
    session = Session("m")
    session.set_system("one")
    session.set_system("two")
    assert session.messages == [{"role": "system", "content": "two"}]
    session.messages += [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    session.set_system("three")
    assert session.system == "three"
    assert len(session.messages) == 4
    session.clear()
    assert session.messages == [{"role": "system", "content": "three"}]


def test_requests_carry_only_what_is_set() -> None:
    session = Session("m")
    assert session.chat_request() == {"model": "m"}
    session = Session("m", options={"seed": 1}, format="json", think=False, keep_alive=0)
    session.messages.append({"role": "user", "content": "hi"})
    assert session.chat_request() == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"seed": 1},
        "format": "json",
        "think": False,
        "keep_alive": 0,
    }


class Talk:
    """A session with its commands and what they print."""

    def __init__(self, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
        self.session = Session("echo")
        self.history: list[bool] = []
        self._commands = SlashCommands(client, self.session, self.history.append)
        self._capsys = capsys

    def __call__(self, line: str) -> str:
        self._commands.run(line)
        return self._capsys.readouterr().out

    def errors_of(self, line: str) -> str:
        self._commands.run(line)
        return self._capsys.readouterr().err


@pytest.fixture
def talk(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> Iterator[Talk]:
    with Client(fake.address) as client:
        yield Talk(client, capsys)


@pytest.mark.parametrize(
    ("line", "said", "attribute", "value"),
    [
        ("/set verbose", "Set 'verbose' mode.\n", "verbose", True),
        ("/set quiet", "Set 'quiet' mode.\n", "verbose", False),
        ("/set wordwrap", "Set 'wordwrap' mode.\n", "word_wrap", True),
        ("/set nowordwrap", "Set 'nowordwrap' mode.\n", "word_wrap", False),
        ("/set format json", "Set format to 'json' mode.\n", "format", "json"),
        ("/set format", "Invalid or missing format. For 'json' mode use '/set format json'\n", "format", None),
        ("/set noformat", "Disabled format.\n", "format", None),
        ("/set nothink", "Set 'nothink' mode.\n", "think", False),
        ("/set system  Be kind ", "Set system message.\n", "system", "Be kind"),
        ("/set parameter seed 42", "Set parameter 'seed' to '42'\n", "options", {"seed": 42}),
        ("/set parameter top_p 0.5", "Set parameter 'top_p' to '0.5'\n", "options", {"top_p": 0.5}),
        ("/set parameter stop a b", "Set parameter 'stop' to 'a, b'\n", "options", {"stop": ["a", "b"]}),
        ('/set parameter stop "a: " "b', "Set parameter 'stop' to 'a: , \"b'\n", "options", {"stop": ["a: ", '"b']}),
        ("/set parameter seed x", 'Couldn\'t set parameter: "invalid int value [x]"\n', "options", {}),
        ("/set parameter colour red", "Couldn't set parameter: \"unknown parameter 'colour'\"\n", "options", {}),
        ("/clear", "Cleared session context\n", "messages", []),
        ("/nonsense x", "Unknown command '/nonsense'. Type /? for help\n", "options", {}),
        ("/set nonsense", "Unknown command '/set nonsense'. Type /? for help\n", "options", {}),
    ],
)
def test_commands_change_the_session(talk: Talk, line: str, said: str, attribute: str, value: object) -> None:
    assert talk(line) == said
    assert getattr(talk.session, attribute) == value


@pytest.mark.parametrize("line", ["/set parameter", "/set parameter stop"])
def test_a_parameter_without_a_value_is_answered_with_the_parameters(talk: Talk, line: str) -> None:
    assert "/set parameter temperature <float>" in talk(line)
    assert talk.session.options == {}


def test_think_is_for_models_that_can(talk: Talk) -> None:
    assert talk.errors_of("/set think") == 'warning: model "echo" does not support thinking output\n'
    assert talk.session.think is None
    talk.session.model = "thinker"
    assert talk("/set think") == "Set 'think' mode.\n"
    assert talk("/set think high") == "Set 'think' mode to 'high'.\n"
    assert talk.session.think == "high"


def test_history(talk: Talk) -> None:
    assert talk("/set nohistory") + talk("/set history") == ""
    assert talk.history == [False, True]


def test_show(talk: Talk) -> None:
    assert talk("/show info").startswith("  Model\n    architecture        llama\n")
    assert talk("/show license") == "First line\n\nSecond line\nThird line\n"
    assert talk("/show modelfile") == "FROM /somewhere\n\n"
    assert talk("/show template") == "{{ .Prompt }}\n"
    assert talk("/show system") == "Be kind.\n"
    talk("/set system Be brief.")
    assert talk("/show system") == "Be brief.\n"
    talk("/set parameter seed 7")
    assert talk("/show parameters") == (
        'Model defined parameters:\n  stop           "</s>"\n  temperature    0.5\n\nUser defined parameters:\n  seed    7\n\n'
    )
    assert "/show license" in talk("/show")


@pytest.mark.parametrize(
    ("topic", "text"), [("", "/set"), ("set", "/set wordwrap"), ("show", "/show license"), ("shortcuts", "Ctrl + g")]
)
def test_help(talk: Talk, topic: str, text: str) -> None:
    assert text in talk(f"/? {topic}")
    assert text in talk(f"/help {topic}")


def test_list(talk: Talk) -> None:
    assert talk("/list").startswith("NAME           ID")


def test_load(talk: Talk) -> None:
    talk.session.messages.append({"role": "user", "content": "hi"})
    assert talk("/load nobody") == "Loading model 'nobody'\nCouldn't find model 'nobody'\n"
    assert talk.session.model == "echo"
    assert talk("/load thinker") == "Loading model 'thinker'\n"
    assert (talk.session.model, talk.session.messages) == ("thinker", [])
    assert talk("/load") == "Usage:\n  /load <modelname>\n"


def test_load_takes_files_as_the_command_line_does(
    talk: Talk, fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to this process's folder, not the server's; with spaces; below the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my model.gguf").write_bytes(b"")
    for name in ("./my model.gguf", "~/my model.gguf", "my model.gguf"):
        talk.session.model = "echo"
        fake.reset()
        with suppress(PunaError):  # the fake server knows no files
            talk(f"/load {name}")
        assert fake.bodies("/api/generate")[0]["model"] == str(tmp_path / "my model.gguf")
    assert talk("/load my model") == "Usage:\n  /load <modelname>\n"
    with pytest.raises(NotFound, match="no such file"):
        talk("/load ./nobody.gguf")


def test_save(talk: Talk, fake: FakeServer) -> None:
    talk("/set system Be kind.")
    talk("/set parameter seed 7")
    talk.session.messages.append({"role": "user", "content": "hi"})
    assert talk("/save mine") == "Created new model 'mine'\n"
    assert fake.bodies("/api/create") == [
        {
            "model": "mine",
            "from": "echo",
            "system": "Be kind.",
            "parameters": {"seed": 7},
            "messages": [{"role": "user", "content": "hi"}],
        }
    ]
    assert talk("/save a?b") == "error: The model name 'a?b' is invalid\n"


def test_save_says_nothing_of_layers(talk: Talk) -> None:
    assert "layer" not in talk.errors_of("/save mine")


def test_save_of_a_file_makes_a_model_of_it(talk: Talk, fake: FakeServer, tmp_path: Path) -> None:
    content = b"GGUF and more"
    (tmp_path / "m.gguf").write_bytes(content)
    (tmp_path / "eyes.gguf").write_bytes(content)
    talk.session.model, talk.session.projector = str(tmp_path / "m.gguf"), str(tmp_path / "eyes.gguf")
    assert talk("/save mine") == "Created new model 'mine'\n"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert fake.bodies("/api/create") == [{"model": "mine", "files": {"m.gguf": digest, "eyes.gguf": digest}}]


@pytest.mark.parametrize("line", ["/bye", "/exit"])
def test_leaving(talk: Talk, line: str) -> None:
    with pytest.raises(LeaveSession):
        talk(line)


def test_history_is_one_entry_per_line_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history"
    history = LineHistory(path, enabled=True)
    for number in range(120):
        history.append_string(f"entry {number}")
    history.append_string("two\nlines")
    lines = path.read_text().splitlines()
    assert lines == [f"entry {number}" for number in range(22, 120)] + ["two", "lines"]
    assert path.stat().st_mode & 0o077 == 0
    assert list(LineHistory(path, enabled=True).load_history_strings()) == lines[::-1]


def test_no_history(tmp_path: Path) -> None:
    history = LineHistory(tmp_path / "history", enabled=False)
    history.append_string("secret")
    assert not (tmp_path / "history").exists()
    assert list(history.load_history_strings()) == []


def test_a_history_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    LineHistory(tmp_path / "file" / "history", enabled=True).append_string("x")
