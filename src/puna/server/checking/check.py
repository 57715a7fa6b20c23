"""Whether a request for an answer can be served: opens the model, refuses what it or this server cannot do, merges the options.

Every rule stands once, since all APIs make native requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.api import options as model_options
from puna.api.generate import ChatRequest, GenerateRequest
from puna.api.options import Options
from puna.errors import BadRequest
from puna.llm.load import LoadRequirements, load_requirements
from puna.prompt.exchange import Think
from puna.server.checking.grammar import grammar_of
from puna.server.checking.models import check_images, check_keep_alive, open_model, sees
from puna.server.checking.request import InferenceRequest
from puna.server.http.caller import Caller
from puna.settings import Settings
from puna.store.models.model import StoredModel
from puna.store.store import Store
from puna.wire import Grammar

_MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can be served, with the model that it is for."""

    caller: Caller
    native: ChatRequest | GenerateRequest
    model: StoredModel
    options: Options
    load: LoadRequirements
    keep_alive: float | None
    think: Think  # None: the model cannot, or the prompt is raw
    grammar: Grammar | None
    is_raw: bool
    warnings: list[str]  # what of the request has no effect


async def check(request: InferenceRequest, store: Store, settings: Settings) -> CheckedRequest:
    """Errors: what opening the model raises; BadRequest for what it or this server cannot do; OptionTypeError; Forbidden."""
    native = request.native
    model = await open_model(store, request.caller, native.model, native.projector)
    _check_abilities(model, native)
    unused = list(request.unused)
    think = _think(model, native)
    if think and "thinking" not in model.capabilities:
        if not request.thinks_if_able:
            raise BadRequest(f'"{native.model}" does not support thinking')
        think = None
        unused.append("thinking has no effect: the model cannot")
    is_raw = isinstance(native, GenerateRequest) and (native.raw or _continues_as_it_is(request, native, model))
    options = model_options.merge(request.defaults, model.parameters, native.options)
    check_keep_alive(request.caller, native.keep_alive)
    return CheckedRequest(
        caller=request.caller,
        native=native,
        model=model,
        options=options,
        load=load_requirements(
            options,
            settings,
            n_ctx_train=model.context_length or None,
            adapters=model.adapter_paths,
            projector=next(iter(model.projector_paths), None),
            has_vision=sees(model),
        ),
        keep_alive=native.keep_alive,
        think=None if is_raw else think,
        grammar=grammar_of(native),
        is_raw=is_raw,
        warnings=[
            *unused,
            *native.unused,
            *model_options.warnings(model.parameters),
            *model_options.warnings(native.options, request.defaults, model.parameters),
        ],
    )


def _check_abilities(model: StoredModel, native: ChatRequest | GenerateRequest) -> None:
    if isinstance(native, GenerateRequest):
        if native.raw and (native.template or native.system or native.context):
            raise BadRequest("raw mode does not support template, system, or context")
        _require(model, native.model, "generate", {"insert"} if native.suffix else set())
        if native.suffix and native.images:
            raise BadRequest("images have no place between a prompt and a suffix")
        n_images = len(native.images)
    else:
        _require(model, native.model, "chat", {"tools"} if native.tools else set())
        n_images = sum(len(message.images) for message in native.messages)
    check_images(model, native.model, n_images)
    if not 0 <= native.top_logprobs <= _MAX_TOP_LOGPROBS:
        raise BadRequest(f"top_logprobs must be between 0 and {_MAX_TOP_LOGPROBS}")


def _require(model: StoredModel, name: str, task: str, needed: set[str]) -> None:
    if "completion" not in model.capabilities:
        raise BadRequest(f'"{name}" does not support {task}')
    missing = sorted(needed.difference(model.capabilities))
    if missing:
        raise BadRequest("\n".join(f"{model.full_name} does not support {ability}" for ability in missing))


def _think(model: StoredModel, native: ChatRequest | GenerateRequest) -> Think:
    """A model that can think does, unless it is asked not to."""
    return True if native.think is None and "thinking" in model.capabilities else native.think


def _continues_as_it_is(request: InferenceRequest, native: GenerateRequest, model: StoredModel) -> bool:
    return request.is_raw_without_template and not native.suffix and not model.has_template
