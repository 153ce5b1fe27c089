"""What makes the repository's own assets, drawn figures and generated pages; no user needs it."""
