"""How tools/inspect_model.py shows what it found: tables for the terminal, a picture for LoRAs."""
