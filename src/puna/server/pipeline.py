"""The way of a request: an API reads it, here it is checked, its prompt planned, a place found and the answer streamed.

Each step hands one object to the next; the API gives the answer its shape.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from puna.errors import Forbidden
from puna.server.answering.answers import answers
from puna.server.answering.counting import TokenCount
from puna.server.answering.embedding import Embedded, embed
from puna.server.answering.fitting import Prompt, prompt_for
from puna.server.answering.parts import Choices, Parts
from puna.server.checking.check import CheckedRequest, check
from puna.server.checking.embedding import CheckedEmbedding, check_embedding
from puna.server.checking.models import open_model
from puna.server.checking.request import EmbeddingRequest, InferenceRequest
from puna.server.http.caller import Caller
from puna.server.metrics import Metrics
from puna.server.placing.loaded import Place
from puna.server.placing.placement import Placement
from puna.server.prompting.plan import PromptPlan, plan
from puna.server.rendering import Renderers
from puna.settings import Settings
from puna.store.store import Store


@dataclass(frozen=True)
class Pipeline:
    settings: Settings
    store: Store
    scheduler: Placement
    metrics: Metrics
    renderers: Renderers

    @classmethod
    def of(cls, request: HTTPConnection) -> Pipeline:
        found: Pipeline = request.app.state.pipeline
        return found

    async def plan(self, request: InferenceRequest) -> PromptPlan:
        """All that can be said of a request before its model is loaded.

        Errors: those of check and of prompting.plan.
        """
        planned = await plan(await check(request, self.store, self.settings))
        if planned.has_foreign_template:
            self.renderers.warm()  # while the model is loaded
        return planned

    async def answers(self, planned: PromptPlan, n: int = 1) -> Choices:
        """So many answers to one prompt, which is made once. Closing the generator cancels the work wherever it is.

        Errors: what loading, rendering and the runner raise.
        """
        request = planned.request
        with ExitStack() as followed:
            generations = [
                followed.enter_context(self.metrics.generation(request.model, request.caller.began_ns)) for _ in range(n)
            ]
            async with self._place(request) as place:
                for generation in generations:
                    generation.placed()
                prompt = await prompt_for(place, planned, self.renderers)
                async with aclosing(answers(prompt, generations)) as parts:
                    async for numbered in parts:
                        yield numbered

    async def answer(self, planned: PromptPlan) -> Parts:
        """The only answer's parts."""
        async with aclosing(self.answers(planned)) as numbered:
            async for _, part in numbered:
                yield part

    async def embed(self, request: EmbeddingRequest) -> Embedded | None:
        """None without inputs: then the model is only loaded.

        Errors: those of check_embedding, of loading and of the runner.
        """
        checked = await check_embedding(request, self.store, self.settings)
        if not checked.texts.inputs:
            async with self._place(checked):
                return None
        with self.metrics.embedding(checked.model, checked.caller.began_ns, checked.texts) as report:
            async with self._place(checked) as place:
                embedded = await embed(place, checked)
            report(embedded.reply.prompt_eval_count)
        return embedded

    async def load(self, planned: PromptPlan) -> None:
        async with self._place(planned.request):
            pass

    async def unload(self, caller: Caller, name: str) -> None:
        """Errors: what opening the model raises; Forbidden when somebody has pinned it and the caller may not."""
        model = await open_model(self.store, caller, name)
        if not caller.may_manage and self.scheduler.models.is_pinned(model.model_path):
            raise Forbidden(
                f"forbidden: {model.name} was asked to stay; to unload it needs an API key that is good for management"
            )
        self.scheduler.unload(model.model_path)

    async def prompt_of(self, planned: PromptPlan) -> Prompt:
        """What the model would be given; it is loaded for that, since only the runner can count tokens."""
        async with self._place(planned.request) as place:
            return await prompt_for(place, planned, self.renderers)

    async def count_tokens(self, planned: PromptPlan) -> int:
        async with self._place(planned.request) as place:
            prompt = await prompt_for(place, planned, self.renderers)
            return await TokenCount(place, planned).of(prompt.text)

    @asynccontextmanager
    async def _place(self, request: CheckedRequest | CheckedEmbedding) -> AsyncGenerator[Place, None]:
        """Who may not manage models leaves those that are pinned as they are."""
        acquired = self.scheduler.acquire(
            request.model, request.load, request.keep_alive, leaves_pinned=not request.caller.may_manage
        )
        async with acquired as loaded:
            load_ns = time.monotonic_ns() - request.caller.began_ns
            yield Place(loaded.runner, request.load.n_ctx_in(loaded.n_ctx), load_ns)
