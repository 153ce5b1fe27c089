"""Command line tools; each runs on its own as ``python tools/<name>.py``."""
