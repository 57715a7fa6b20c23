"""What is set about the places outside that models come from and go to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from puna.settings import Settings

home = Path.home


@dataclass(frozen=True)
class Elsewhere:
    """Defaults are those of the settings."""

    n_streams: int = 4  # connections over which one file comes
    hub: str = "https://huggingface.co"
    hub_token: str = field(default="", repr=False)
    account: str = "https://ollama.com"  # where one signs in
    key_path: Path = field(default_factory=lambda: home() / ".ollama" / "id_ed25519")

    @classmethod
    def of(cls, settings: Settings) -> Elsewhere:
        return cls(
            n_streams=settings.max_transfer_streams,
            hub=settings.hub_endpoint,
            hub_token=settings.hub_token,
            account=settings.cloud_base_url,
        )
