"""Adapter files in every published layout, and their metadata."""
