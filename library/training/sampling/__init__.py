"""Samples during training: prompts, their control images, images and answers."""
