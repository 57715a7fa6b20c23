"""The account that this machine's key belongs to, at the place that runs the default registry.

The key is the sign-in: who has added it to an account may push to the account's namespaces. Nothing else is kept here.
"""

from __future__ import annotations

import base64
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from puna.errors import PunaError, SourceError
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.registry.identity import Identity
from puna.store.sources.web.http import Answer, Http, Passing

MAX_BYTES = 1 << 20
T = TypeVar("T")


class NotSignedIn(PunaError):
    """The key belongs to no account; *url* is where one can add it to one."""

    def __init__(self, url: str) -> None:
        super().__init__("unauthorized")
        self.url = url


@dataclass(frozen=True)
class Account:
    """What can be asked about the account. Errors: NotSignedIn; SourceError."""

    elsewhere: Elsewhere

    def user(self) -> dict[str, Any]:
        """The account as its place describes it."""
        content = self._call("POST", "/api/me", lambda answer: answer.read(MAX_BYTES))
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise SourceError(f"{self.elsewhere.account} gave no account: {error}") from error

    def sign_out(self) -> None:
        """Take this machine's key out of the account."""
        key = _unpadded(self._identity.line)
        self._call("DELETE", f"/api/user/keys/{key}", lambda answer: None)

    @property
    def sign_in_url(self) -> str:
        key = _unpadded(self._identity.line)
        return f"{self.elsewhere.account}/connect?name={quote(platform.node(), safe='')}&key={key}"

    @property
    def _identity(self) -> Identity:
        return Identity(self.elsewhere.key_path)

    def _call(self, method: str, path: str, read: Callable[[Answer], T]) -> T:
        signed = f"{path}?ts={int(time.time())}"
        headers = {"Authorization": self._identity.authorization(f"{method},{signed}")}
        with Http(urlsplit(self.elsewhere.account).hostname or "") as http:
            try:
                with http.ask(method, self.elsewhere.account + signed, headers, b"") as answer:
                    if answer.status in (401, 403, 404):
                        raise NotSignedIn(self.sign_in_url)
                    if answer.status not in (200, 204):
                        raise answer.failure()
                    return read(answer)
            except Passing as error:
                raise SourceError(str(error)) from error


def _unpadded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
