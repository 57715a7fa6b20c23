"""Types of the native API about models: tags, show, create, pull, copy and delete.

Source: Ollama's REST API.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, SkipValidation, model_serializer
from typing_extensions import TypedDict

from puna.api.go_json import Request


class NamedRequest(Request):
    """A request about one model, which older clients call name."""

    model: str = ""
    name: str = ""

    @property
    def reference(self) -> str:
        return self.model or self.name


class ShowRequest(NamedRequest):
    verbose: bool = False
    system: str = ""


class DeleteRequest(NamedRequest):
    pass


class PullRequest(NamedRequest):
    name_for_it: str = Field("", alias="as")  # Puna's own: what the model shall be called here
    insecure: bool = False
    stream: bool = True


class PushRequest(NamedRequest):
    insecure: bool = False
    stream: bool = True


class TakeRequest(Request):
    """Puna's own: a file where it lies, in place of an upload."""

    file: str = ""


class CopyRequest(Request):
    source: str = ""
    destination: str = ""


class SearchRequest(Request):
    """Puna's own."""

    query: str = ""
    host: str = "hf.co"  # or a registry that lists what it has
    limit: int = Field(20, ge=1, le=1000)
    insecure: bool = False


class CreateRequest(NamedRequest):
    modelfile: str = ""  # Puna's own: all of the following that it can say, as text
    base: str = Field("", alias="from")
    files: dict[str, str] | None = None
    adapters: dict[str, str] = Field(default_factory=dict)
    template: str = ""
    system: str = ""
    license: str | list[str] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)
    messages: list[dict[str, Any]] = Field(default_factory=list)
    renderer: str = ""
    parser: str = ""
    requires: str = ""
    quantize: str = ""
    quantization: str = ""
    remote_host: str = ""
    info: dict[str, Any] = Field(default_factory=dict)
    draft_files: dict[str, str] = Field(default_factory=dict)
    draft_quantize: str = ""
    stream: bool = True

    @property
    def licenses(self) -> tuple[str, ...]:
        texts = [self.license] if isinstance(self.license, str) else self.license
        return tuple(text for text in texts if text)


class Response(BaseModel):
    """Base of replies: fields named in OMIT are left out while empty."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())
    OMIT: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value or key not in self.OMIT}


def local_time(seconds: float) -> datetime:
    """Seconds since 1970 as a time in the server's zone, with its offset."""
    return datetime.fromtimestamp(seconds).astimezone()


class ModelDetails(Response):
    OMIT = frozenset({"context_length", "embedding_length"})

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] | None = None
    parameter_size: str = ""
    quantization_level: str = ""
    context_length: int = 0
    embedding_length: int = 0


class ListedModel(Response):
    OMIT = frozenset({"remote_model", "remote_host", "capabilities"})

    name: str
    model: str
    modified_at: datetime
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[str] = []
    remote_model: str = ""
    remote_host: str = ""


class TagsResponse(Response):
    models: list[ListedModel]


class TensorDescription(TypedDict):
    """A plain dictionary: there may be a hundred thousand in one reply."""

    name: str
    type: str
    shape: list[int]


class ShowResponse(Response):
    OMIT = frozenset(
        {"license", "modelfile", "parameters", "template", "system", "messages", "remote_model", "remote_host"}
        | {"projector_info", "requires", "capabilities", "engine", "engine_reason"}
    )

    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    system: str = ""
    details: ModelDetails
    messages: list[dict[str, Any]] = []
    remote_model: str = ""
    remote_host: str = ""
    model_info: dict[str, Any] = {}
    projector_info: dict[str, Any] = {}
    tensors: SkipValidation[list[TensorDescription]] = []
    capabilities: list[str] = []
    modified_at: datetime
    requires: str = ""
    engine: str = ""  # which one runs the model: puna or compat
    engine_reason: str = ""
