"""What makes the repository's own assets and generated pages; no user needs it."""
