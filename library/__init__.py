"""Tandem: LoRA training for diffusion transformers, the same image in bf16 and fp8.

Data flows one way through this package, and imports only ever point the other way:
config -> data, models, precision (on nn) -> networks -> training -> scripts and tools.
"""

import logging
import os

__version__ = "0.1.0"

# OpenMP's threads spin while they wait for each other, those of GNU's runtime for milliseconds by default. Beside other
# programs they so hold the cores that those they wait for need, and a step takes several times as long
# (docs/benchmarks.md). The runtime reads the number of turns as torch is imported; processes that are started inherit
# it. What the user has set stays.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

# transformers and bitsandbytes speak of optional kernels and of torchvision, which Tandem does not use, at import.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
