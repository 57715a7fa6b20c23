"""LiteLLM: by Ollama's, OpenAI's and Anthropic's API."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

URL, MODEL, EMBEDDER = sys.argv[1:]

ways = {
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "-"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "-"},
}
found: dict[str, object] = {}
for name, way in ways.items():
    asked = {"messages": [{"role": "user", "content": "hello fox"}], "max_tokens": 12, "temperature": 0, **way}
    whole = litellm.completion(**asked)
    streamed = "".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**asked, stream=True))
    found[name] = {"text": whole.choices[0].message.content, "streamed": streamed, "tokens": whole.usage.completion_tokens}
embedded = litellm.embedding(f"openai/{EMBEDDER}", ["a fox", "a dog"], api_base=f"{URL}/v1", api_key="-", encoding_format="float")
found["vectors"] = [item["embedding"] for item in embedded.data]
print(json.dumps(found))
