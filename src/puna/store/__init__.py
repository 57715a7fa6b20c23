"""The model store: names, blobs, manifests, Modelfiles, creating models and pulling them from sources.

Laid out on disk exactly as Ollama's, so either program works on the other's store. Knows nothing of HTTP and runs no model.
"""
