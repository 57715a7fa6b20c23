"""LlamaIndex: chat, streaming, and vectors."""

from __future__ import annotations

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama

URL, MODEL, EMBEDDER = sys.argv[1:]

llm = Ollama(model=MODEL, base_url=URL, temperature=0, context_window=512, additional_kwargs={"num_predict": 12})
whole = llm.chat([ChatMessage(role="user", content="hello fox")]).message.content
streamed = "".join(piece.delta or "" for piece in llm.stream_chat([ChatMessage(role="user", content="hello fox")]))
vectors = OllamaEmbedding(model_name=EMBEDDER, base_url=URL).get_text_embedding_batch(["a fox", "a dog"])
print(json.dumps({"text": whole, "streamed": streamed, "completed": llm.complete("the quick").text, "vectors": vectors}))
