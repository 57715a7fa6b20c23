"""The folder of models as it lies on the disk: manifests, blobs, who works on them, and room for more."""
