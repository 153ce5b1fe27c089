"""``torch_compile``: whether a run's blocks are compiled, how, and where compiled code is kept.

Blocks of one class share code: of FLUX's 57 two are compiled. What lies around the blocks stays as it is. Hooks of a
block run outside of its compiled ``forward``, so that block swap brings weights in before it (``memory.block_swap``).

*Auto.* FLUX.1 at 1024x1024 on an H200: a step took 1.115 s, compiled 0.585; the first one took 56 s. So compiling pays
from the 107th step on; half as fast again is a card that has to compute more a step. :data:`WORTH` steps leave room for
batches of several sizes and for validation, which are compiled too. Batches of chats are each as long as their longest
chat, of which the compiler knows nothing beforehand: they stay as they are unless they are packed.

*Kept.* PyTorch keeps compiled code in a folder, by default under /tmp; here it is one that a reboot does not clear.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton

from library.config.rules import conflicts_of_true, reason_alone
from library.config.run_schema import AccelerateConfig
from library.training.memory.fake_cuda import cache_folder

WORTH = 300  # steps
# Of code for one block: with and without gradients, for one sample and several, a LoRA that is bypassed, in training
# and in sampling; at PyTorch's 8 the rest of the run would be eager.
_VARIANTS = 64
# Without a word on these PyTorch keeps no code that switches autocast, or names a kernel of attention. All that they
# depend on is in the graph, by which code is kept.
_SWITCHES = (
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
    "torch.nn.attention._backend_from_string",
    "torch.nn.attention._sdpa_kernel",
)


def plan_compilation(config: Any, device: torch.device, steps: int, lengths_vary: bool = False) -> tuple[bool, str]:
    """Return whether a run compiles its blocks, and what to say of it, which on a CPU may be nothing.

    Args:
        config: the run's, of any training.
        device: where it computes.
        steps: that are left to train.
        lengths_vary: nearly every batch has another length.
    """
    if config.accelerate.torch_compile != "auto":
        return config.accelerate.torch_compile, ""
    if device.type != "cuda":
        given = [key for key in ("dynamo_backend", "dynamo_mode") if key in config.accelerate.model_fields_set]
        text = f"torch_compile: auto compiles on a GPU alone, so {' and '.join(given)} has no effect; set it to true"
        return False, text if given else ""
    reasons = [reason_alone(each, "torch_compile") for each in conflicts_of_true(config, "torch_compile")]
    if config.accelerate.dynamo_backend == "inductor" and not (has_triton() and _has_c_compiler()):
        reasons.append("it needs triton, a C compiler and a card of compute capability 7.0")
    if lengths_vary:
        reasons.append("batches differ in length; torch_compile = true compiles for any")
    if steps < WORTH:
        reasons.append(f"{steps:,} steps would not earn the minute that it takes")
    if reasons:
        return False, f"torch_compile: blocks are not compiled, {reasons[0]}"
    return True, f"torch_compile: blocks are compiled ({steps:,} steps), the first steps take a minute longer"


def _has_c_compiler() -> bool:
    """Whether triton can compile what launches its kernels; on Windows it brings its own."""
    return sys.platform == "win32" or any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))


def compile_blocks(blocks: Iterable[nn.Module], accelerate: AccelerateConfig, dynamic: bool | None = None) -> None:
    """Let ``blocks`` run compiled, in place.

    Chosen by ``"auto"``, code that the compiler cannot make runs as it is, with PyTorch's warning.

    Args:
        blocks: of a model.
        accelerate: the compiler and its mode.
        dynamic: batches differ in size, and one code takes any; None: it follows from the first batches.
    """
    with suppress(OSError):  # a home that cannot be written to: PyTorch's own folder
        (folder := cache_folder() / "inductor").mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    dynamo.suppress_errors = is_auto = accelerate.torch_compile == "auto"
    torch._functorch.config.force_non_lazy_backward_lowering = is_auto  # so that its errors can be passed over, too
    dynamo.recompile_limit = _VARIANTS
    inductor.unsafe_marked_cacheable_functions = dict.fromkeys(_SWITCHES, torch.__version__)
    options: dict[str, Any] = {"backend": accelerate.dynamo_backend, "mode": accelerate.dynamo_mode, "dynamic": dynamic}
    for block in blocks:
        block.forward = torch.compile(block.forward, **options)
        block.compile_options = options  # type: ignore[assignment]  # for ``nn.checkpointing``
