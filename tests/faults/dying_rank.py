"""train_lora.py, one of whose processes dies in the middle of a step: started by tests, through a launcher.

``DIES`` is ``pass:how``: at its so-manieth backward pass process 1 raises an exception (``error``), runs out of memory
(``memory``), or is killed by the signal that nothing can catch (``kill``). The file ``died`` in the folder tells when.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from accelerate import Accelerator

from train_lora import main

backward, passed = Accelerator.backward, 0
doomed, how = os.environ["DIES"].split(":")


def backward_or_die(accelerator: Accelerator, loss: object, **more: object) -> None:
    """Do as accelerate does, until the pass at which the process dies: the other waits for its gradients."""
    global passed
    passed += 1
    if passed == int(doomed) and accelerator.process_index == 1:
        Path("died").touch()
        if how == "error":
            raise RuntimeError("the step breaks here")
        if how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        os.kill(os.getpid(), signal.SIGKILL)
    backward(accelerator, loss, **more)


Accelerator.backward = backward_or_die  # type: ignore[method-assign]
main()
