"""Training steps of small language models side by side.

Tandem, transformers and a textbook implementation, GPT-2 and Llama of 13 million weights (vocabulary 8192, 256 tokens,
6 layers, width 384), batch 8, clipping at 1, fused AdamW, in fp32 and under bf16 autocast. Time as ``bench.measure``
takes it; memory is the peak of a process that took two steps, gradients and optimizer included. With ``--compile`` the
same once more through ``torch.compile``: ours block by block as ``train_llm.py`` does it, the others whole; memory is
not measured then, the compiler has more.

The textbook model is what one writes first: separate projections, a stored causal mask, attention spelt out, keys
repeated for grouped queries, all logits at once. It is here to show what the shared blocks buy.

    python bench/llm_train.py [--json PATH] [--rounds 5] [--family gpt2 llama] [--compile]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from accelerate.utils import compile_regions
from torch import Tensor, nn

from bench.measure import Case, Table, benchmark_parser, finish, measure
from library.errors import exit_on_user_error
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, config_to_hf, preset

BATCH, LENGTH = 8, 256
WHO = ("tandem", "transformers", "textbook")
PRECISIONS = ("fp32", "autocast bf16")
SIZES = {"gpt2": "gpt2-tiny", "llama": "llama-tiny"}  # vocabulary 8192, width 384, 6 layers, 6 heads (2 of keys)


def build(who: str, family: str) -> nn.Module:
    """Return a freshly initialised model: ``who`` is tandem, transformers or textbook."""
    torch.manual_seed(0)
    config = preset(SIZES[family])
    if who == "tandem":
        return TransformerLM(config).initialise()
    if who == "textbook":
        return Textbook(config)
    return transformers_model(config)


def transformers_model(config: LMConfig) -> nn.Module:
    """Return transformers' model of these sizes, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(config)
    values.pop("architectures")
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if config.family == "gpt2" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, **dropout))


def loss_of(who: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from tokens [B, S + 1] to the mean cross-entropy, as each implementation does it."""
    if who == "tandem":
        return lambda tokens: model(tokens[:, :-1], tokens[:, 1:])

    def loss(tokens: Tensor) -> Tensor:
        logits: Any = model(tokens[:, :-1])
        logits = logits.logits if who == "transformers" else logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return loss


class Textbook(nn.Module):
    """GPT-2 or Llama as a first course writes it."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        width, head = config.width, config.head_dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = None if config.has_rope else nn.Embedding(config.context, width)
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            sizes = {"q": config.heads * head, "k": config.kv_heads * head, "v": config.kv_heads * head, "o": width}
            layer = nn.ModuleDict(
                {name: nn.Linear(width, size, bias=config.attention_bias) for name, size in sizes.items()}
            )
            layer["norm1"], layer["norm2"] = self._norm(), self._norm()
            layer["up"] = nn.Linear(width, config.hidden, bias=config.mlp_bias)
            layer["down"] = nn.Linear(config.hidden, width, bias=config.mlp_bias)
            if config.family == "llama":
                layer["gate"] = nn.Linear(width, config.hidden, bias=False)
            self.layers.append(layer)
        self.norm = self._norm()
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("mask", torch.ones(config.context, config.context).triu(1).bool())
        frequencies = config.rope_theta ** (-torch.arange(0, head, 2) / head)
        self.register_buffer("angles", torch.arange(config.context)[:, None] * torch.cat([frequencies, frequencies]))

    def _norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.width) if self.config.family == "gpt2" else _TextbookRMSNorm(self.config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = x + self._attention(layer, layer["norm1"](x))
            normed = layer["norm2"](x)
            if self.config.family == "llama":
                x = x + layer["down"](F.silu(layer["gate"](normed)) * layer["up"](normed))
            else:
                x = x + layer["down"](F.gelu(layer["up"](normed), approximate="tanh"))
        return self.head(self.norm(x))

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer[name](x).view(batch, length, -1, self.config.head_dim).transpose(1, 2) for name in "qkv")
        if self.config.has_rope:
            q, k = self._turned(q), self._turned(k)
        groups = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) / self.config.head_dim**0.5
        scores = scores.masked_fill(self.mask[:length, :length], float("-inf"))
        mixed = scores.softmax(-1) @ v
        return layer["o"](mixed.transpose(1, 2).reshape(batch, length, -1))

    def _turned(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[2]]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class _TextbookRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LMStepper:
    """One model and its optimizer, with ``options`` of AdamW; a step is a batch."""

    base_bytes = 0  # nothing is frozen

    def __init__(
        self, model: nn.Module, loss: Callable[[Tensor], Tensor], tokens: Tensor, autocast: bool, **options: bool
    ) -> None:
        self._parameters, self._loss, self._tokens, self._autocast = [*model.parameters()], loss, tokens, autocast
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, **options)

    def loss(self) -> Tensor:
        """Take one training step; return its loss, still on the device."""
        with torch.autocast(self._tokens.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._loss(self._tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def step(self) -> float:
        """Take one training step; return its loss."""
        return self.loss().item()


def build_step(
    who: str, family: str, precision: str, compiled: bool = False, batch: int = BATCH, length: int = LENGTH
) -> LMStepper:
    """Load a case."""
    model: Any = build(who, family)
    if compiled:
        model = compile_regions(model) if who == "tandem" else torch.compile(model)
    tokens = torch.randint(0, 8192, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return LMStepper(model, loss_of(who, model), tokens, precision != "fp32", fused=True)


def training_rows(table: Table, families: list[str], rounds: int, compiled: bool) -> dict[str, float]:
    """Add a row a case; return the ratios of ours to the best of the others."""
    ratios = {}
    for family, precision, compiling in itertools.product(families, PRECISIONS, [False, True] if compiled else [False]):
        name = f"{family} {precision}{' compiled' if compiling else ''}"
        cases: dict[str, Case] = {who: (build_step, (who, family, precision, compiling)) for who in WHO}
        found = measure(cases, rounds, memory_processes=0 if compiling else 1)
        for who, row in found.items():
            speed = {"tokens_per_cpu_s": round(BATCH * LENGTH / row["step_s"])}
            memory = {} if compiling else {"peak_mib": round(row["peak_mib"])}
            table.add({"case": name, "implementation": who} | speed | memory)
        ours, theirs = found["tandem"], [found[who] for who in WHO[1:]]
        ratios[f"speed_over_best {name}"] = round(min(row["step_s"] for row in theirs) / ours["step_s"], 3)
        if not compiling:
            least = min(row["peak_mib"] for row in theirs)
            ratios[f"memory_over_least {name}"] = round(ours["peak_mib"] / least, 3)
    return ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--family", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--compile", action="store_true", help="also through torch.compile")
    options = parser.parse_args()
    table = Table({"case": "<31", "implementation": "<14", "tokens_per_cpu_s": "16,", "peak_mib": "8"})
    ratios = training_rows(table, options.family, options.rounds, options.compile)
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
