"""What is trained: an image LoRA, a chat LoRA, a language model from scratch."""
