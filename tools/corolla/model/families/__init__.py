"""One module per model family, named as the `model_type` of its checkpoints; each defines FAMILY."""
