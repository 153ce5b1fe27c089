"""Attention, RoPE, norms, frozen linears, checkpointing: written once, knowing no model."""
