"""FLUX.1 dev, schnell, Fill and Kontext."""
