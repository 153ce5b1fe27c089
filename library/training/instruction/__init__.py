"""A LoRA on a language model, from conversations."""
