from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.ports import kept_free
from tests.unit.api.fake_server import PS, SHOWN, TAGS, FakeServer
from tests.unit.cli.conftest import Cli

from puna import __version__

# --- run ---------------------------------------------------------------------------------------------------------


def test_run_answers_a_prompt_plainly_into_a_pipe(puna: Cli) -> None:
    done = puna("run", "echo", "one", "two")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one two \n", "")


def test_piped_text_comes_before_the_prompt(puna: Cli, fake: FakeServer) -> None:
    puna("run", "echo", "what is", "this?", stdin="some text")
    assert fake.bodies("/api/generate")[-1]["prompt"] == "some text what is this?"


def test_bytes_that_are_no_text_do_not_stop_a_pipe(puna: Cli, fake: FakeServer) -> None:
    assert puna("run", "echo", stdin=b"caf\xe9").returncode == 0
    assert fake.bodies("/api/generate")[-1]["prompt"] == "caf\N{REPLACEMENT CHARACTER}"


def test_long_lines_are_not_wrapped_in_a_pipe(puna: Cli) -> None:
    assert puna("run", "wordy", "x").stdout == "word " * 60 + "\n"


def test_an_empty_prompt_only_loads(puna: Cli, fake: FakeServer) -> None:
    done = puna("run", "echo", "")
    assert (done.returncode, done.stdout) == (0, "")
    assert fake.bodies("/api/generate") == [{"model": "echo", "prompt": ""}]


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        (["--keepalive", "5m"], {"keep_alive": "5m"}),
        (["--keepalive", "-1m"], {"keep_alive": "-1m"}),
        (["--keepalive", "-1"], {"keep_alive": -1}),
        (["--format", "json"], {"format": "json"}),
        (["--format", '{"type": "object"}'], {"format": {"type": "object"}}),
        (["--think"], {"think": True}),
        (
            ["-o", "num_predict=64", "--option", "stop=a", "-o", "stop=b=c"],
            {"options": {"num_predict": 64, "stop": ["a", "b=c"]}},
        ),
        (["--think=false"], {"think": False}),
        (["--think=high"], {"think": "high"}),
    ],
)
def test_flags_become_fields(puna: Cli, fake: FakeServer, flags: list[str], sent: dict[str, object]) -> None:
    assert puna("run", *flags, "echo", "hi").returncode == 0
    assert fake.bodies("/api/generate") == [{"model": "echo", "prompt": "hi", **sent}]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-o", "num_predict=many"], "--option num_predict=many: invalid int value [many]"),
        (["-o", "colour=red"], "--option colour=red: unknown parameter 'colour'"),
        (["-o", "seed"], "--option seed: NAME=VALUE is wanted, as in num_predict=100"),
        (["--keepalive", "soon"], 'time: invalid duration "soon"'),
        (["--think=maybe"], 'invalid value for --think: "maybe" (must be true, false, high, medium, low, or max)'),
    ],
)
def test_bad_flags(puna: Cli, fake: FakeServer, flags: list[str], text: str) -> None:
    done = puna("run", *flags, "echo", "hi")
    assert (done.returncode, done.stderr) == (1, f"Error: {text}\n")
    assert not fake.requests


def test_thinking_stands_between_markers(puna: Cli) -> None:
    assert puna("run", "thinker", "hi").stdout == "Thinking...\nLet me think.\n...done thinking.\n\nhi \n"
    assert puna("run", "--hidethinking", "thinker", "hi").stdout == "hi \n"


def test_a_missing_model_is_pulled_first(puna: Cli, fake: FakeServer) -> None:
    done = puna("run", "newcomer", "hi")
    assert (done.returncode, done.stdout) == (0, "hi \n")
    assert done.stderr.splitlines() == [
        "pulling manifest",
        "pulling 0123456789ab: 0% (0 B of 1 KB)",
        "pulling 0123456789ab: 50% (500 B of 1 KB)",
        "pulling 0123456789ab: 100% (1 KB of 1 KB)",
        "success",
    ]
    assert [path for path, _ in fake.requests] == ["/api/generate", "/api/pull", "/api/generate"]


def test_no_model_means_the_starter(puna: Cli, fake: FakeServer) -> None:
    assert puna("run").returncode == 0
    assert fake.bodies("/api/pull") == [{"model": "smollm2:135m", "insecure": False}]
    assert puna("pull", "pypi:x", "--as", "mine").returncode == 0
    assert fake.bodies("/api/pull")[1:] == [{"model": "pypi:x", "insecure": False, "as": "mine"}]


def test_verbose_timings(puna: Cli) -> None:
    assert puna("run", "--verbose", "echo", "hi").stderr == (
        "total duration:       1.2s\n"
        "load duration:        95µs\n"
        "prompt eval count:    10 token(s)\n"
        "prompt eval duration: 500ms\n"
        "prompt eval rate:     20.00 tokens/s\n"
        "eval count:           20 token(s)\n"
        "eval duration:        400ms\n"
        "eval rate:            50.00 tokens/s\n"
    )


def test_embedding_models_print_a_vector(puna: Cli, fake: FakeServer) -> None:
    done = puna("run", "embedder", "some text", "--dimensions", "2", "--truncate")
    assert json.loads(done.stdout) == [0.6, 0.8]
    assert fake.bodies("/api/embed") == [{"model": "embedder", "input": "some text", "truncate": True, "dimensions": 2}]
    assert "embedding models require input text" in puna("run", "embedder", "").stderr


def test_a_file_is_named_by_its_absolute_path(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for text in ("./model.gguf", "model.gguf", "~/model.gguf", str(tmp_path / "model.gguf")):
        puna("run", text, "hi")
        assert fake.requests.pop() == ("/api/generate", {"model": str(tmp_path.resolve() / "model.gguf"), "prompt": "hi"})
    assert puna("run", "./absent.gguf", "hi").stderr == "Error: no such file: ./absent.gguf\n"
    assert not fake.requests


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&-"])
def test_what_its_starter_has_closed_does_not_disturb_a_command(
    fake: FakeServer, environment: dict[str, str], tmp_path: Path, closed: str
) -> None:
    for command in ("list", "show echo", "run echo hi", "rm echo"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$0" -m puna {command} {closed}', sys.executable],
            input=b"",
            capture_output=True,
            cwd=tmp_path,
            env={**environment, "OLLAMA_HOST": fake.address.url},
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_in_the_stream_ends_with_status_1(puna: Cli) -> None:
    done = puna("run", "broken", "so far")
    assert (done.returncode, done.stdout, done.stderr) == (1, "so far ", "Error: the model fell over\n")


def test_ctrl_c_ends_quietly_and_cancels(fake: FakeServer, environment: dict[str, str]) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "puna", "run", "endless", "go"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment, "OLLAMA_HOST": fake.address.url},
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert os.read(child.stdout.fileno(), 100)
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 130
        assert child.stderr.read() == b""
    assert fake.cancelled.wait(PATIENCE_S)


# --- list, ps, show ------------------------------------------------------------------------------------------------


def test_list_is_a_table(puna: Cli) -> None:
    lines = puna("list").stdout.splitlines()
    assert lines[0] == "NAME           ID              SIZE      MODIFIED"
    assert lines[1].startswith("echo:latest    abababababab    91 MB     ")
    assert lines[1].endswith((" ago", " from now"))
    assert lines[2].startswith("thinker:1b     cdcdcdcdcdcd    4.7 GB    ")
    assert puna("ls", "THINK").stdout.splitlines()[1].startswith("thinker:1b")


def test_ps_is_a_table(puna: Cli) -> None:
    assert puna("ps").stdout.splitlines() == [
        "NAME           ID              SIZE      PROCESSOR    CONTEXT    UNTIL",
        "echo:latest    abababababab    1.5 GB    100% CPU     4096       Forever",
    ]


def test_json_is_what_the_server_said(puna: Cli) -> None:
    assert json.loads(puna("list", "--json").stdout) == TAGS
    assert json.loads(puna("list", "--json", "nothing").stdout) == {"models": []}
    assert json.loads(puna("ps", "--json").stdout) == PS
    assert json.loads(puna("show", "--json", "echo").stdout)["details"] == SHOWN["details"]
    assert [json.loads(line)["status"] for line in puna("pull", "--json", "m").stdout.splitlines()][-1] == "success"


CARD = """\
  Model
    architecture        llama
    parameters          134.52M
    context length      8192
    embedding length    576
    quantization        Q4_1

  Capabilities
    completion

  Parameters
    stop           "</s>"
    temperature    0.5

  System
    Be kind.

  License
    First line
    Second line
    ...

"""


def test_show_has_sections(puna: Cli) -> None:
    assert puna("show", "echo").stdout == CARD


def test_show_verbose_adds_metadata_and_tensors(puna: Cli) -> None:
    text = puna("show", "-v", "echo").stdout
    assert '    tokenizer.ggml.tokens      ["a", "b", "c", ...+1 more]\n' in text
    assert "  Tensors\n    token_embd.weight    Q8_0    [576, 49152]\n" in text


@pytest.mark.parametrize("flag", ["license", "modelfile", "parameters", "template", "system"])
def test_show_one_thing(puna: Cli, flag: str) -> None:
    assert puna("show", "echo", f"--{flag}").stdout == SHOWN[flag] + "\n"


def test_show_takes_one_such_flag(puna: Cli) -> None:
    done = puna("show", "echo", "--license", "--system")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: only one of '--license', '--modelfile', '--parameters', '--system', or '--template'")


# --- pull, cp, rm, stop ---------------------------------------------------------------------------------------------


def test_push_shows_the_servers_progress(puna: Cli, fake: FakeServer) -> None:
    done = puna("push", "me/m", "--insecure")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == ["retrieving manifest", "pushing 0123456789ab: 100% (1 KB of 1 KB)", "success"]
    assert fake.bodies("/api/push") == [{"model": "me/m", "insecure": True}]
    assert [json.loads(line)["status"] for line in puna("push", "--json", "m").stdout.splitlines()][-1] == "success"
    done = puna("push", "nowhere")
    assert (done.returncode, done.stderr) == (1, "retrieving manifest\nError: unauthorized: access denied\n")


def test_signing_in_and_out(puna: Cli, fake: FakeServer) -> None:
    shown = puna("signin")
    assert shown.returncode == 0
    assert "https://example.com/connect?name=box&key=c3No" in shown.stdout
    assert puna("signout").stdout == "You are not signed in to ollama.com\n"
    fake.user = "ann"
    assert puna("signin").stdout == "You are already signed in as user 'ann'\n"
    assert puna("login").stdout == "You are already signed in as user 'ann'\n"
    assert puna("signout").stdout == "You have signed out of ollama.com\n"
    assert puna("logout").stdout == "You are not signed in to ollama.com\n"


def test_pull_fails_with_the_servers_words(puna: Cli) -> None:
    done = puna("pull", "nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "pulling manifest\nError: pull model manifest: file does not exist\n"


def test_cp(puna: Cli) -> None:
    assert puna("cp", "echo", "other").stdout == "copied 'echo' to 'other'\n"
    assert puna("cp", "nobody", "x").stderr == 'Error: model "nobody" not found\n'


def test_rm_unloads_deletes_and_stops_at_the_first_error(puna: Cli, fake: FakeServer) -> None:
    done = puna("rm", "echo", "nobody", "thinker")
    assert (done.returncode, done.stdout, done.stderr) == (1, "deleted 'echo'\n", "Error: model 'nobody' not found\n")
    assert fake.bodies("/api/generate")[0] == {"model": "echo", "keep_alive": 0}
    assert fake.bodies("/api/delete") == [{"model": "echo"}, {"model": "nobody"}]


def test_rm_warns_when_a_model_cannot_be_unloaded(puna: Cli) -> None:
    done = puna("rm", "embedder")
    assert (done.returncode, done.stderr) == (0, "Warning: unable to stop model 'embedder'\n")


def test_stop(puna: Cli, fake: FakeServer) -> None:
    assert puna("stop", "echo").returncode == 0
    assert fake.bodies("/api/generate") == [{"model": "echo", "keep_alive": 0}]
    assert puna("stop", "nobody").stderr == 'Error: couldn\'t find model "nobody" to stop\n'


# --- create ----------------------------------------------------------------------------------------------------------


def test_create_sends_files_and_instructions(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    folder = tmp_path / "recipe"
    folder.mkdir()
    weights = b"GGUF" + bytes(5000)
    (folder / "tiny.gguf").write_bytes(weights)
    (folder / "Modelfile").write_text(
        "FROM ./tiny.gguf\nPARAMETER temperature 0.5\nPARAMETER stop a\nPARAMETER stop b\nPARAMETER low_vram 1\n"
        'SYSTEM """Be\nkind."""\nMESSAGE user hi\nLICENSE MIT\n'
    )
    done = puna("create", "mine", "-f", "recipe/Modelfile", "-q", "q8_0")
    digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
    assert (done.returncode, done.stdout) == (0, "")
    assert "warning: parameter low_vram is deprecated" in done.stderr
    assert f"copying file {digest[7:19]}: 100%" in done.stderr
    assert done.stderr.endswith("writing manifest\nsuccess\n")
    assert fake.blobs == {digest: weights}
    assert fake.bodies("/api/create") == [
        {
            "model": "mine",
            "files": {"tiny.gguf": digest},
            "quantize": "q8_0",
            "parameters": {"temperature": 0.5, "stop": ["a", "b"]},
            "system": "Be\nkind.",
            "messages": [{"role": "user", "content": "hi"}],
            "license": ["MIT"],
        }
    ]
    assert "copying file" not in puna("create", "mine", "-f", "recipe/Modelfile").stderr


def test_create_from_one_of_several_parts_sends_them_all(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    for name in ("big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "other-00001-of-00002.gguf", "big.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + name.encode())
    assert puna("create", "mine", "-f", "-", stdin="FROM ./big-00001-of-00002.gguf\n").returncode == 0
    assert sorted(fake.bodies("/api/create")[0]["files"]) == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]


def test_create_from_a_model(puna: Cli, fake: FakeServer) -> None:
    assert puna("create", "mine", "-f", "-", stdin="FROM echo:1b\n").returncode == 0
    assert fake.bodies("/api/create") == [{"model": "mine", "from": "echo:1b"}]


def test_create_reads_a_modelfile_from_a_pipe(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    """As bash's ``-f <(...)`` names one; paths in it are relative to where the command runs."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    done = puna("create", "mine", "-f", "/dev/stdin", stdin="FROM ./m.gguf\n")
    assert (done.returncode, [*fake.bodies("/api/create")[0]["files"]]) == (0, ["m.gguf"])


@pytest.mark.parametrize("command", [("run", "./folder", "hi"), ("show", "./folder"), ("create", "mine", "-f", "./folder")])
def test_a_folder_in_place_of_a_file_is_named_as_one(puna: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "folder").mkdir()
    done = puna(*command)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ./folder is a folder: a Modelfile with FROM ./folder ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a/b/c/d/e"], "invalid model name: a/b/c/d/e"),
        (["mine", "-q", "q9"], "unsupported quantization type Q9 - "),
        (["mine", "--draft-quantize", "q9"], "unsupported quantization type Q9 - "),
    ],
)
def test_create_refuses_what_it_can_before_it_reads_files(
    puna: Cli, fake: FakeServer, tmp_path: Path, arguments: list[str], text: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "Modelfile").write_text("FROM ./m.gguf\n")
    done = puna("create", *arguments)
    assert (done.returncode, done.stderr[: len(text) + 7]) == (1, f"Error: {text}")
    assert not fake.requests


def test_create_without_a_modelfile_takes_the_folder(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    assert "no Modelfile or safetensors files found" in puna("create", "mine").stderr
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json", "stray.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    assert puna("create", "mine").returncode == 0
    assert sorted(fake.bodies("/api/create")[0]["files"]) == ["config.json", "model-1.safetensors", "model-2.safetensors"]


def test_create_sends_every_adapter_also_those_of_the_same_name(puna: Cli, fake: FakeServer, tmp_path: Path) -> None:
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "adapter_model.safetensors").write_bytes(folder.encode())
        (tmp_path / folder / "adapter_config.json").write_text(folder)
    (tmp_path / "lora.gguf").write_bytes(b"GGUF")
    modelfile = "FROM echo\nADAPTER ./one\nADAPTER ./lora.gguf\nADAPTER ./two\n"
    assert puna("create", "mine", "-f", "-", stdin=modelfile).returncode == 0
    files = [*fake.bodies("/api/create")[0]["adapters"]]
    pair = ["adapter_model.safetensors", "adapter_config.json"]
    assert files == [*pair, "2/lora.gguf", *(f"3/{name}" for name in pair)]


def test_create_follows_no_link_out_of_the_folder(puna: Cli, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "secret")
    done = puna("create", "mine", "-f", "-", stdin="FROM ./model\n")
    assert done.stderr.startswith("Error: insecure path: model.safetensors leads out of ")


@pytest.mark.parametrize(
    ("modelfile", "text"),
    [
        ("FROM ./absent.gguf\n", "no such file: "),
        ("SYSTEM hi\n", "no FROM line"),
        ("FROM echo\nPARAMETER colour red\n", "unknown parameter 'colour'"),
        ("FROM echo\nADAPTER ./absent.gguf\n", "no such file: "),
        ("FROM echo\nADAPTER absent\n", "ADAPTER absent: no such file"),
        ("FROM echo\nDRAFT x\n", "DRAFT x: no such file"),
    ],
)
def test_create_says_what_is_wrong(puna: Cli, fake: FakeServer, modelfile: str, text: str) -> None:
    done = puna("create", "mine", "-f", "-", stdin=modelfile)
    assert done.returncode == 1
    assert text in done.stderr
    assert not fake.requests


def test_a_named_modelfile_must_exist(puna: Cli) -> None:
    assert puna("create", "mine", "-f", "typo").stderr == "Error: no such file: typo\n"


# --- the program itself ------------------------------------------------------------------------------------------------


def test_version(puna: Cli) -> None:
    done = puna("--version")
    assert (done.stdout, done.stderr) == ("puna version is 9.9.9\n", f"Warning: client version is {__version__}\n")


@pytest.fixture
def nobody(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    with kept_free() as port:
        yield {**environment, "OLLAMA_HOST": f"127.0.0.1:{port}"}


@pytest.mark.parametrize("arguments", [["ps"], ["stop", "echo"]])
def test_ps_and_stop_start_no_server(nobody: dict[str, str], arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "puna", *arguments], env=nobody, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    expected = f'Error: could not connect to a Puna server at http://{nobody["OLLAMA_HOST"]}, start one with "puna serve"\n'
    assert done.stderr == expected


def test_version_without_a_server(nobody: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-m", "puna", "-v"], env=nobody, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, f"puna version is {__version__}\n")
    assert done.stderr == "Warning: could not connect to a running Puna instance\n"


def test_help_lists_the_environment(puna: Cli) -> None:
    for arguments in (["--help"], ["serve", "-h"]):
        text = puna(*arguments).stdout
        assert "OLLAMA_HOST " in text
        assert "(default http://127.0.0.1:11434)" in text
        assert "OLLAMA_KEEP_ALIVE " in text


def test_wrong_usage(puna: Cli) -> None:
    done = puna("list", "--nonsense")
    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from puna.cli.app import app; "
        "print([m for m in ('httpx', 'rich', 'prompt_toolkit', 'pydantic', 'uvicorn', 'starlette', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
