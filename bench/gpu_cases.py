"""What ``bench/gpu.py`` measures: a case is a row, and a function that builds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from bench.families import FAMILIES, Sizes, build_transformer, peft_lora, tandem_lora
from bench.lora_step import LoraStep, call_transformer

RANK = 16
Base = Literal["bf16", "fp8 dequant", "fp8 scaled_mm", "fp8 cast"]


@dataclass(frozen=True)
class GpuCase:
    """One row.

    Attributes:
        family: a key of ``FAMILIES``.
        trainer: tandem or peft (diffusers + peft).
        batch: images a step.
        base: the frozen weights and how they are multiplied; ``fp8 cast`` is what the kohya trainers do, weights
            cast to fp8 without scales, cast up for each product.
        checkpointing: every block is recomputed in backward.
        every, kept_mb, offloaded: with it, checkpoint_every_n_blocks, activation_budget_mb, cpu_offload_checkpointing.
        swapped: blocks whose weights wait in host memory.
        compiled: regional compilation.
    """

    family: str
    trainer: str = "tandem"
    batch: int = 1
    base: Base = "bf16"
    checkpointing: bool = False
    every: int = 1
    kept_mb: int = 0
    offloaded: bool = False
    swapped: int = 0
    compiled: bool = False

    def name(self) -> str:
        """Return the row's name."""
        memory = [
            "checkpointing" if self.checkpointing else "",
            f"every {self.every}" if self.every > 1 else "",
            f"keep {self.kept_mb}" if self.kept_mb else "",
            "offload" if self.offloaded else "",
            f"swap {self.swapped}" if self.swapped else "",
            "compiled" if self.compiled else "",
        ]
        parts = [self.family, f"b{self.batch}", self.trainer, self.base, *filter(None, memory)]
        return ", ".join(parts)


def cases(families: list[str]) -> list[GpuCase]:
    """Return the rows, the most telling first: a run that is out of time ends in the middle."""
    by_family = []
    for family in families:
        plain = GpuCase(family)
        saved = replace(plain, checkpointing=True)
        rows = [
            saved,
            replace(saved, trainer="peft"),
            replace(saved, base="fp8 scaled_mm"),
            replace(saved, base="fp8 dequant"),
            plain,
            replace(plain, trainer="peft"),
            replace(saved, swapped=16),
            replace(saved, kept_mb=8192),
            replace(saved, offloaded=True),
            replace(saved, compiled=True),
            replace(saved, trainer="peft", compiled=True),
            replace(saved, base="fp8 scaled_mm", compiled=True),
            replace(saved, trainer="peft", base="fp8 cast"),
            replace(saved, base="fp8 dequant", swapped=16),
            replace(saved, batch=4),
            replace(saved, batch=4, trainer="peft"),
            replace(saved, batch=4, base="fp8 scaled_mm"),
            replace(plain, swapped=16),
            replace(saved, every=2),
            replace(saved, base="fp8 dequant", swapped=16, offloaded=True),
            replace(saved, base="fp8 dequant", compiled=True),
            replace(plain, base="fp8 dequant"),
        ]
        by_family.append(rows)
    return [case for same in zip(*by_family, strict=True) for case in same]


def sizes_of(case: GpuCase, tiny: bool) -> Sizes:
    """Return the published model at 1024 x 1024, or something tiny with as many kinds of blocks."""
    full = replace(FAMILIES[case.family].full, batch=case.batch)
    if not tiny:
        return full
    few = (4, 8)[-len(full.blocks) :]
    return replace(full, width=256, head_dim=64, blocks=few, image_sides=(4, 4), text_tokens=8)


def build(case: GpuCase, device: torch.device, tiny: bool) -> LoraStep:
    """Return the loaded case."""
    family, sizes = FAMILIES[case.family], sizes_of(case, tiny)
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(device))
    if case.trainer == "peft":
        trained = peft_lora(case.family, transformer, RANK, fp8_cast=case.base == "fp8 cast")
    else:
        trained = _tandem(case, transformer, device, tiny)
    if case.checkpointing:
        transformer.enable_gradient_checkpointing(_checkpointing(case, transformer, device))
    if case.compiled:
        transformer.compile_repeated_blocks(backend="eager" if tiny else "inductor")
    return LoraStep(transformer, trained, call_transformer, family.inputs(sizes, device), autocast=True)


def _checkpointing(case: GpuCase, transformer: Any, device: torch.device) -> Any:
    """Return what calls the blocks; None for what diffusers does."""
    if case.trainer == "peft":
        return None
    from library.nn.checkpointing import ActivationCheckpointing, HostOffload

    blocks = len(FAMILIES[case.family].blocks(transformer))
    offload = HostOffload(device) if case.offloaded else None
    return ActivationCheckpointing(blocks, case.every, case.kept_mb * 2**20, offload)


def _tandem(case: GpuCase, transformer: Any, device: torch.device, tiny: bool) -> list[torch.nn.Parameter]:
    from library.precision.recipe import Fp8Recipe, quantize_model
    from library.training.memory.block_swap import swap_blocks

    FAMILIES[case.family].optimise_forward(transformer)
    if case.base == "fp8 dequant":
        quantize_model(transformer, Fp8Recipe("block64"), compute="dequant")
    elif case.base == "fp8 scaled_mm":
        quantize_model(transformer, Fp8Recipe("row"), compute="scaled_mm", fp8_input_gradient=True)
    if case.swapped:
        transformer.to("cpu")  # random numbers are made faster on the GPU, but a swapped model comes from the host
    trained = tandem_lora(case.family, transformer, RANK)
    if case.swapped:
        blocks = FAMILIES[case.family].blocks(transformer)
        swap_blocks(transformer, blocks, min(case.swapped, 3) if tiny else case.swapped, device)
    return trained
