"""LangChain: its Ollama and its OpenAI classes; whole, streaming, with a tool and a schema, and vectors."""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL, EMBEDDER = sys.argv[1:]


class Colour(BaseModel):
    """A colour."""

    name: Literal["red", "green", "blue"]
    is_dark: bool


ollama = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=12)
openai = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="-", temperature=0, max_completion_tokens=12)
found: dict[str, object] = {}
for name, chat in {"ollama": ollama, "openai": openai}.items():
    whole = chat.invoke([HumanMessage("hello fox")])
    streamed = "".join(str(piece.content) for piece in chat.stream("hello fox"))
    usage = whole.usage_metadata
    found[name] = {"text": whole.content, "streamed": streamed, "tokens": usage["output_tokens"], "prompt": usage["input_tokens"]}
roomy = ChatOllama(model=MODEL, base_url=URL, temperature=0, num_predict=200)
found["structured"] = roomy.with_structured_output(Colour, method="json_schema").invoke("a colour").model_dump()
found["structured_openai"] = (
    ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="-", max_completion_tokens=200)
    .with_structured_output(Colour, method="json_schema")
    .invoke("a colour")
    .model_dump()
)
texts = ["a fox", "a dog"]
found["vectors"] = OllamaEmbeddings(model=EMBEDDER, base_url=URL).embed_documents(texts)
compatible = OpenAIEmbeddings(model=EMBEDDER, base_url=f"{URL}/v1", api_key="-", check_embedding_ctx_length=False)
found["vectors_openai"] = compatible.embed_documents(texts)
print(json.dumps(found))
