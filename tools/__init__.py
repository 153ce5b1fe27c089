"""Command line tools; each runs on its own as ``python tools/<name>.py``. ``command`` is what they share."""
