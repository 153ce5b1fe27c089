"""Adapter layers: LoRA and DoRA, LyCORIS's LoKr and LoHa."""
