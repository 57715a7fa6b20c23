"""A real browser for tests: the system's Chromium, which reaches this machine alone, and what it asked for and complained of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests import needs
from tests.patience import PATIENCE_S

expect.set_options(timeout=PATIENCE_S * 1000)
ELSEWHERE = "elsewhere.test"  # another site, which is this machine all the same
OVER_THE_NETWORK = "neighbour.local"  # this machine by a name that others have for it: browsers trust no page from there

_ARGUMENTS = (
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1, MAP {OVER_THE_NETWORK} 127.0.0.1",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)
_WATCH = """
document.addEventListener("securitypolicyviolation", (event) => {
  window.__violations = [...(window.__violations ?? []), `${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`];
});
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """One process for a module's tests; it ends with the block."""
    program = needs.chromium()
    arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.name == "posix" and os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=arguments, timeout=PATIENCE_S * 1000)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Seen:
    """What a page asked for, and what it or the browser complained of."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass
class Window:
    page: Page
    context: BrowserContext
    seen: Seen

    def violations(self) -> list[str]:
        """Of the page's security policy."""
        found: list[str] = self.page.evaluate("window.__violations ?? []")
        return found


@contextmanager
def window(browser: Browser, url: str, **options: Any) -> Iterator[Window]:
    """A browser that was never here, which opens the address *url*. *options*: of the window: its size, colours, phone."""
    given = {"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce", "base_url": url, **options}
    context = browser.new_context(**given)
    try:
        context.set_default_timeout(PATIENCE_S * 1000)
        context.add_init_script(_WATCH)
        page = context.new_page()
        seen = Seen()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("console", lambda message: seen.complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.goto("/")
        yield Window(page, context, seen)
    finally:
        context.close()
