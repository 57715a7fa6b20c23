"""Model registries: Ollama's, those that speak its protocol, the hub's, and registries of containers that hold GGUF files."""
