from __future__ import annotations

import json
import re
import socket
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from puna.store.recipe import Recipe
from tests.patience import wait_until
from tests.tiny import write_llama
from tests.unit.llm.scripted import requests_to
from tests.unit.server.live import Live

HI = [{"role": "user", "content": "Hi"}]
FULL_NAME = "registry.ollama.ai/library/hello:latest"
RAW_ONLY = "raw mode does not support template, system, or context"


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def last_completion(live: Live, model: str = "hello") -> dict[str, Any]:
    path = live.store.get(model).model_path
    assert path is not None
    return live.completions(live.scripts[path])[-1]


def test_generate_streams_pieces_then_counts(shared: Live) -> None:
    *pieces, final = lines(shared.post("/api/generate", {"model": "hello", "prompt": "Hi"}))
    assert [piece["response"] for piece in pieces] == ["Hel", "lo", " world"]
    for piece in pieces:
        assert set(piece) == {"model", "created_at", "response", "done"}
        assert piece["done"] is False
        assert piece["model"] == "hello"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z", piece["created_at"])
    assert final["response"] == ""
    assert (final["done"], final["done_reason"]) == (True, "stop")
    assert final["context"] == [0, 1, 2, 3, 4, 5]
    assert (final["prompt_eval_count"], final["eval_count"]) == (3, 4)
    assert (final["prompt_eval_duration"], final["eval_duration"]) == (1_000_000, 2_000_000)
    assert 0 < final["load_duration"] < final["total_duration"]
    assert "cached_count" not in final


def test_generate_in_one_piece(shared: Live) -> None:
    response = shared.post("/api/generate", {"model": "hello", "prompt": "Hi", "stream": False})
    assert response.headers["content-type"] == "application/json; charset=utf-8"
    assert response.json()["response"] == "Hello world"
    assert response.json()["done"] is True


def test_chat_streams_messages(shared: Live) -> None:
    *pieces, final = lines(shared.post("/api/chat", {"model": "hello", "messages": HI}))
    assert [piece["message"] for piece in pieces] == [{"role": "assistant", "content": text} for text in ("Hel", "lo", " world")]
    assert final["message"] == {"role": "assistant", "content": ""}
    assert final["done_reason"] == "stop"
    assert "context" not in final
    whole = shared.post("/api/chat", {"model": "hello", "messages": HI, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello world"}
    assert whole["eval_count"] == 4


def test_the_reply_names_the_model_as_typed(shared: Live) -> None:
    reply = shared.post("/api/generate", {"model": "Hello:LATEST", "prompt": "Hi", "stream": False}).json()
    assert reply["model"] == "Hello:LATEST"


def test_options_reach_the_runner(shared: Live) -> None:
    options = {
        "temperature": 0,
        "seed": 7.0,
        "top_k": 5,
        "num_predict": 2,
        "num_keep": 9,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "repeat_penalty": None,
        "unknown": 1,
        "low_vram": True,
    }
    request = {"model": "hello", "prompt": "Hi", "options": options, "truncate": False, "shift": False, "stream": False}
    reply = shared.post("/api/generate", request).json()
    assert (reply["response"], reply["done_reason"]) == ("Hello", "length")
    sent = last_completion(shared)
    assert {name: sent["sampling"][name] for name in ("temperature", "seed", "top_k", "repeat_penalty", "top_p")} == {
        "temperature": 0,
        "seed": 7,
        "top_k": 5,
        "repeat_penalty": 1.0,
        "top_p": 0.9,
    }
    assert (sent["n_predict"], sent["n_keep"], sent["stop"], sent["ignore_eos"]) == (2, 9, ["a", "b"], True)
    assert (sent["truncate"], sent["shift"]) == (False, False)


@pytest.mark.parametrize(("num_predict", "expected"), [(-1, 20480), (-2, -2), (10**9, 20480), (5, 5), (0, 0)])
def test_answers_are_bounded(shared: Live, num_predict: int, expected: int) -> None:
    shared.post("/api/generate", {"model": "hello", "prompt": "Hi", "options": {"num_predict": num_predict}})
    assert last_completion(shared)["n_predict"] == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_ctx": "4096"}, 'option "num_ctx" must be of type integer'),
        ({"temperature": "hot"}, 'option "temperature" must be of type float32'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"stop": "a"}, 'option "stop" must be of type array'),
        ({"stop": [1]}, 'option "stop" must be of an array of strings'),
        ({"top_k": True}, 'option "top_k" must be of type integer'),
        ({"seed": 1e300}, 'option "seed" must be of type integer (value out of range)'),
    ],
)
def test_options_of_the_wrong_type(shared: Live, options: dict[str, Any], text: str) -> None:
    response = shared.post("/api/generate", {"model": "hello", "prompt": "Hi", "options": options})
    assert (response.status_code, response.json()) == (500, {"error": text})


def test_prompts(shared: Live) -> None:
    def prompt(**fields: Any) -> str:
        shared.post("/api/generate", {"model": "hello", "prompt": "Hi", **fields})
        return str(last_completion(shared)["prompt"])

    assert prompt() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(system="Be.") == "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(raw=True) == "Hi"
    assert prompt(template="<<{{ .Prompt }}>>") == "<<Hi>>"
    assert prompt(context=[1, 2]) == prompt()
    assert last_completion(shared)["context"] == []
    prompt(context=[1, 2])
    assert last_completion(shared)["context"] == [1, 2]


def test_raw_generation_returns_no_context(shared: Live) -> None:
    reply = shared.post("/api/generate", {"model": "hello", "prompt": "Hi", "raw": True, "stream": False}).json()
    assert "context" not in reply


def test_suffix(shared: Live) -> None:
    shared.post("/api/generate", {"model": "infill", "prompt": "def f(", "suffix": "return 1"})
    assert last_completion(shared, "infill")["prompt"] == "<pre>def f(<suf>return 1<mid>"


def test_tools_reach_a_template_that_knows_them(shared: Live) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    reply = shared.post("/api/chat", {"model": "tooled", "messages": HI, "tools": tools, "stream": False})
    assert reply.json()["message"]["content"] == "Hello world"
    assert last_completion(shared, "tooled")["prompt"] == "[user:Hi]<weather>"


def test_messages_of_the_model_and_roles_in_any_case(empty: Live) -> None:
    recipe = Recipe(
        system="Sys.",
        messages=({"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}),
        parameters={"stop": ["X"]},
    )
    empty.add("primed", recipe, template="{{ range .Messages }}[{{ .Role }}:{{ .Content }}]{{ end }}")
    with empty.running():
        empty.post("/api/chat", {"model": "primed", "messages": [{"role": "USER", "content": "Hi"}], "options": {"stop": ["Y"]}})
        assert last_completion(empty, "primed")["prompt"] == "[system:Sys.][user:Q][assistant:A][user:Hi]"
        assert last_completion(empty, "primed")["stop"] == ["X", "Y"]
        messages = [{"role": "system", "content": "Other."}, {"role": "user", "content": "Hi"}]
        empty.post("/api/chat", {"model": "primed", "messages": messages})
        assert last_completion(empty, "primed")["prompt"] == "[user:Q][assistant:A][system:Other.][user:Hi]"
        empty.post("/api/generate", {"model": "primed", "prompt": "Hi", "context": [1]})
        assert last_completion(empty, "primed")["prompt"] == "[system:Sys.][user:Hi]"


def test_parameters_of_the_model_count_less_than_the_requests(empty: Live) -> None:
    empty.add("tuned", Recipe(parameters={"temperature": 0.3, "top_k": 3, "num_ctx": 64}))
    with empty.running():
        empty.post("/api/generate", {"model": "tuned", "prompt": "Hi", "options": {"top_k": 9}})
        sampling = last_completion(empty, "tuned")["sampling"]
        assert (sampling["temperature"], sampling["top_k"]) == (0.3, 9)
        assert empty.client.get("/api/ps").json()["models"][0]["context_length"] == 64


def test_a_long_conversation_loses_its_oldest_messages(empty: Live) -> None:
    """The fake counts words; each message is 10 of them, and the template adds none."""
    empty.add("small", Recipe(parameters={"num_ctx": 64}), template="{{ range .Messages }} {{ .Content }}{{ end }}")
    words = [" ".join([f"m{number}w"] * 10) for number in range(10)]
    messages = [{"role": "system", "content": words[0]}]
    messages += [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(words[1:], 1)]
    with empty.running():
        empty.post("/api/chat", {"model": "small", "messages": messages})
        prompt = last_completion(empty, "small")["prompt"]
        assert prompt.split() == " ".join([words[0], *words[5:]]).split()
        empty.post("/api/chat", {"model": "small", "messages": messages, "truncate": False})
        assert last_completion(empty, "small")["prompt"].split() == " ".join(words).split()
        huge = [*messages, {"role": "user", "content": "end " * 100}]
        empty.post("/api/chat", {"model": "small", "messages": huge})
        assert last_completion(empty, "small")["prompt"].split() == [*words[0].split(), *["end"] * 100]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "long " * 10_000, "system": "Be brief."}),
        ("/api/chat", {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "long " * 10_000}]}),
    ],
)
def test_where_no_message_may_be_left_out_none_is_counted(shared: Live, path: str, body: dict[str, Any]) -> None:
    """The runner turns the prompt into tokens to compute it; for a book that takes a while, and once is enough."""
    model = shared.store.get("hello").model_path
    assert model is not None
    counted = len(requests_to(shared.scripts[model], "/tokenize"))
    shared.post(path, {"model": "hello", **body})
    assert last_completion(shared)["prompt"].count("long") == 10_000
    assert len(requests_to(shared.scripts[model], "/tokenize")) == counted


def test_load_and_unload(empty: Live) -> None:
    script = empty.add("hello")
    with empty.running():
        for path, key, value in (
            ("/api/generate", "response", ""),
            ("/api/chat", "message", {"role": "assistant", "content": ""}),
        ):
            loaded = empty.post(path, {"model": "hello"})
            assert loaded.headers["content-type"] == "application/json; charset=utf-8"
            assert loaded.json() | {"created_at": ""} == {
                "model": "hello",
                "created_at": "",
                key: value,
                "done": True,
                "done_reason": "load",
            }
            assert len(empty.client.get("/api/ps").json()["models"]) == 1
            unloaded = empty.post(path, {"model": "hello", "keep_alive": 0}).json()
            assert (unloaded["done"], unloaded["done_reason"]) == (True, "unload")
            wait_until(lambda: empty.client.get("/api/ps").json() == {"models": []})
        assert empty.completions(script) == []
        assert empty.post("/api/generate", {"model": "hello", "keep_alive": "0"}).json()["done_reason"] == "unload"


def test_ps(empty: Live) -> None:
    empty.add("hello")
    with empty.running():
        assert empty.client.get("/api/ps").json() == {"models": []}
        empty.post("/api/generate", {"model": "hello", "keep_alive": -1, "options": {"num_ctx": 512}})
        (model,) = empty.client.get("/api/ps").json()["models"]
        stored = empty.store.get("hello")
        assert model["name"] == model["model"] == "hello:latest"
        assert (model["digest"], model["details"]) == (stored.digest, stored.details)
        assert (model["size"], model["size_vram"], model["context_length"]) == (1234, 0, 512)
        assert datetime.fromisoformat(model["expires_at"]).year > 2300
        empty.post("/api/generate", {"model": "hello", "keep_alive": "10m"})
        (model,) = empty.client.get("/api/ps").json()["models"]
        left = datetime.fromisoformat(model["expires_at"]) - datetime.now().astimezone()
        assert 590 < left.total_seconds() <= 600


@pytest.mark.parametrize(
    ("keep_alive", "text"),
    [
        ("-1", 'time: missing unit in duration "-1"'),
        ("soon", 'time: invalid duration "soon"'),
        (True, "Unsupported type: 'bool'"),
        ([], "Unsupported type: '[]interface {}'"),
    ],
)
def test_keep_alive_that_makes_no_sense(shared: Live, keep_alive: Any, text: str) -> None:
    response = shared.post("/api/generate", {"model": "hello", "keep_alive": keep_alive})
    assert (response.status_code, response.json()) == (400, {"error": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/generate", {"prompt": "x"}, 404, "model '' not found"),
        ("/api/chat", {"messages": HI}, 400, "model is required"),
        ("/api/generate", {"model": "nope"}, 404, "model 'nope' not found"),
        ("/api/chat", {"model": "Nope:x"}, 404, "model 'Nope:x' not found"),
        ("/api/generate", {"model": "a//b:"}, 400, "invalid model name"),
        (
            "/api/generate",
            {"model": "hello", "raw": True, "system": "x"},
            400,
            "raw mode does not support template, system, or context",
        ),
        ("/api/generate", {"model": "hello", "top_logprobs": 21}, 400, "top_logprobs must be between 0 and 20"),
        (
            "/api/generate",
            {"model": "hello", "suffix": "x"},
            400,
            "registry.ollama.ai/library/hello:latest does not support insert",
        ),
        ("/api/chat", {"model": "hello", "tools": [{}]}, 400, f"{FULL_NAME} does not support tools"),
        ("/api/generate", {"model": "hello", "think": True}, 400, '"hello" does not support thinking'),
        ("/api/generate", {"model": "hello", "think": "high"}, 400, '"hello" does not support thinking'),
        (
            "/api/generate",
            {"model": "hello", "think": "very"},
            400,
            'invalid think value: "very" (must be "high", "medium", "low", "max", true, or false)',
        ),
        (
            "/api/generate",
            {"model": "hello", "think": 1},
            400,
            'think must be a boolean or string ("high", "medium", "low", "max", true, or false)',
        ),
        ("/api/generate", {"model": "hello", "prompt": "x", "images": ["aGk="]}, 400, '"hello" does not support images'),
        (
            "/api/generate",
            {"model": "hello", "prompt": "x", "format": "json", "regex": "a"},
            400,
            "an answer can follow only one of format, regex and lark",
        ),
        (
            "/api/chat",
            {"model": "hello", "messages": HI, "format": "xml"},
            500,
            'invalid format: "xml"; expected "json" or a valid JSON Schema object',
        ),
    ],
)
def test_refusals(shared: Live, path: str, body: dict[str, Any], status: int, text: str) -> None:
    response = shared.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": text})
    assert response.headers["content-type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(("think", "format"), [(False, None), (None, ""), (False, "")])
def test_what_sounds_like_a_wish_but_is_none(shared: Live, think: Any, format: Any) -> None:
    body = {"model": "hello", "prompt": "x", "think": think, "format": format, "stream": False}
    assert shared.post("/api/generate", body).json()["response"] == "Hello world"


def test_a_template_that_cannot_be_parsed(shared: Live) -> None:
    response = shared.post("/api/generate", {"model": "hello", "prompt": "x", "template": "{{ .Prompt"})
    assert response.status_code == 400
    assert "template" in response.json()["error"]


def test_debug_render_only(shared: Live) -> None:
    reply = shared.post("/api/chat", {"model": "hello", "messages": HI, "_debug_render_only": True}).json()
    assert reply["_debug_info"]["rendered_template"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_errors_before_and_after_the_first_piece(empty: Live) -> None:
    empty.add("early", fail_at_piece=0, fail_status=400, fail_text="the input length exceeds the context length")
    empty.add("late", fail_at_piece=1, fail_text="the sky fell")
    with empty.running():
        early = empty.post("/api/generate", {"model": "early", "prompt": "x"})
        assert (early.status_code, early.json()) == (400, {"error": "the input length exceeds the context length"})
        late = lines(empty.post("/api/generate", {"model": "late", "prompt": "x"}))
        assert late[0]["response"] == "Hel"
        assert late[1:] == [{"error": "the sky fell"}]
        whole = empty.post("/api/chat", {"model": "late", "messages": HI, "stream": False})
        assert (whole.status_code, whole.json()) == (500, {"error": "the sky fell"})


def test_a_runner_that_dies_fails_its_request_and_is_replaced(empty: Live) -> None:
    script = empty.add("fragile", die_at_piece=2, piece_delay_s=0.01, stderr="GGML_ASSERT(false) failed")
    with empty.running():
        *_, error = lines(empty.post("/api/generate", {"model": "fragile", "prompt": "x"}))
        assert "signal SIGKILL" in error["error"]
        assert "GGML_ASSERT(false) failed" in error["error"]
        script.write_text("{}")
        assert (
            empty.post("/api/generate", {"model": "fragile", "prompt": "x", "stream": False}).json()["response"] == "Hello world"
        )


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ({"load_error": "unknown model architecture: 'x'"}, "unknown model architecture: 'x'"),
        ({"out_of_memory": True}, "model requires more system memory"),
        ({"exit_at_start": 1, "stderr": "ImportError: libggml.so"}, "ImportError: libggml.so"),
    ],
)
def test_a_model_that_cannot_be_loaded(empty: Live, script: dict[str, Any], text: str) -> None:
    empty.add("bad", **script)
    with empty.running():
        for _ in range(2):
            response = empty.post("/api/generate", {"model": "bad", "prompt": "x"})
            assert response.status_code == 500
            assert text in response.json()["error"]


@pytest.mark.parametrize("script", [{"n_pieces": 100_000, "piece_delay_s": 0.02}, {"stall": True}])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_work(empty: Live, script: dict[str, Any], stream: bool) -> None:
    path = empty.add("slow", **script)
    body = json.dumps({"model": "slow", "prompt": "x", "stream": stream}).encode()
    with empty.running():
        with socket.create_connection(("127.0.0.1", empty.port)) as client:
            head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: any(event[0] == ("/load" if "stall" in script else "complete") for event in empty.events(path)))
        if "stall" in script:
            wait_until(lambda: not empty.scheduler.models)
        else:
            wait_until(lambda: any(event[0] == "cancelled" for event in empty.events(path)))
            wait_until(lambda: [loaded.n_users for loaded in empty.scheduler.models.values()] == [0])


def test_a_client_that_leaves_the_queue(tmp_path: Path) -> None:
    empty = Live(tmp_path, max_loaded_models=1)
    gate = tmp_path / "gate"
    empty.add("slow", gate=str(gate))
    empty.add("other")
    body = b'{"model": "other", "prompt": "x"}'
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with empty.running():
        answering = threading.Thread(target=empty.post, args=("/api/generate", {"model": "slow", "prompt": "x"}))
        answering.start()
        wait_until(lambda: empty.scheduler.models)
        with socket.create_connection(("127.0.0.1", empty.port)) as client:
            client.sendall(head + body)
            wait_until(lambda: empty.scheduler.queue)
        wait_until(lambda: not empty.scheduler.queue)
        gate.touch()
        answering.join()


def test_a_full_queue_answers_503(tmp_path: Path) -> None:
    live = Live(tmp_path, max_queue=1, max_loaded_models=1)
    gate = tmp_path / "gate"
    live.add("slow", gate=str(gate))
    live.add("other")
    live.add("third")
    with live.running():
        threads = []
        for name, condition in (("slow", lambda: live.scheduler.models), ("other", lambda: live.scheduler.queue)):
            threads.append(threading.Thread(target=live.post, args=("/api/generate", {"model": name, "prompt": "x"})))
            threads[-1].start()
            wait_until(condition)
        response = live.post("/api/generate", {"model": "third", "prompt": "x"})
        assert response.status_code == 503
        assert response.json() == {"error": "server busy, please try again.  maximum pending requests exceeded"}
        assert response.headers["retry-after"] == "1"
        gate.touch()
        for thread in threads:
            thread.join()


def test_a_gguf_file_by_its_path(empty: Live, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "my.gguf", n_layers=1, n_embd=32, n_ff=32)
    empty.follow(file)
    with empty.running():
        reply = empty.post("/api/generate", {"model": str(file), "prompt": "x", "stream": False}).json()
        assert (reply["model"], reply["response"]) == (str(file), "Hello world")
        (running,) = empty.client.get("/api/ps").json()["models"]
        assert running["name"] == str(file)
        missing = empty.post("/api/generate", {"model": str(tmp_path / "none.gguf"), "prompt": "x"})
        assert missing.status_code == 404
        truncated = tmp_path / "cut.gguf"
        truncated.write_bytes(file.read_bytes()[:2000])
        broken = empty.post("/api/generate", {"model": str(truncated), "prompt": "x"})
        assert broken.status_code == 500
        assert "cut.gguf" in broken.json()["error"]


def test_cached_tokens_are_reported(empty: Live) -> None:
    empty.add("cached", cached_count=2)
    with empty.running():
        final = lines(empty.post("/api/generate", {"model": "cached", "prompt": "x"}))[-1]
        assert (final["prompt_eval_count"], final["cached_count"]) == (3, 2)


def test_markup_is_escaped_as_go_does(empty: Live) -> None:
    empty.add("echo", echo=True, pieces=[])
    with empty.running():
        response = empty.post("/api/generate", {"model": "echo", "prompt": "<a href='x'>&", "raw": True, "stream": False})
        assert "\\u003ca href='x'\\u003e\\u0026" in response.text
        assert response.json()["response"] == "<a href='x'>&"


def add_base(live: Live, changes: list[tuple[bytes, bytes]]) -> Path:
    """A model ``base`` whose file has had some text changed; returns its script."""
    data = write_llama(live.folder / "base.gguf", n_layers=1, n_embd=32, n_ff=32, chat_template=None).read_bytes()
    for old, new in changes:
        assert len(old) == len(new)
        assert old in data
        data = data.replace(old, new)
    (live.folder / "base.gguf").write_bytes(data)
    blob = live.store.blobs.import_file(live.folder / "base.gguf")
    return live.follow(live.store.create("base", Recipe(files={"model.gguf": blob.digest})).model_path)


def test_without_a_template_a_prompt_is_a_text_to_be_continued(empty: Live) -> None:
    """A chat still needs its turns marked somehow; a plain completion has none."""
    script = add_base(empty, [(b"<|im_start|>", b"<|no_marks|>")])

    def prompt() -> str:
        return str(empty.completions(script)[-1]["prompt"])

    with empty.running():
        for path, more in (("/api/generate", {"stream": False}), ("/v1/completions", {})):
            assert empty.post(path, {"model": "base", "prompt": "Once upon", **more}).status_code == 200
            assert prompt() == "Once upon"
        empty.post("/api/generate", {"model": "base", "prompt": "Once upon", "system": "A tale.", "stream": False})
        assert prompt() == "A tale.\n\nOnce upon"
        empty.post("/api/chat", {"model": "base", "messages": HI, "stream": False})
        assert prompt() == "user: Hi\n\nassistant:"
        error = empty.post("/v1/completions", {"model": "base", "prompt": "a", "suffix": "b"})
        assert error.status_code == 400


def test_a_vocabulary_with_marks_for_turns_says_how_instructions_are_given(empty: Live) -> None:
    """But whoever asks for a completion gets one."""
    script = add_base(empty, [])
    with empty.running():
        empty.post("/api/generate", {"model": "base", "prompt": "Hi", "stream": False})
        assert empty.completions(script)[-1]["prompt"].startswith("<|im_start|>user\nHi<|im_end|>")
        empty.post("/v1/completions", {"model": "base", "prompt": "Hi"})
        assert empty.completions(script)[-1]["prompt"] == "Hi"


def test_head_is_for_few_paths(shared: Live) -> None:
    for path in ("/", "/health", "/api/version", "/api/tags"):
        assert shared.client.head(path).status_code == 200, path
    for path in ("/api/ps", "/api/status", "/v1/models", "/v1/models/hello", "/metrics", "/openapi.json", "/api/chat"):
        response = shared.client.head(path)
        assert response.status_code == 405, path
        assert "HEAD" not in response.headers["allow"]


def test_who_leaves_in_the_middle_of_a_body_is_no_error(shared: Live, caplog: pytest.LogCaptureFixture) -> None:
    digest = "0" * 64
    with caplog.at_level("INFO"):
        for path in ("/api/chat", "/v1/messages", f"/api/blobs/sha256:{digest}"):
            with socket.create_connection(("127.0.0.1", shared.port)) as client:
                client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        wait_until(lambda: caplog.text.count("499 POST") >= 3)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
