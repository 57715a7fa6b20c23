"""The page in a real browser: what people do with it, what it must never do, and that nobody is left out.

Models are scripted where the answer matters, and real ones where the engine does. Every window is watched: what it asks of
anybody but the server, and whatever the browser complains of, is a failure.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Locator, Page, expect

from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.store import Store
from tests import browser as browsers
from tests import needs
from tests.browser import ELSEWHERE, OVER_THE_NETWORK, Window, window
from tests.patience import wait_until
from tests.registries import Handler, Host, Registry
from tests.tiny import write_llama
from tests.unit.server.answering.test_thinking import THINKS
from tests.unit.server.apis.test_engine import OCCUPANCY
from tests.unit.server.apis.test_tools import PIECES, TEMPLATE, TOOLS
from tests.unit.server.live import Live

pytestmark = pytest.mark.thorough

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
MARKDOWN = """## What there is

A **bold** word, `code`, [a link](https://example.com/x) and

- one
- two

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x: int) -> str:
    return f"{x}"
```

- [x] done
"""
HOSTILE = [
    "<script>hacked()</script>",
    "<img src=x onerror=hacked()>",
    "<svg/onload=hacked()>",
    "<iframe srcdoc='<script>parent.hacked()</script>'></iframe>",
    "<a href=javascript:hacked()>click</a>",
    "[click](javascript:hacked())",
    "[click](  JaVaScRiPt:hacked())",
    "[click](data:text/html;base64,PHNjcmlwdD5oYWNrZWQoKTwvc2NyaXB0Pg==)",
    "[click](vbscript:hacked())",
    "![tell](https://elsewhere.test/?secret=1)",
    '![x](x"onerror="hacked())',
    '[x](https://a.b "onmouseover=hacked()")',
    "<style>body{display:none}</style>",
    "<div style=background:url(https://elsewhere.test/)>x</div>",
    "<form action=https://elsewhere.test/><input name=a></form>",
    "<base href=https://elsewhere.test/>",
    '<meta http-equiv="refresh" content="0;url=https://elsewhere.test/">',
    "<link rel=stylesheet href=https://elsewhere.test/a.css>",
    "<object data=https://elsewhere.test/></object><embed src=https://elsewhere.test/>",
    "<math><mtext><table><mglyph><style><img src=x onerror=hacked()>",
    "<noscript><p title='</noscript><img src=x onerror=hacked()>'>",
    "<img name=getElementById><form id=main><input name=attributes>",
    "```html\n<script>hacked()</script>\n```",
    "```<img/src=x/onerror=hacked()>\nx\n```",
    "`<img src=x onerror=hacked()>`",
    "<https://elsewhere.test/>",
    "| <img src=x onerror=hacked()> |\n|---|\n| <script>hacked()</script> |",
]

# What a model's text became; the button beside each listing is the page's own.
OF_TEXT = "[...element.querySelectorAll('*')].filter((e) => !e.closest('.listing button'))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    needs.page_libraries()
    with browsers.chromium() as started:
        yield started


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("web"))
    server.add("echo", echo=True)
    server.add("writer", pieces=[MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)])
    server.add("long", pieces=["## What there is\n\n", *(f"Paragraph {n}\n\n" for n in range(20_000))], piece_delay_s=0.03)
    hostile = "\n\n".join(HOSTILE)
    server.add("hostile", pieces=[hostile[i : i + 11] for i in range(0, len(hostile), 11)])
    server.add("slow", n_pieces=100_000, piece_delay_s=0.03, cache_cells=400, cache_used=90, occupancy=OCCUPANCY)
    server.add("thinker", template=THINKS, pieces=["<h", "m>Let me see.</", "hm>It is ", "so."])
    server.add("caller", template=TEMPLATE, pieces=PIECES)
    server.add("broken", fail_at_piece=1)
    file = write_llama(
        server.folder / "eyes.gguf",
        n_layers=1,
        n_embd=32,
        n_ff=32,
        metadata={"llama.vision.block_count": 1, "general.tag": "eyes"},
    )
    blob = server.store.blobs.import_file(file)
    template = "{{- range .Messages }}<{{ .Role }}>{{ .Content }}{{ end }}<answer>"
    eyes = server.store.create("eyes", Recipe(files={"model.gguf": blob.digest}, template=template))
    server.follow(eyes.model_path)
    with server.running():
        yield server


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Window]:
    """A window that behaves: it asks nobody else, and nobody complains."""
    with window(browser, url, **options) as found:
        yield found
        assert found.violations() == []
        assert [asked for asked in found.seen.requests if not asked.startswith((url, "data:", "blob:"))] == []
        assert found.seen.complaints == []


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    with opened(browser, live.url) as found:
        yield found.page


def message(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Message", exact=True)


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model if ":" in model else f"{model}:latest")


def send(page: Page, text: str) -> None:
    message(page).fill(text)
    message(page).press("Enter")


def answers(page: Page) -> Locator:
    return page.locator("li.message.assistant")


def finished(page: Page, n: int = 1) -> Locator:
    """The last of so many answers, once it is complete."""
    expect(answers(page)).to_have_count(n)
    last = answers(page).nth(n - 1)
    expect(last.locator(".actions")).to_be_visible()
    return last


def ask(page: Page, model: str, text: str, n: int = 1) -> Locator:
    choose(page, model)
    send(page, text)
    return finished(page, n)


def script_of(live: Live, model: str) -> Path:
    return live.scripts[live.store.get(model).model_path]


def n_cancelled(live: Live) -> int:
    return sum(event[0] == "cancelled" for event in live.events(script_of(live, "slow")))


def test_an_answer_is_written_as_it_comes_and_can_be_stopped(page: Page, live: Live) -> None:
    before = n_cancelled(live)
    choose(page, "slow")
    send(page, "Go on")
    prose = answers(page).locator(".prose")
    expect(prose).to_contain_text("x x")
    short = prose.inner_text()
    wait_until(lambda: len(prose.inner_text()) > len(short) + 10)
    page.get_by_role("button", name="Stop").click()
    expect(finished(page)).to_contain_text("stopped")
    wait_until(lambda: n_cancelled(live) == before + 1)
    said = prose.inner_text()
    assert said.startswith("x x")
    page.reload()
    assert finished(page).locator(".prose").inner_text() == said


KEPT = """() => new Promise((resolve) => {
  const opened = indexedDB.open("puna");
  opened.onsuccess = () => {
    const asked = opened.result.transaction("conversations").objectStore("conversations").getAll();
    asked.onsuccess = () => (opened.result.close(), resolve(JSON.stringify(asked.result)));
  };
})"""


def test_an_answer_goes_on_while_another_page_is_shown_and_is_kept_as_it_grows(page: Page, live: Live) -> None:
    before = n_cancelled(live)
    choose(page, "slow")
    send(page, "Go on")
    prose = answers(page).locator(".prose")
    expect(prose).to_contain_text("x x")
    short = prose.inner_text()
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Models")
    page.get_by_role("link", name="Go on").click()
    wait_until(lambda: len(prose.inner_text()) > len(short) + 10)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    wait_until(lambda: len(re.findall(r"\bx\b", page.evaluate(KEPT))) > len(short.split()))
    page.reload()
    kept = finished(page).locator(".prose").inner_text()
    assert len(kept) > len(short)
    wait_until(lambda: n_cancelled(live) == before + 1)


def test_a_chat_is_there_after_a_reload_and_gone_when_deleted(page: Page) -> None:
    ask(page, "echo", "The first question")
    expect(page).to_have_url(re.compile("#/chat/"))
    expect(page).to_have_title("The first question – Puna")
    page.reload()
    expect(finished(page).locator(".prose")).to_contain_text("The first question")
    page.get_by_role("link", name="New chat").click()
    expect(answers(page)).to_have_count(0)
    page.get_by_role("link", name="The first question").click()
    finished(page)
    page.get_by_role("button", name="Delete this chat").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("link", name="The first question")).to_have_count(0)
    expect(answers(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_role("link", name="The first question")).to_have_count(0)


def test_two_pages_show_the_same_chat(browser: Browser, live: Live) -> None:
    """Neither goes on without what was said in the other."""
    with opened(browser, live.url) as first:
        ask(first.page, "echo", "In the first")
        other = first.context.new_page()
        other.goto(first.page.url)
        finished(other)
        ask(other, "echo", "In the other", 2)
        expect(finished(first.page, 2).locator(".prose")).to_contain_text("In the other")
        expect(ask(first.page, "echo", "Back in the first", 3).locator(".prose")).to_contain_text("In the other")
        finished(other, 3)
        other.get_by_role("link", name="New chat").click()
        ask(other, "echo", "Another one")
        expect(first.page.get_by_role("link", name="Another one")).to_be_visible()


NOTHING_IS_KEPT = """
for (const name of ["indexedDB", "localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
"""


def test_a_browser_that_keeps_nothing_chats_all_the_same(browser: Browser, live: Live) -> None:
    with opened(browser, live.url) as found:
        page = found.page
        found.context.add_init_script(NOTHING_IS_KEPT)
        page.reload()
        expect(page.get_by_text("This browser keeps no chats.")).to_be_visible()
        expect(ask(page, "echo", "Hello").locator(".notice")).to_contain_text("could not be kept in the browser")
        page.get_by_role("button", name="Save or load all chats").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("This browser keeps no chats.")
        dialog.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Delete this chat").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        expect(answers(page)).to_have_count(0)


def test_over_the_network_it_chats_too(browser: Browser, live: Live) -> None:
    """Without TLS browsers take away some of what they have."""
    with window(browser, live.url.replace("127.0.0.1", OVER_THE_NETWORK)) as found:
        assert found.page.evaluate("isSecureContext") is False
        expect(ask(found.page, "echo", "Hello").locator(".prose")).to_contain_text("Hello")
        found.page.reload()
        finished(found.page)
        assert [complaint for complaint in found.seen.complaints if "Cross-Origin-Opener-Policy" not in complaint] == []


def test_a_server_that_comes_back_is_noticed(browser: Browser, live: Live) -> None:
    with window(browser, live.url) as found:
        page = found.page
        found.context.set_offline(True)
        page.get_by_role("link", name="New chat").click()
        expect(page.locator(".notice")).to_have_text("The server cannot be reached.")
        found.context.set_offline(False)
        expect(page.locator(".notice")).to_have_count(0)
        expect(ask(page, "echo", "Hello").locator(".prose")).to_contain_text("Hello")


def test_what_was_said_can_be_changed_and_an_answer_had_again(page: Page, live: Live) -> None:
    ask(page, "echo", "red")
    ask(page, "echo", "green", 2)
    page.locator("li.message.user").first.hover()
    page.get_by_role("button", name="Edit and ask again").first.click()
    page.get_by_label("Your message").fill("blue")
    page.keyboard.press("Enter")
    answer = finished(page)
    expect(answer).to_contain_text("blue")
    expect(page.locator("ol")).not_to_contain_text("green")
    before = len(live.completions(script_of(live, "echo")))
    page.get_by_role("button", name="Answer again").click()
    wait_until(lambda: len(live.completions(script_of(live, "echo"))) == before + 1)
    finished(page)
    first, again = live.completions(script_of(live, "echo"))[-2:]
    assert first["prompt"] == again["prompt"]
    message(page).press("ArrowUp")
    expect(page.get_by_label("Your message")).to_have_value("blue")


def test_the_options_of_a_chat_reach_the_server(page: Page, live: Live) -> None:
    page.get_by_role("button", name="How to answer").click()
    dialog = page.get_by_role("dialog", name="How to answer")
    dialog.get_by_label("System prompt").fill("You are a heron.")
    dialog.get_by_label("Temperature").fill("0.25")
    dialog.get_by_label("Longest answer").fill("7")
    dialog.get_by_role("button", name="Done").click()
    ask(page, "echo", "Who are you?")
    asked = live.completions(script_of(live, "echo"))[-1]
    assert "You are a heron." in asked["prompt"]
    assert (asked["sampling"]["temperature"], asked["n_predict"]) == (0.25, 7)


def test_markdown_is_shown_with_its_code_in_colours(page: Page) -> None:
    prose = ask(page, "writer", "Write").locator(".prose")
    expect(prose.get_by_role("heading", name="What there is")).to_be_visible()
    expect(prose.get_by_role("listitem").get_by_text("one", exact=True)).to_be_visible()
    expect(prose.get_by_role("cell", name="2")).to_have_attribute("align", "right")
    assert prose.get_by_role("link", name="a link").get_attribute("href") == "https://example.com/x"
    assert prose.get_by_role("link", name="a link").get_attribute("rel") == "noopener noreferrer nofollow"
    expect(prose.locator(".hljs-keyword").first).to_have_text("def")
    expect(prose.get_by_role("checkbox")).to_be_disabled()


def test_what_does_not_change_stays_while_the_rest_is_written(page: Page) -> None:
    """What a person has selected above survives all that is added below."""
    choose(page, "long")
    send(page, "Write")
    first = answers(page).get_by_role("heading", name="What there is")
    first.evaluate("element => { element.isTheSame = true; getSelection().selectAllChildren(element); }")
    expect(answers(page).locator(".block", has_text="Paragraph 9")).to_be_attached()
    assert first.evaluate("element => element.isTheSame") is True
    assert page.evaluate("String(getSelection())") == "What there is"
    page.get_by_role("button", name="Stop").click()


def test_hostile_text_is_only_text(browser: Browser, live: Live) -> None:
    with opened(browser, live.url) as found:
        page = found.page
        page.evaluate("() => { window.hacked = () => { window.wasHacked = true; }; }")
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        prose = ask(page, "hostile", "Attack me").locator(".prose")
        expect(prose.locator(".block").first).to_be_visible()
        for link in prose.locator("a").all():
            assert re.match(r"https?://|mailto:", link.get_attribute("href") or "https://")
        tags = set(prose.evaluate(f"element => {OF_TEXT}.map((e) => e.tagName.toLowerCase())"))
        assert not tags & {"script", "img", "iframe", "svg", "style", "form", "base", "meta", "link", "object", "embed", "math"}
        names = set(prose.evaluate(f"element => {OF_TEXT}.flatMap((e) => e.getAttributeNames())"))
        assert not {name for name in names if name.startswith("on") or name in ("style", "src", "srcdoc", "id", "name", "action")}
        for text in ("<script>hacked()</script>", "<svg/onload=hacked()>", "<base href=https://elsewhere.test/>"):
            expect(prose).to_contain_text(text)
        assert page.evaluate("window.wasHacked") is None
        assert page.evaluate("getComputedStyle(document.body).display") != "none"
        page.reload()
        finished(page)
        assert page.evaluate("window.wasHacked") is None


def test_the_policy_stops_what_the_sanitiser_might_let_through(browser: Browser, live: Live) -> None:
    """As if it had failed: markup from text is refused, and so are scripts, styles and requests to anybody else."""
    with window(browser, live.url) as found:
        page = found.page
        with pytest.raises(Error, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<img src=x onerror=hacked()>'")
        page.evaluate(
            """async () => {
              const script = document.createElement('script');
              script.append('window.wasHacked = true');
              try { document.body.append(script); } catch {}
              const image = document.createElement('img');
              image.src = 'http://elsewhere.test/x.png';
              document.body.append(image);
              const styled = document.createElement('p');
              styled.setAttribute('style', 'color: red');
              document.body.append(styled);
              await fetch('http://elsewhere.test/').catch(() => {});
            }"""
        )
        assert page.evaluate("window.wasHacked") is None
        wait_until(lambda: len({text.split()[0] for text in found.violations()}) >= 4)
        assert {text.split()[0] for text in found.violations()} >= {"img-src", "connect-src", "style-src-attr"}


def test_thinking_is_folded_and_can_be_read(page: Page) -> None:
    answer = ask(page, "thinker", "Why?")
    thought = answer.get_by_text("Let me see.")
    expect(thought).not_to_be_visible()
    expect(answer.locator(".prose")).to_have_text("It is so.")
    answer.locator("summary").press("Enter")
    expect(thought).to_be_visible()


def test_calls_are_shown_and_their_results_given(page: Page, live: Live) -> None:
    page.get_by_role("button", name="How to answer").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tools").fill("{")
    dialog.get_by_role("button", name="Done").click()
    expect(dialog).to_be_visible()
    dialog.get_by_label("Tools").fill(json.dumps(TOOLS))
    dialog.get_by_role("button", name="Done").click()
    answer = ask(page, "caller", "What is the weather in Oslo?")
    expect(answer.locator("details.call")).to_have_count(2)
    expect(answer.locator("details.call").first).to_contain_text('"city": "Oslo"')
    # One after another, also after a reload: the model is asked when it has all of them.
    expect(answer.get_by_label("What time returns")).to_have_count(0)
    answer.get_by_label("What weather returns").fill("snow")
    answer.get_by_role("button", name="Give this result").click()
    expect(answer.get_by_label("What time returns")).to_be_focused()
    wait_until(lambda: "snow" in page.evaluate(KEPT))  # which takes the browser a moment
    page.reload()
    answer = finished(page)
    expect(answer.get_by_label("What weather returns")).to_have_count(0)
    answer.get_by_label("What time returns").fill("noon")
    answer.get_by_role("button", name="Give this result").click()
    finished(page, 2)
    asked = [request["prompt"] for request in live.completions(script_of(live, "caller"))]
    assert [("[tool weather:snow]" in prompt, "[tool time:noon]" in prompt) for prompt in asked] == [(False, False), (True, True)]


PASTE = """([type, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "pixel.png", { type: "image/png" }));
  const target = document.getElementById("message");
  const given = type === "paste" ? { clipboardData: transfer } : { dataTransfer: transfer };
  const kind = type === "paste" ? ClipboardEvent : DragEvent;
  target.dispatchEvent(new kind(type, { bubbles: true, cancelable: true, ...given }));
}"""


@pytest.mark.parametrize("way", ["paste", "drop", "file"])
def test_a_picture_comes_along(page: Page, live: Live, way: str) -> None:
    if way == "file":
        page.locator("input[type=file]").set_input_files({"name": "pixel.png", "mimeType": "image/png", "buffer": PIXEL})
    else:
        page.evaluate(PASTE, [way, base64.b64encode(PIXEL).decode()])
    expect(page.get_by_role("img", name="pixel.png")).to_be_visible()
    ask(page, "eyes", f"What is this, by {way}?")
    [image] = live.completions(script_of(live, "eyes"))[-1]["images"]
    assert base64.b64decode(image["data"]) == PIXEL
    page.reload()
    shown = page.get_by_role("img", name="pixel.png")
    expect(shown).to_be_visible()
    assert shown.evaluate("image => image.naturalWidth") == 1


def test_what_is_no_picture_is_refused_in_words(page: Page) -> None:
    page.locator("input[type=file]").set_input_files({"name": "a.svg", "mimeType": "image/svg+xml", "buffer": b"<svg/>"})
    expect(page.get_by_text("a.svg is no picture that models take").first).to_be_visible()


def test_an_error_is_said_and_the_answer_can_be_had_again(page: Page) -> None:
    expect(ask(page, "broken", "Hi").locator(".notice")).to_have_text("the sky fell")
    choose(page, "echo")
    page.get_by_role("button", name="Answer again").click()
    expect(page.get_by_text("the sky fell")).to_have_count(0)
    expect(finished(page)).to_contain_text("Hi")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"message": {"content": "Half"}}\n', "The answer broke off before its end."),
        ('{"message": {"content": "Half"}}\n{"messa', "The connection to the server broke off."),
    ],
)
def test_an_answer_that_breaks_off_says_so(page: Page, body: str, says: str) -> None:
    page.route("**/api/chat", lambda route: route.fulfill(body=body, content_type="application/x-ndjson"))
    answer = ask(page, "echo", "Hi")
    expect(answer.locator(".prose")).to_have_text("Half")
    expect(answer.locator(".notice")).to_have_text(says)
    page.unroute("**/api/chat")
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".notice", has_text=says)).to_have_count(0)
    expect(finished(page).locator(".prose")).to_contain_text("Hi")


def test_without_the_libraries_it_chats_in_plain_text(browser: Browser, live: Live) -> None:
    with window(browser, live.url) as found:
        page = found.page
        page.route("**/web/libraries/*", lambda route: route.fulfill(status=404))
        page.reload()
        prose = ask(page, "writer", "Write").locator(".prose")
        assert prose.inner_text().strip() == MARKDOWN.strip()
        page.reload()
        assert finished(page).locator(".prose").inner_text().strip() == MARKDOWN.strip()
        assert found.violations() == []


def test_all_chats_can_be_saved_and_loaded_elsewhere(browser: Browser, live: Live, tmp_path: Path) -> None:
    with opened(browser, live.url) as found:
        ask(found.page, "echo", "Keep this")
        found.page.get_by_role("button", name="Save or load all chats").click()
        with found.page.expect_download() as download:
            found.page.get_by_role("button", name="Save 1 chats").click()
        download.value.save_as(tmp_path / "chats.json")
        found.page.keyboard.press("Escape")
        with found.page.expect_download() as download:
            found.page.get_by_role("button", name="Save as a file").click()
        download.value.save_as(tmp_path / "chat.md")
    assert (tmp_path / "chat.md").read_text().startswith("# Keep this\n\n## You\n\nKeep this\n")
    with opened(browser, live.url) as other:
        other.page.get_by_role("button", name="Save or load all chats").click()
        other.page.get_by_label("Load chats from a file").set_input_files(tmp_path / "chats.json")
        other.page.get_by_role("button", name="Load", exact=True).click()
        other.page.get_by_role("link", name="Keep this").click()
        expect(finished(other.page)).to_contain_text("Keep this")


def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser: Browser, tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("secret",))
    live.add("echo", echo=True)
    with live.running(), window(browser, live.url) as found:
        page = found.page
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        dialog.get_by_label("Key", exact=True).fill("secret")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog).to_have_count(0)
        expect(ask(page, "echo", "Hello there")).to_contain_text("Hello there")
        assert page.evaluate("JSON.stringify(localStorage)").count("secret") == 0
        page.reload()
        expect(finished(page)).to_contain_text("Hello there")
        expect(dialog).to_have_count(0)
        assert found.violations() == []


def test_models_are_made_looked_at_and_removed(page: Page, live: Live) -> None:
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Create…").click()
    dialog = page.get_by_role("dialog", name="Create a model")
    dialog.get_by_label("Name").fill("mine")
    dialog.get_by_label("Modelfile").fill('FROM echo\nSYSTEM "You are a heron."\n')
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="mine:latest")).to_be_visible()
    assert live.store.get("mine").system == "You are a heron."
    page.get_by_label("Search these models").fill("min")
    expect(page.get_by_role("heading", name="echo:latest")).to_have_count(0)
    page.get_by_role("button", name="Show mine:latest").click()
    expect(page.get_by_role("dialog")).to_contain_text("You are a heron.")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Remove mine:latest").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    expect(page.get_by_text("None of them has that name.")).to_be_visible()
    assert "mine:latest" not in {model.name for model in live.store.list()}


def test_a_pull_shows_how_far_it_is(browser: Browser, tmp_path: Path) -> None:
    there, live = Store(tmp_path / "there"), Live(tmp_path)
    blob = there.blobs.import_file(write_llama(tmp_path / "tiny.gguf", n_layers=1))
    there.create("hello", Recipe(files={"m.gguf": blob.digest}))
    with Registry().running() as registry, live.running(), opened(browser, live.url) as found:
        registry.add(there, "hello", "library/hello:latest")
        registry.gate.clear()  # what is pulled waits until the bar was seen
        page = found.page
        page.goto("/#/models")
        expect(page.get_by_text("There are none yet.")).to_be_visible()
        page.get_by_label("A model to get").fill(f"http://{registry.netloc}/library/hello")
        page.get_by_role("button", name="Pull").click()
        expect(page.get_by_role("progressbar")).to_be_visible()
        registry.gate.set()
        expect(page.get_by_role("heading", name="library/hello")).to_be_visible()
        expect(page.get_by_role("progressbar")).to_have_count(0)
        page.get_by_label("A model to get").fill(f"http://{registry.netloc}/library/none")
        page.get_by_role("button", name="Pull").click()
        expect(page.locator(".transfers .failed")).to_be_visible()


def test_models_elsewhere_are_found(browser: Browser, tmp_path: Path) -> None:
    live = Live(tmp_path)
    with Registry().running() as registry, live.running(), opened(browser, live.url) as found:
        live.store._elsewhere = Elsewhere(hub=f"http://{registry.netloc}")
        registry.manifests["ann/Tiny-GGUF", "latest"] = b"{}"
        page = found.page
        page.goto("/#/models")
        page.get_by_label("A model to get").fill("tiny")
        page.get_by_role("button", name="Look for it").click()
        elsewhere = page.get_by_role("list", name="Models elsewhere")
        expect(elsewhere.get_by_role("heading", name="hf.co/ann/Tiny-GGUF")).to_be_visible()
        expect(elsewhere).to_contain_text("1.2M downloads")
        expect(elsewhere.get_by_role("button", name="Pull hf.co/ann/Tiny-GGUF")).to_be_enabled()
        assert [search["search"] for search in registry.searches] == ["tiny"]


def test_a_model_on_its_way_says_how_far_it_is(browser: Browser, tmp_path: Path) -> None:
    live = Live(tmp_path)
    live.add("large", stall=True)
    with live.running(), opened(browser, live.url) as found:
        choose(found.page, "large")
        send(found.page, "Hi")
        found.page.get_by_role("link", name="Engine").click()
        expect(found.page.get_by_role("article", name="large:latest")).to_contain_text("It is being loaded")
        found.page.get_by_role("link", name="Hi").click()
        found.page.get_by_role("button", name="Stop").click()
        expect(finished(found.page)).to_contain_text("stopped")


def test_the_engine_is_drawn_as_it_works(page: Page, live: Live) -> None:
    choose(page, "slow")
    send(page, "Go on")
    expect(answers(page).locator(".prose")).to_contain_text("x")
    page.get_by_role("link", name="Engine").click()
    card = page.get_by_role("article", name="slow:latest")
    expect(card.get_by_role("img", name="90 of 400 cells are used")).to_be_visible()
    expect(card.get_by_role("img", name="80 read, 10 written")).to_be_visible()
    expect(card.get_by_role("img", name="2 prefixes, of which 1 are shared")).to_be_visible()
    expect(card).to_contain_text("3 more are not shown")
    expect(page.get_by_role("article", name="Memory")).to_contain_text("free")
    expect(card.locator(".trace").first).to_have_attribute("points", re.compile(r" .* "))  # three looks at least


def test_another_site_can_neither_reach_the_server_nor_frame_the_page(browser: Browser, live: Live) -> None:
    def answer(request: Handler) -> None:
        request.reply(200, f"<iframe src='{live.url}/'></iframe>".encode(), content_type="text/html")

    host = Host(answer)
    models = {model.name for model in live.store.list()}
    with host.running(), window(browser, f"http://{ELSEWHERE}:{host.server_port}") as found:
        page = found.page
        answered: list[tuple[str, int]] = []
        page.on("response", lambda response: answered.append((response.request.method, response.status)))
        for options in ({}, {"method": "POST", "body": "{}"}, {"method": "DELETE"}):
            asked = "([url, options]) => fetch(url, options).then(() => 'read', () => 'refused')"
            assert page.evaluate(asked, [f"{live.url}/api/tags", options]) == "refused"
        blind = {"method": "POST", "mode": "no-cors", "body": json.dumps({"model": "echo", "keep_alive": 0})}
        page.evaluate("([url, options]) => fetch(url, options).catch(() => {})", [f"{live.url}/api/generate", blind])
        assert not [status for method, status in answered if method != "GET" and status != 403]
        assert not [event for event in live.events(script_of(live, "echo")) if event[0] == "unload"]
        [frame] = page.frames[1:]
        assert not frame.url.startswith(live.url)
        answered.clear()
        with suppress(Error):  # an answer of 403 without a text is shown as the browser's own error page
            page.goto(f"http://{ELSEWHERE}:{live.port}/")  # the site's name points at this machine now
        assert answered == [("GET", 403)]
    assert {model.name for model in live.store.list()} == models


def test_everything_can_be_done_with_the_keyboard(page: Page) -> None:
    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)

    def focused() -> str:
        name: str = page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent")
        return name.strip()

    expect(message(page)).to_be_focused()
    reached = [focused()]
    while reached[-1] != "Skip to the content" and len(reached) < 30:
        press("Shift+Tab")
        reached.append(focused())
    assert {"Model", "Puna", "New chat", "Models", "Engine", "Light or dark", "API key"} < set(reached)
    assert reached[-1] == "Skip to the content"
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    press("Tab")
    assert focused() == "Model"
    page.keyboard.type("slow")
    press("Tab")
    assert focused() == "How to answer"
    press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert focused() == "How to answer"
    after = []
    for _ in range(4):
        press("Tab")
        after.append(focused())
    assert after == ["Save as a file", "Delete this chat", "Conversation", "Message"]
    message(page).focus()
    page.keyboard.type("Go on")
    press("Enter")
    expect(answers(page).locator(".prose")).to_contain_text("x")
    press("Escape")
    expect(finished(page)).to_contain_text("stopped")
    expect(message(page)).to_be_focused()
    expect(page.get_by_role("status")).to_have_text("Stopped")


CONTRAST = """() => {
  const channel = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const light = (c) => 0.2126 * channel(c[0] / 255) + 0.7152 * channel(c[1] / 255) + 0.0722 * channel(c[2] / 255);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(".unseen, .skip")) continue;
    const [a, b] = [light(rgba(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push(`${walker.currentNode.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea, [role=img]")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.title))
  .map((e) => e.outerHTML)"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_texts_can_be_read_and_controls_have_names(browser: Browser, live: Live, colours: str) -> None:
    with opened(browser, live.url, color_scheme=colours) as found:
        page = found.page
        ask(page, "writer", "Write")
        ask(page, "thinker", "Think", 2)
        for place in (None, "Models", "Engine"):
            if place:
                page.get_by_role("link", name=place).click()
                expect(page.get_by_role("heading", level=1)).to_have_text(place)
                expect(page.locator(".models li, .engine header").first).to_be_visible()
            assert page.evaluate(CONTRAST) == [], place
            assert page.evaluate(NAMELESS) == [], place
            assert page.get_by_role("main").count() == page.get_by_role("complementary").count() == 1


def test_a_phone_is_wide_enough(browser: Browser, live: Live) -> None:
    with opened(browser, live.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as found:
        page = found.page

        def fits() -> bool:
            wide: bool = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            return wide

        ask(page, "writer", "Write")
        assert fits()
        for place in ("Models", "Engine"):
            expect(page.get_by_role("link", name=place)).not_to_be_visible()
            page.get_by_role("button", name="Menu").tap()
            page.get_by_role("link", name=place).tap()
            expect(page.get_by_role("heading", level=1)).to_have_text(place)
            expect(page.locator(".models li, .engine header").first).to_be_visible()
            assert fits()
        page.get_by_role("button", name="Menu").tap()
        page.keyboard.press("Escape")
        expect(page.get_by_role("link", name="Models")).not_to_be_visible()
        small = """(buttons) => buttons.filter((e) => e.checkVisibility() && Math.min(e.offsetWidth, e.offsetHeight) < 24)
          .map((e) => e.outerHTML)"""
        assert page.locator("button").evaluate_all(small) == []


def test_the_colours_are_chosen_and_kept(page: Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    for _ in range(2):
        page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(paper) != light
    page.reload()
    assert page.evaluate(paper) != light


def test_the_first_paint_comes_before_the_libraries(
    browser: Browser, live: Live, record_property: Callable[[str, object], None]
) -> None:
    """How long it took is told, not judged: machines differ."""
    with opened(browser, live.url) as found:
        page = found.page
        expect(message(page)).to_be_visible()
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
        wait_until(lambda: page.evaluate(paint) > 0)
        record_property("first_paint_ms", page.evaluate(paint))
        print(f"first paint after {page.evaluate(paint):.0f} ms, {len(found.seen.requests)} requests")
        begins = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/libraries/')).map((e) => e.startTime)"
        wait_until(lambda: len(page.evaluate(begins)) == 3)
        bound = "performance.getEntriesByType('resource').filter((e) => e.renderBlockingStatus === 'blocking').map((e) => e.name)"
        assert all(name.endswith(".css") for name in page.evaluate(bound))
