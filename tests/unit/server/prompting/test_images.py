"""Images of a request: what stands for them in the prompt, in every API, and how a conversation with them is cut."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from puna.prompt.chat import render_chat
from puna.server.prompting.images import PlacedImages
from puna.store.recipe import Recipe
from tests.tiny import write_llama
from tests.unit.server.live import Live

MARKER = re.compile(r"\[img-[0-9a-f]{32}-(\d+)\]")


def picture(shade: int = 0) -> str:
    out = io.BytesIO()
    Image.new("L", (4, 4), shade).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ONE, TWO = picture(1), picture(2)


def marked(text: str) -> str:
    """With the markers as they are shown."""
    return MARKER.sub(r"<\1>", text)


@pytest.mark.parametrize(
    ("text", "n", "placed"),
    [
        ("what is it?", 1, "<0>what is it?"),
        ("what is it?", 2, "<0><1>what is it?"),
        ("left [img] right [img] end", 2, "left <0> right <1> end"),
        ("here [img]", 2, "<1>here <0>"),
        ("[img][img]", 1, "<0>[img]"),
        ("[img-0] and [img]", 0, "[img-0] and [img]"),
        ("", 1, "<0>"),
    ],
)
def test_an_image_goes_where_the_text_says_or_in_front(text: str, n: int, placed: str) -> None:
    assert marked(PlacedImages().within(text, [b"x"] * n)[0]) == placed


@pytest.mark.parametrize(
    ("prompt", "n", "placed"),
    [
        ("a [img-1] b [img-0]", 2, "a <1> b <0>"),
        ("a [img-1]", 2, "<0>a <1>"),
        ("a [img-2] [img-x]", 1, "<0>a [img-2] [img-x]"),
        ("[img-0][img-0]", 1, "<0><0>"),
    ],
)
def test_a_raw_prompt_names_its_images(prompt: str, n: int, placed: str) -> None:
    assert marked(PlacedImages().in_raw(prompt, [b"x"] * n)) == placed


def test_what_stands_for_an_image_cannot_be_guessed() -> None:
    first, second = PlacedImages(), PlacedImages()
    assert first.within("", [b"x"]) != second.within("", [b"x"])


STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part['type'] == 'image' %}<image>{% endif %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def turns() -> list[dict[str, Any]]:
    """As a client sends one message in parts: text, image, text."""
    placed = PlacedImages()
    content, markers = placed.within("", [b"x"])
    before, after = {"role": "user", "content": "see "}, {"role": "user", "content": " there"}
    return [before, {"role": "user", "content": content, "images": markers}, after]


@pytest.mark.parametrize("template", [STRINGS, ALTERNATING, PARTS])
def test_chat_templates_write_the_image_where_it_is(template: str) -> None:
    assert marked(render_chat(template, turns(), bos_token="", eos_token="")) == "<user>see <0> there"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose file says that it sees, and runners that count images as 300 tokens."""
    server = Live(tmp_path_factory.mktemp("seeing"))
    file = write_llama(
        server.folder / "eyes.gguf",
        n_layers=1,
        n_embd=32,
        n_ff=32,
        metadata={"llama.vision.block_count": 1, "general.tag": "eyes"},
    )
    server.weights = server.store.blobs.import_file(file)  # type: ignore[attr-defined]
    template = "{{- range .Messages }}<{{ .Role }}>{{ .Content }}{{ end }}<answer>"
    model = server.store.create("eyes", Recipe(files={"model.gguf": server.weights.digest}, template=template))  # type: ignore[attr-defined]
    server.script = server.follow(model.model_path, image_tokens=300)  # type: ignore[attr-defined]
    with server.running():
        yield server


def asked(live: Live) -> tuple[str, list[str]]:
    """The prompt of the last completion, and its images."""
    request = live.completions(live.script)[-1]  # type: ignore[attr-defined]
    for image in request["images"]:
        assert image["marker"] in request["prompt"]
    return marked(request["prompt"]), [image["data"] for image in request["images"]]


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}}


REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": [ONE]}]}, "<user><0>Hi<answer>"),
    "generate": ("/api/generate", {"prompt": "Hi [img] there", "images": [ONE]}, "<user>Hi <0> there<answer>"),
    "raw": ("/api/generate", {"prompt": "Hi [img-0] there", "images": [ONE], "raw": True}, "Hi <0> there"),
    "own template": ("/api/generate", {"prompt": "Hi", "images": [ONE], "template": "({{ .Prompt }})"}, "(<0>Hi)"),
    "chat completions": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, part(ONE)]}]},
        "<user>Hi\n\n<0><answer>",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "Hi"},
                        {"type": "input_image", "image_url": f"data:image/png;base64,{ONE}"},
                    ],
                }
            ]
        },
        "<user><0>Hi<answer>",
    ),
    "messages": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ONE}},
                        {"type": "text", "text": "Hi"},
                    ],
                }
            ],
        },
        "<user><0>Hi<answer>",
    ),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body", "prompt"), REQUESTS.values(), ids=REQUESTS)
def test_every_api_hands_images_on(seeing: Live, path: str, body: dict[str, Any], prompt: str, stream: bool) -> None:
    response = seeing.post(path, {"model": "eyes", "stream": stream, **body})
    assert response.status_code == 200, response.text
    assert asked(seeing) == (prompt, [ONE])


def test_an_image_within_what_a_tool_has_found(seeing: Live) -> None:
    result = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ONE}},
        {"type": "text", "text": "found"},
    ]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": result}]},
    ]
    assert seeing.post("/v1/messages", {"model": "eyes", "max_tokens": 5, "messages": messages}).status_code == 200
    assert asked(seeing) == ("<user>look<assistant><tool><0>found<answer>", [ONE])


@pytest.mark.parametrize(
    ("path", "body", "shown", "count"),
    [
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "Hi", "images": [ONE, TWO]}]},
            "<user>[img-0][img-1]Hi<answer>",
            2,
        ),
        ("/api/generate", {"prompt": "Hi", "images": [ONE]}, "<user>[img-0]Hi<answer>", 1),
        ("/api/generate", {"prompt": "Hi"}, "<user>Hi<answer>", 0),
    ],
)
def test_what_is_shown_of_a_prompt(seeing: Live, path: str, body: dict[str, Any], shown: str, count: int) -> None:
    reply = seeing.post(path, {"model": "eyes", "_debug_render_only": True, **body}).json()
    assert reply["_debug_info"] == {"rendered_template": shown, "image_count": count}


def test_a_conversation_that_is_too_long_with_its_images_loses_the_oldest(seeing: Live) -> None:
    """Ten images of 300 tokens are more than the context of 2048; six are not."""
    messages = [{"role": "user", "content": f"{n}", "images": [picture(n)]} for n in range(10)]
    between = [{"role": "assistant", "content": "."}] * 10
    turns = [one for pair in zip(messages, between, strict=True) for one in pair][:-1]
    asked_for = {"model": "eyes", "messages": turns, "stream": False, "options": {"num_ctx": 2048}}
    assert seeing.post("/api/chat", asked_for).status_code == 200
    prompt, images = asked(seeing)
    assert images == [picture(n) for n in range(4, 10)]
    assert prompt.count("<user>") == 6


def test_tokens_are_counted_with_those_of_images(seeing: Live) -> None:
    content = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ONE}}]
    asked_for = {"model": "eyes", "messages": [{"role": "user", "content": [*content, {"type": "text", "text": "Hi"}]}]}
    with_image = seeing.post("/v1/messages/count_tokens", asked_for).json()["input_tokens"]
    asked_for["messages"] = [{"role": "user", "content": "Hi"}]
    assert with_image == seeing.post("/v1/messages/count_tokens", asked_for).json()["input_tokens"] + 300


def test_a_template_that_leaves_the_image_out_is_told(seeing: Live) -> None:
    body = {"model": "eyes", "prompt": "Hi", "images": [ONE], "template": "nothing", "stream": False}
    reply = seeing.post("/api/generate", body).json()
    assert asked(seeing) == ("nothing", [])
    assert any("does not see 1 of the images" in warning for warning in reply["warnings"])


def test_a_request_has_so_many_images_and_no_more(seeing: Live) -> None:
    response = seeing.post("/api/generate", {"model": "eyes", "prompt": "a", "images": [ONE] * 257})
    assert (response.status_code, "257 images" in response.json()["error"]) == (400, True)
    assert seeing.post("/api/generate", {"model": "eyes", "prompt": "a", "images": [ONE] * 256}).status_code == 200


def test_images_and_a_suffix_exclude_each_other(seeing: Live) -> None:
    server = seeing
    model = server.store.create(
        "infill",
        Recipe(files={"model.gguf": server.weights.digest}, template="{{ .Prompt }}<{{ .Suffix }}>"),  # type: ignore[attr-defined]
    )
    assert model.model_path is not None
    response = server.post("/api/generate", {"model": "infill", "prompt": "a", "suffix": "b", "images": [ONE]})
    assert (response.status_code, "suffix" in response.json()["error"]) == (400, True)
