"""What does not go with a pipeline (``pp``), for LoRAs and for language models; see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from library.config.instruction_schema import InstructionConfig
from library.config.optimizer_conflicts import estimates_step_size
from library.config.outcomes import saves_with_base_weights, trains_text_encoders
from library.config.parallel_schema import ParallelConfig

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.llm_schema import LLMConfig
    from library.config.schema import TrainConfig

Options = dict[str, tuple[object, str]]  # name -> (whether it is set, reason and remedy)
_ALONE = "is not made for pp; remove one of them"


def pipeline_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``pp``."""
    training, kind = config.training, config.model.model_type
    lengths = f"{kind} keeps captions' lengths, so that parts of a batch differ in shape; use shard"
    if isinstance(data := getattr(config, "instructions", None), InstructionConfig):
        yield from _too_many_pieces(config.parallel, data.train_batch_size)
    yield from _conflicts(
        config.parallel,
        {
            "model_type": (kind == "z_image", lengths),
            "save_format": (
                saves_with_base_weights(config),
                f"{config.saving.save_format}'s DoRA is made with base weights that other stages have; set "
                'save_format = "diffusers"',
            ),
            "blocks_to_swap": (training.blocks_to_swap, "a stage has few blocks; raise pp, or remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _ALONE),
            "preflight": (training.preflight, "loads the model whole for its trial; remove it, or set pp = 1"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for pp; set "bf16"'),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "text encoders are not cut into stages; remove one of them",
            ),
        },
        splits=kind not in ("llama", "gpt2"),
    )


def llm_pipeline_conflicts(config: LLMConfig) -> Iterator[str]:
    """Yield a line for each option of pretraining that does not go with ``pp``."""
    kind = config.optimizer.optimizer_type
    yield from _too_many_pieces(config.parallel, config.data.train_batch_size)
    yield from _conflicts(
        config.parallel,
        {
            "optimizer_type": (
                estimates_step_size(kind),
                f"{kind} sums over all weights, of which a stage has a part; use AdamW or Muon, or pp = 1",
            ),
            "save_state": (
                config.saving.save_state and kind.lower() == "muon",
                "of Muon the states of stages are not gathered; use AdamW, or save models alone",
            ),
            "full_bf16": (config.training.full_bf16, 'is not made for pp; set mixed_precision = "bf16" instead'),
            "torch_compile": (config.accelerate.torch_compile, _ALONE),
        },
        splits=False,
    )


def _too_many_pieces(parallel: ParallelConfig, batch: int) -> Iterator[str]:
    if parallel.is_pipelined and (parallel.microbatches or 1) > batch:
        yield f"microbatches: {parallel.microbatches} pieces of a train_batch_size of {batch}; raise that or lower it"


def _conflicts(parallel: ParallelConfig, options: Options, splits: bool) -> Iterator[str]:
    """Yield a line for each of ``options`` that is set; ``splits`` says whether a stage's layers can be split by tp."""
    if not parallel.is_pipelined:
        for key in ("microbatches", "schedule", "stage_balance"):
            if key in parallel.model_fields_set:
                yield f"{key}: has no effect without pp; set pp to the number of stages, or remove it"
        return
    beside: Options = {
        "shard": (parallel.is_sharded, "a stage's weights are not split once more; set shard = 1, and raise pp"),
        "tp": (parallel.tp > 1 and not splits, "of language models a stage is not split once more; set tp = 1"),
    }
    for key, (is_set, reason) in (beside | options).items():
        if is_set:
            yield f"{key}: {reason}"
