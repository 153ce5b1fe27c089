"""LoRA and other adapters: layers, injection into a model, files, merging."""
