"""Training steps of small language models side by side.

Tandem, transformers and what one writes first, the walk-through's model (``walkthrough/``), as a GPT-2 and a Llama of
13 million weights (vocabulary 8192, 256 tokens, 6 layers, width 384); batch 8, clipping at 1, fused AdamW, in fp32 and
under bf16 autocast. Time as ``bench.measure`` takes it. With ``--compile`` the same once more through
``torch.compile``: ours block by block as ``train_llm.py`` does it, the others whole.

    python bench/llm_train.py [--json PATH] [--rounds 5] [--threads 1] [--family gpt2 llama] [--compile]
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from accelerate.utils import compile_regions
from torch import Tensor, nn

from bench.measure import KEEPING, SAME, WAITING, Case, Table, benchmark_parser, both_ways, finish, measure_time
from library.errors import exit_on_user_error
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, config_to_hf, preset
from walkthrough.sizes import Sizes
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step7_llama import LLAMA2

BATCH, LENGTH = 8, 256
PRECISIONS = ("fp32", "autocast bf16")
SIZES = {"gpt2": "gpt2-tiny", "llama": "llama-tiny"}  # vocabulary 8192, width 384, 6 layers, 6 heads (2 of keys)


class Implementation(NamedTuple):
    """How a program builds a model, and its loss of tokens and targets [B, S]."""

    build: Callable[[LMConfig], nn.Module]
    loss: Callable[[Any, Tensor, Tensor], Tensor]


def tandem_model(config: LMConfig) -> TransformerLM:
    """Return Tandem's model as ``train_llm.py`` trains it."""
    return TransformerLM(config).initialise()


def transformers_model(config: LMConfig) -> nn.Module:
    """Return transformers' model of these sizes, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(config)
    values.pop("architectures")
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if config.family == "gpt2" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, **dropout))


def textbook_model(config: LMConfig) -> Decoder:
    """Return the walk-through's model: separate projections, angles made in every layer, all logits at once."""
    sizes = Sizes(
        config.padded_vocab_size,
        config.context,
        config.width,
        config.layers,
        config.heads,
        config.hidden,
        config.kv_heads,
        config.rope_theta,
        eps=config.norm_eps,
    )
    return Decoder(sizes, GPT2 if config.family == "gpt2" else replace(LLAMA2, tied=config.tied))


def _loss_of_logits(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _own_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens.contiguous(), targets.contiguous())


IMPLEMENTATIONS = {
    "tandem": Implementation(tandem_model, _own_loss),
    "transformers": Implementation(transformers_model, _loss_of_logits),
    "textbook": Implementation(textbook_model, _loss_of_logits),
}


class LMStepper:
    """One model of ``who`` and its optimizer; a step is ``tokens`` [B, S + 1]."""

    base_bytes = 0  # nothing is frozen

    def __init__(self, who: str, model: nn.Module, tokens: Tensor, bf16: bool) -> None:
        self._own = IMPLEMENTATIONS[who]
        self._model, self._parameters, self._tokens = model, [*model.parameters()], tokens
        self._autocast = bf16
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-4, fused=True)

    def step(self) -> float:
        """Take one training step; return its loss."""
        with torch.autocast(self._tokens.device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._own.loss(self._model, self._tokens[:, :-1], self._tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def build(who: str, family: str) -> nn.Module:
    """Return a freshly initialised model."""
    torch.manual_seed(0)
    return IMPLEMENTATIONS[who].build(preset(SIZES[family]))


def build_step(
    who: str, family: str, precision: str, compiled: bool = False, batch: int = BATCH, length: int = LENGTH
) -> LMStepper:
    """Load a case."""
    model: Any = build(who, family)
    if compiled:
        model = compile_regions(model) if who == "tandem" else torch.compile(model)
    tokens = torch.randint(0, 8192, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return LMStepper(who, model, tokens, precision != "fp32")


def training_rows(table: Table, options: Any) -> dict[str, float]:
    """Add a row a case; return the ratios of ours to the best of the others, as they come and with our settings."""
    ratios = {}
    for family, precision, compiling in itertools.product(
        options.family, PRECISIONS, [False, True] if options.compile else [False]
    ):
        name = f"{family} {precision}{' compiled' if compiling else ''}"
        cases = {who: Case(build_step, (who, family, precision, compiling)) for who in IMPLEMENTATIONS}
        found = measure_time(both_ways(cases, WAITING | KEEPING), options.rounds, options.threads)
        seconds = {who: statistics.median(steps) for who, steps in found.items()}
        for who, step in seconds.items():
            table.add({"case": name, "implementation": who, "tokens_per_s": round(BATCH * LENGTH / step)})
        for way in ("", SAME):
            best = min(seconds[who + way] for who in IMPLEMENTATIONS if who != "tandem")
            ratios[f"speed_over_best {name}{way}"] = round(best / seconds["tandem"], 3)
    return ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = benchmark_parser(__doc__, rounds=5)
    parser.add_argument("--family", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, default=1, help="of a case; above 1 time is the clock's (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="also through torch.compile")
    options = parser.parse_args()
    table = Table({"case": "<31", "implementation": "<27", "tokens_per_s": "12,"})
    finish(table.rows, training_rows(table, options), options.json)


if __name__ == "__main__":
    main()
