"""What a run saves and resumes from: states, LoRA files with their metadata, uploads."""
