"""From a checked request to a job: opens the model, checks that it can do what is asked, merges the options.

The OpenAI routes make native requests and come here too, so every rule stands once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from starlette.requests import HTTPConnection

from puna.api import options as model_options
from puna.api.generate import ChatRequest, GenerateRequest
from puna.errors import BadRequest, Forbidden, NotFound, UnsupportedModel
from puna.llm.load import wanted_load
from puna.prompt import harmony
from puna.prompt.ending import Ending, begun_text, ending_of
from puna.prompt.render import PromptRequest, Think
from puna.server.answering.generation import Job, MakePrompt, Prompt, Room
from puna.server.answering.rendering import Renderers
from puna.server.http.access import may_manage, salt_of
from puna.server.metrics import Metrics
from puna.server.placing.scheduler import Scheduler
from puna.server.prompting import conversation as prompts
from puna.server.prompting.constraint import grammar_of, thoughts_of, with_thoughts
from puna.settings import FOREVER, Settings
from puna.store.models.details import read_details
from puna.store.models.model import StoredModel
from puna.store.store import Store

log = logging.getLogger(__name__)

Defaults = Mapping[str, Any]
NONE: Defaults = MappingProxyType({})


@dataclass(frozen=True)
class Caller:
    """Who asks, when, and what there is to serve the request with."""

    settings: Settings
    store: Store
    scheduler: Scheduler
    metrics: Metrics
    renderers: Renderers
    is_local: bool
    may_manage: bool
    salt: str
    began_ns: int

    @classmethod
    def of(cls, request: HTTPConnection) -> Caller:
        state = request.app.state
        what_is_there = (state.settings, state.store, state.scheduler, state.metrics, state.renderers)
        return cls(*what_is_there, _is_loopback(request), may_manage(request), salt_of(request), time.monotonic_ns())

    async def open(self, name: str) -> StoredModel:
        """A model of the store, or for callers on this machine a GGUF file by its path.

        Errors: NotFound; InvalidName; FileFormatError; UnsupportedModel.
        """
        return await asyncio.to_thread(self._open, name)

    def _open(self, name: str) -> StoredModel:
        if not name:
            raise NotFound("model '' not found")
        is_file = name.startswith(("/", "./")) and name.endswith(".gguf")
        if is_file and not self.is_local:
            raise NotFound(f"model '{name}' not found: files are served to callers on this machine only")
        model = self.store.from_file(name) if is_file else self.store.get(name)
        if model.model_path is None:
            raise UnsupportedModel(f"{name!r} has no weights: it is a reference to a model elsewhere")
        if model.file is None:
            read_details(model.model_path)  # raises what is wrong with the file
        return model

    def unload(self, model: StoredModel) -> None:
        """Errors: Forbidden when somebody has pinned it and the caller may not."""
        assert model.model_path is not None
        if not self.may_manage and self.scheduler.is_pinned(model.model_path):
            raise Forbidden(
                f"forbidden: {model.name} was asked to stay; to unload it needs an API key that is good for management"
            )
        self.scheduler.unload(model.model_path)

    def keep_alive(self, model: StoredModel, wanted: float | None) -> float | None:
        """As the scheduler takes it. Who may not pin models leaves those alone that are pinned.

        Errors: Forbidden.
        """
        assert model.model_path is not None
        if self.may_manage or wanted is None:
            return wanted
        if wanted == FOREVER:
            raise Forbidden("forbidden: keep_alive -1 needs an API key that is good for management")
        return None if self.scheduler.is_pinned(model.model_path) else wanted

    async def load(self, job: Job) -> None:
        async with self.scheduler.acquire(job.model, job.wanted, job.keep_alive):
            pass

    async def prompt_of(self, job: Job) -> str:
        """What the model would be given; it is loaded for that, since only the runner can count tokens."""
        async with self.scheduler.acquire(job.model, job.wanted, job.keep_alive) as loaded:
            return (await job.make_prompt(Room.of(loaded, job.wanted))).text

    async def count_tokens(self, job: Job) -> int:
        async with self.scheduler.acquire(job.model, job.wanted, job.keep_alive) as loaded:
            prompt = await job.make_prompt(Room.of(loaded, job.wanted))
            return len(await loaded.runner.tokenize(prompt.text))


def _is_loopback(request: HTTPConnection) -> bool:
    if request.client is None:  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def generate_job(
    caller: Caller, model: StoredModel, request: GenerateRequest, defaults: Defaults = NONE, unused: Sequence[str] = ()
) -> Job:
    """*defaults* are options that count less than the model's; *unused* tells what of the client's request has no effect.

    Errors: BadRequest for what the model or this server cannot do; OptionTypeError.
    """
    if request.raw and (request.template or request.system or request.context):
        raise BadRequest("raw mode does not support template, system, or context")
    _require(model, request.model, "generate", {"insert"} if request.suffix else set())
    _check_images(model, request.model, has_images=bool(request.images))
    think = _common_checks(model, request)

    async def make_prompt(room: Room) -> Prompt:
        if request.raw:
            return Prompt(request.prompt)
        if request.suffix:
            source = await asyncio.to_thread(prompts.source_of, model, request.template)
            wanted = PromptRequest(source, think=think, prefix=request.prompt, suffix=request.suffix)
            return Prompt((await caller.renderers.render(wanted)).text)
        if not (request.template or model.messages) and await asyncio.to_thread(prompts.continues_texts, model):
            return Prompt("\n\n".join(text for text in (request.system or model.system, request.prompt) if text))
        turns = prompts.assemble(
            model,
            [{"role": "user", "content": request.prompt}],
            request.system,
            with_messages=not request.context,
        )
        truncate = request.truncate and not request.template
        conversation = prompts.Conversation(caller.renderers, model, turns, [], think, truncate, template=request.template)
        return await conversation.prompt(room)

    extra: dict[str, Any] = {"context": request.context, "return_tokens": not request.raw}
    return _job(caller, model, request, defaults, make_prompt, None if request.raw else think, [], unused, **extra)


def chat_job(
    caller: Caller, model: StoredModel, request: ChatRequest, defaults: Defaults = NONE, unused: Sequence[str] = ()
) -> Job:
    """Errors: as generate_job."""
    _require(model, request.model, "chat", {"tools"} if request.tools else set())
    _check_images(model, request.model, has_images=any(message.images for message in request.messages))
    think = _common_checks(model, request)
    turns = prompts.assemble(model, [prompts.turn_of(message) for message in request.messages])
    ending = ending_of(
        turns,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    conversation = prompts.Conversation(caller.renderers, model, turns, request.tools, think, request.truncate, ending)
    return _job(caller, model, request, defaults, conversation.prompt, think, request.tools, unused, begun=(turns, ending))


def _job(
    caller: Caller,
    model: StoredModel,
    request: ChatRequest | GenerateRequest,
    defaults: Defaults,
    make_prompt: MakePrompt,
    think: Think,
    tools: list[dict[str, Any]],
    unused: Sequence[str],
    begun: tuple[list[prompts.Turn], Ending] = ([], Ending.ANSWER),
    **extra: Any,
) -> Job:
    template = getattr(request, "template", "")
    output = prompts.output_format(model, template)
    is_raw = getattr(request, "raw", False)
    beginning = begun_text(*begun, output.tags)
    options = model_options.merge(defaults, model.parameters, request.options)
    grammar = grammar_of(request)
    may_think = not is_raw and (not beginning or output.tags.are_open_in("", beginning))
    tags = output.tags if think and may_think else None
    has_thoughts = may_think and (bool(think) or output.is_harmony)
    if not is_raw and prompts.has_foreign_template(model, template):
        caller.renderers.warm()  # while the model is loaded
    warnings = [*unused, *request.unused, *model_options.warnings(model.parameters)]
    warnings += model_options.warnings(request.options, defaults, model.parameters)
    if "think_budget" in request.options and not has_thoughts:
        warnings.append('option "think_budget" has no effect: the model does not think')
    for warning in warnings:
        log.warning("%s", warning)
    if grammar is not None and output.is_harmony and not is_raw:
        make_prompt = _within_final(make_prompt)
        tags, has_thoughts = None, False
    return Job(
        model=model,
        options=options,
        wanted=wanted_load(options, caller.settings, n_ctx_train=model.context_length or None, adapters=model.adapter_paths),
        make_prompt=make_prompt,
        keep_alive=caller.keep_alive(model, request.keep_alive),
        truncate=request.truncate,
        shift=request.shift,
        make_parser=lambda prompt: None if is_raw else output.parser(prompt, think=bool(think), tools=tools, begun=beginning),
        show_control_tokens=not is_raw and output.needs_control_tokens(think=bool(think), tools=bool(tools)),
        make_grammar=lambda prompt: with_thoughts(grammar, tags, prompt, beginning),
        make_thoughts=lambda prompt: thoughts_of(output, prompt, options.think_budget, beginning) if has_thoughts else None,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        salt=caller.salt,
        began_ns=caller.began_ns,
        metrics=caller.metrics,
        warnings=warnings,
        **extra,
    )


def _within_final(make_prompt: MakePrompt) -> MakePrompt:
    """Begin the message that a grammar is about: in the harmony format its header is made of control tokens."""

    async def prompt(room: Room) -> Prompt:
        made = await make_prompt(room)
        return made if harmony.is_within_message(made.text) else replace(made, text=made.text + harmony.FINAL_BEGIN)

    return prompt


def _require(model: StoredModel, name: str, task: str, needed: set[str]) -> None:
    if "completion" not in model.capabilities:
        raise BadRequest(f'"{name}" does not support {task}')
    missing = sorted(needed.difference(model.capabilities))
    if missing:
        raise BadRequest("\n".join(f"{model.full_name} does not support {ability}" for ability in missing))


def _check_images(model: StoredModel, name: str, *, has_images: bool) -> None:
    if has_images and "vision" in model.capabilities:
        raise BadRequest("images are not supported yet")
    if has_images:
        raise BadRequest(f'"{name}" does not support images')


def _common_checks(model: StoredModel, request: ChatRequest | GenerateRequest) -> Think:
    """What generate and chat refuse alike; returns whether the model shall think."""
    if not 0 <= request.top_logprobs <= 20:
        raise BadRequest("top_logprobs must be between 0 and 20")
    can_think = "thinking" in model.capabilities
    if request.think and not can_think:
        raise BadRequest(f'"{request.model}" does not support thinking')
    return True if request.think is None and can_think else request.think
