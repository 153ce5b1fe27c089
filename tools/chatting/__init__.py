"""The chat of ``tools/chat.py``: its sessions, the terminal and the browser page."""
