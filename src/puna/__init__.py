"""Puna: an Ollama-compatible server with its own inference engine on ggml."""

__version__ = "0.1.0"
