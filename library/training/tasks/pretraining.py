"""From the configuration to what is trained: the model, its parameter groups, the optimizer.

What is looked at between steps: cross-entropy on held-out documents, and how the model goes on from a beginning.

How fast training is against what the hardware could do: tokens a second and model FLOPs utilisation.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the operations that the model needs, not those that are done: for a
token 6 for each weight that it is multiplied with (2 forward, 4 backward), and 12 * layers * width of heads * context
for attention. Recomputation under checkpointing does not count, so it lowers the figure as it lowers the speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from library.accelerator import build_accelerator
from library.config.pretrain_schema import LLMDataConfig, LLMModelConfig, LLMOptimizerConfig, PretrainConfig
from library.config.schema import SavingConfig, TrainingConfig
from library.errors import UserError
from library.files import write_text
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.token_batches import TokenShards
from library.llm.tokenizers import Tokenizer
from library.models.llm.files import load_lm
from library.models.llm.model import Block, TransformerLM, lm_split_plan
from library.models.llm.spec import LMConfig, preset
from library.randomness import generator
from library.training.memory.budget import recompute_blocks
from library.training.optim.factory import build_optimizer, parse_optimizer_args
from library.training.optim.muon import MuonWithAdamW
from library.training.parallel.spec import ParallelSpec, lm_split_points
from library.training.parallel.step import lockstep_batches


def pretraining_accelerator(config: PretrainConfig) -> Accelerator:
    """Return the process's accelerator; raises as ``library.accelerator.build_accelerator``."""
    if config.training.allow_tf32:
        torch.set_float32_matmul_precision("high")
    training = TrainingConfig(mixed_precision=config.training.mixed_precision)
    saving = SavingConfig(output_dir=config.saving.output_dir)
    return build_accelerator(config.accelerate, training, saving, config.logging, config.parallel)


def parallel_spec(model: TransformerLM) -> ParallelSpec:
    """Return what layouts ask about ``model``, of which all weights are trained."""
    return ParallelSpec(
        model,
        [Block.__name__],
        lambda: lm_split_points(model),
        lambda processes: lm_split_plan(model.config, processes, separate=False),
        methods=["next_logits"],  # what samples are made with
    )


def accumulation_for(config: LLMDataConfig, context: int, world: int) -> int:
    """Return how many forward passes of each process make an optimizer step.

    Raises:
        UserError: ``tokens_per_batch`` is no multiple of the tokens of one forward pass of every process.
    """
    once = config.train_batch_size * context * world
    wanted = config.tokens_per_batch or once
    if wanted % once:
        nearest = max(1, round(wanted / once)) * once
        raise UserError(
            f"tokens_per_batch: {wanted} is no multiple of {once} (train_batch_size {config.train_batch_size} x "
            f"context {context} x {world} processes); set {nearest}"
        )
    return wanted // once


def build_model(config: PretrainConfig, vocab_size: int, device: torch.device) -> TransformerLM:
    """Return the model to train, on ``device``, in fp32 (or bf16 with ``full_bf16``).

    Args:
        config: sections ``model`` and ``training`` are read.
        vocab_size: of the corpus; a preset takes it over, a published model must have it.
        device: where it goes; fresh weights are drawn on the CPU, so that they are the same everywhere.

    Raises:
        UserError: the preset is unknown, its changed sizes do not fit together, or the published model has another
            vocabulary or fewer positions.
    """
    dtype = torch.bfloat16 if config.training.full_bf16 else torch.float32
    if config.model.init_from is not None:
        model = load_lm(config.model.init_from, dtype, device, pad_vocabulary_to=config.model.pad_vocabulary_to)
        if model.config.vocab_size < vocab_size:
            raise UserError(
                f"init_from: {config.model.init_from} has {model.config.vocab_size} tokens, the corpus was made with "
                f"{vocab_size}; prepare it with the model's own tokenizer"
            )
        model.requires_grad_(True)
    else:
        model = TransformerLM(fresh_config(config.model, vocab_size))
        model.initialise(generator(config.training.seed, "weights")).to(device, dtype)
    context = training_context(config.model, model.config)
    if not model.config.has_rope and context > model.config.context:
        raise UserError(f"context: {context} is more than the model's {model.config.context} positions; lower it")
    recompute_blocks(model, model.config.layers, config.training, device)
    return model.train()


def name_ends(model: TransformerLM, tokenizer: Tokenizer) -> None:
    """Let the model's configuration say which tokens begin and end a text."""
    eos = () if tokenizer.eos is None else (tokenizer.eos,)
    model.config = replace(model.config, bos=tokenizer.bos, eos=eos)


def fresh_config(config: LLMModelConfig, vocab_size: int) -> LMConfig:
    """Return the preset with the keys that change it and the corpus's vocabulary.

    Raises:
        UserError: the preset is unknown, or sizes do not fit together.
    """
    assert config.preset is not None
    base = preset(config.preset)
    changes: dict[str, Any] = {key: value for key in ("width", "layers") if (value := getattr(config, key))}
    heads = config.heads or base.heads
    width = config.width or base.width
    kv_heads = config.kv_heads or (heads if base.kv_heads == base.heads else min(base.kv_heads, heads))
    if base.family == "gpt2" and kv_heads != heads:
        raise UserError(f"kv_heads: {config.preset} has as many as heads; remove it, or choose a llama preset")
    if width % heads:
        raise UserError(f"width: {width} does not divide into {heads} heads; change one of them")
    hidden = config.hidden or (base.hidden if width == base.width else round(base.hidden * width / base.width))
    changes |= {"heads": heads, "kv_heads": kv_heads, "hidden": hidden, "head_dim": width // heads}
    changes |= {"context": config.context or base.context, "vocab_size": vocab_size, "padded_vocab_size": 0}
    return replace(base, **changes).padded(config.pad_vocabulary_to)


def training_context(config: LLMModelConfig, model: LMConfig) -> int:
    """Return the tokens of a training window."""
    return config.context or model.context


def check_corpus(shards: TokenShards, model: LMConfig) -> None:
    """Raise a UserError if the corpus holds tokens that the model has not."""
    if shards.vocab_size > model.vocab_size:
        raise UserError(
            f"{shards.folder}: {shards.vocab_size} tokens, the model has {model.vocab_size}; prepare it again"
        )


def build_pretraining_optimizer(config: LLMOptimizerConfig, model: nn.Module, full_bf16: bool, seed: int) -> Optimizer:
    """Return the optimizer over two groups, matrices with weight decay and all others without.

    Raises:
        UserError: as ``library.training.optim.factory.build_optimizer``.
    """
    shared = config.shared()
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer_type.lower() != "muon":
        return build_optimizer(shared, groups, full_bf16, seed)
    arguments: Mapping[str, Any] = parse_optimizer_args(shared.optimizer_args)
    hidden = {id(p) for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")}
    return MuonWithAdamW(groups, hidden, lr=config.learning_rate, **_muon_arguments(arguments))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return matrices (embeddings among them) and vectors as torch's parameter groups; tied matrices once."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay, "name": "matrices"},
        {"params": vectors, "weight_decay": 0.0, "name": "vectors"},
    ]


def _muon_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    known = ("momentum", "nesterov", "ns_steps", "betas")
    for key in arguments:
        if key not in known:
            raise UserError(f"optimizer_args: Muon takes no {key!r}; it takes {', '.join(known)}")
    return dict(arguments)


@contextmanager
def looking(model: TransformerLM, accelerator: Accelerator) -> Iterator[None]:
    """Inside the block the model is in eval mode, under the run's autocast, recording nothing."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            yield
    finally:
        model.train(training)


def held_out_loss(model: TransformerLM, batches: Iterator[Tensor], accelerator: Accelerator) -> float:
    """Return the mean cross-entropy over all processes' ``batches`` [B, context + 1]."""
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with looking(model, accelerator):
        for batch in lockstep_batches(batches, accelerator):
            # one that has no batch left takes part with a text that does not count
            tokens = torch.zeros(1, 2, dtype=torch.int64) if batch is None else batch
            tokens = tokens.to(accelerator.device)
            count = 0 if batch is None else tokens[:, 1:].numel()
            sums[0] += model(tokens[:, :-1], tokens[:, 1:]).double() * count
            sums[1] += count
    loss, count = accelerator.reduce(sums, reduction="sum").tolist()
    return loss / count


def write_samples(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    settings: SamplingSettings,
    path: Path | None,
    accelerator: Accelerator,
) -> list[str]:
    """Write each prompt with what the model makes of it to ``path``, if one is given; return these texts."""
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    given = [first + tokenizer.encode(prompt) for prompt in prompts]
    with looking(model, accelerator):
        written = generate_tokens(model, given, settings)
    texts = [prompt + tokenizer.decode(new, skip_special=True) for prompt, new in zip(prompts, written, strict=True)]
    if path is not None:
        write_text(path, "\n\n----\n\n".join(texts) + "\n")
    return texts


# Dense bf16 tensor-core peaks in FLOP/s, from NVIDIA's data sheets; names as torch.cuda.get_device_name contains them.
_PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A6000": 155e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "T4": 65e12,
}


def flops_per_token(model: TransformerLM, context: int) -> float:
    """Return the operations that forward and backward of one token need."""
    config: LMConfig = model.config
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.ndim == 2)
    head = config.padded_vocab_size * config.width
    return 6 * (blocks + head) + 12 * config.layers * config.heads * config.head_dim * context


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bf16 peak in FLOP/s; None where it is not known, as for CPUs."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)
