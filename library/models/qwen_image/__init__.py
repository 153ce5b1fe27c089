"""Qwen-Image and its edit models."""
