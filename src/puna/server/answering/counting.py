"""How many tokens a prompt has, with those of its images: only the runner knows, and is asked once about each image."""

from __future__ import annotations

from puna import wire
from puna.server.answering.images import in_text
from puna.server.placing.loaded import Place
from puna.server.prompting.plan import PromptPlan

_SPECIAL_TOKENS = 4  # that a tokenizer may add around a text


class TokenCount:
    """For the prompts that may be made of one plan, at its place."""

    def __init__(self, place: Place, plan: PromptPlan) -> None:
        self._place = place
        self._images = plan.images
        self._salt = plan.request.caller.salt
        self._n_tokens: dict[str, int] = {}  # of each image, by marker

    async def of(self, text: str) -> int:
        """Errors: BadRequest naming an image that is none; RunnerDied."""
        markers = [image.marker for image in in_text(text, self._images)]
        n_image_tokens = await self._of_images(text) if markers else 0
        return len(await self._place.runner.tokenize(text, markers=markers)) + n_image_tokens

    async def fits(self, text: str) -> tuple[bool, int]:
        """Whether a prompt fits the context, and its tokens, at most, if it is plain that it does."""
        if not in_text(text, self._images):
            n_most = len(text.encode()) + _SPECIAL_TOKENS  # a token is a byte at least
            if n_most <= self._place.n_ctx:
                return True, n_most
        n_tokens = await self.of(text)
        return n_tokens <= self._place.n_ctx, n_tokens

    async def _of_images(self, text: str) -> int:
        if not self._n_tokens:
            files = [image.data for image in self._images]
            request = wire.ImagesRequest(images=files, salt=self._salt, n_ctx=self._place.n_ctx)
            found = await self._place.runner.image_tokens(request)
            self._n_tokens = {image.marker: n for image, n in zip(self._images, found, strict=True)}
        return sum(n * text.count(marker) for marker, n in self._n_tokens.items())
