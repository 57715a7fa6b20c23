"""What a registry wants before it answers: a token, from where, for what. Knows not how it is asked for."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

_FIELD = re.compile(r'(?<![A-Za-z_])([A-Za-z_]+)\s*=\s*(?:"([^"]{0,4096})"|([^",\s]{1,4096}))')
_NOTHING = base64.b64encode(hashlib.sha256(b"").hexdigest().encode()).decode()  # the digest of the request's body


@dataclass(frozen=True)
class Challenge:
    """A Bearer challenge."""

    realm: str
    service: str = ""
    scope: str = ""

    @classmethod
    def parse(cls, headers: Mapping[str, str]) -> Challenge | None:
        """None when the registry asks for nothing, or for something else."""
        scheme, _, rest = headers.get("www-authenticate", "").strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        fields = {match[1].lower(): match[2] or match[3] or "" for match in _FIELD.finditer(rest)}
        realm = fields.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https") or not urlsplit(realm).hostname:
            return None
        return cls(realm, fields.get("service", ""), fields.get("scope", ""))

    def url(self, *, is_signed: bool) -> str:
        """Where the token is; one that is signed says when, and holds something that was never there before."""
        pairs = [("service", self.service)] if self.service else []
        pairs += [("scope", item) for item in self.scope.split()]
        if is_signed:
            pairs += [("ts", str(int(time.time()))), ("nonce", secrets.token_urlsafe(16))]
        query = "&".join(f"{key}={quote(value, safe='')}" for key, value in pairs)
        return self.realm + (("&" if urlsplit(self.realm).query else "?") + query if query else "")


def signed_text(url: str) -> str:
    """What is signed to ask for a token."""
    return f"GET,{url},{_NOTHING}"
