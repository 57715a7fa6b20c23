"""Who this machine is to registries: an ed25519 key in OpenSSH's format, where Ollama has it; made when first needed.

Signs what it is given; knows not what that is for.
"""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from puna.errors import SourceError
from puna.store.disk.files import make_folder, read_limited, sync_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_KEY_BYTES = 64 << 10


class Identity:
    """The key in one file; a file that is not there is made.

    Errors of all methods: SourceError naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key: Ed25519PrivateKey | None = None

    @property
    def public(self) -> str:
        """The key's public half, in base64 as OpenSSH writes it."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        text = self._load().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        return text.split()[1].decode()

    @property
    def line(self) -> str:
        """What people paste: type and key."""
        return f"ssh-ed25519 {self.public}"

    def authorization(self, text: str) -> str:
        """``<public key>:<signature>`` over a text, as the Authorization header has it."""
        return f"{self.public}:{base64.b64encode(self._load().sign(text.encode())).decode()}"

    def _load(self) -> Ed25519PrivateKey:
        if self._key is None:
            self._key = self._read() or self._make()
        return self._key

    def _read(self) -> Ed25519PrivateKey | None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        try:
            key = load_ssh_private_key(read_limited(self.path, MAX_KEY_BYTES), password=None)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise SourceError(f"the key {self.path} cannot be used: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise SourceError(f"the key {self.path} cannot be used: it is no ed25519 key")
        return key

    def _make(self) -> Ed25519PrivateKey:
        """The first of several processes that make one wins."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
        try:
            make_folder(self.path.parent)
            if not _write_once(self.path, private, 0o600):
                return self._read() or self._make()
            _write_once(self.path.with_name(f"{self.path.name}.pub"), public, 0o644)
        except OSError as error:
            raise SourceError(f"the key {self.path} could not be made: {error.strerror}") from error
        return key


def _write_once(path: Path, content: bytes, mode: int) -> bool:
    """Write a file whole unless there is one; returns whether there was none."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
