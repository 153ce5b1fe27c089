"""Tandem: LoRA training for diffusion transformers, the same image in bf16 and fp8.

Data flows one way through this package, and imports only ever point the other way:
config -> data, models, precision (on nn) -> networks -> training -> scripts and tools.
"""

import logging
import os

__version__ = "0.1.0"

# transformers and bitsandbytes speak of optional kernels and of torchvision, which Tandem does not use, at import.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
