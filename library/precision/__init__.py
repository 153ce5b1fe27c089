"""fp8: formats, quantised linear layers, checkpoints read and written, and what rounding does to a layer."""
