"""FLUX.3 klein."""
