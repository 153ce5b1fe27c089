"""GPT-2 and Llama 2 to 3.2, one decoder built from ``library.nn``."""
