"""The state of one interactive conversation and the requests made from it. Knows nothing of terminals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class Session:
    model: str
    options: dict[str, Any] = field(default_factory=dict)  # what /set parameter changed
    messages: list[Message] = field(default_factory=list)
    format: Any = None
    think: bool | str | None = None
    hide_thinking: bool = False
    verbose: bool = False
    word_wrap: bool = True
    keep_alive: str | int | None = None
    projector: str = ""  # a file that the model sees with

    @property
    def model_is_file(self) -> bool:
        return self.model.startswith("/")

    @property
    def system(self) -> str:
        """The system message that holds now: the last one."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "system"), "")

    def set_system(self, text: str) -> None:
        """Add a system message, in place of one that nothing has followed yet."""
        if self.messages and self.messages[-1]["role"] == "system":
            self.messages.pop()
        self.messages.append({"role": "system", "content": text})

    def clear(self) -> None:
        """Forget the conversation, but not the system message."""
        system = self.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def load(self, model: str) -> None:
        self.model = model
        self.projector = ""
        self.messages = []
        self.options = {}

    def load_request(self) -> dict[str, Any]:
        return self._with_common({"model": self.model})

    def chat_request(self) -> dict[str, Any]:
        request = {"model": self.model, "messages": self.messages, "format": self.format, "options": self.options}
        return self._with_common({key: value for key, value in request.items() if value})

    def save_request(self, name: str) -> dict[str, Any]:
        """A request to create *name* from this model and what this session has added to it."""
        spoken = [m for m in self.messages if m["role"] != "system"]
        base = {} if self.model_is_file else {"from": self.model}
        added = {"system": self.system, "parameters": self.options, "messages": spoken}
        return {"model": name, **base, **{key: value for key, value in added.items() if value}}

    def _with_common(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.think is not None:
            request["think"] = self.think
        if self.keep_alive is not None:
            request["keep_alive"] = self.keep_alive
        if self.projector:
            request["projector"] = self.projector
        return request
