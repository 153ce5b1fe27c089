"""Cached greedy decoding of small language models: Tandem and transformers, side by side.

The models of ``bench/llm_train.py``, fp32, a prompt of 32 tokens, in turn, counted in CPU seconds; tokens a second.

    python bench/llm_generate.py [--json PATH] [--rounds 5] [--new_tokens 224] [--batch 1]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.llm_peers import SIZES, build
from bench.measure import Case, measure_time, write_report
from library.errors import exit_on_user_error
from library.llm.generation import SamplingSettings, generate_tokens

WHO = ("tandem", "transformers")


class Generator:
    """One model; a step is a whole text for each row of the batch."""

    base_bytes = 0

    def __init__(self, who: str, family: str, batch: int, new_tokens: int) -> None:
        self._who, self._new = who, new_tokens
        self.model = build(who, family).eval()
        self._prompts = torch.randint(0, 8192, (batch, 32), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        """Generate; return how many tokens came out."""
        if self._who == "tandem":
            settings = SamplingSettings(max_new_tokens=self._new, temperature=0)
            return float(sum(map(len, generate_tokens(self.model, self._prompts.tolist(), settings))))
        mask = torch.ones_like(self._prompts)
        chosen = {"max_new_tokens": self._new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            return float(self.model.generate(self._prompts, attention_mask=mask, **chosen)[:, 32:].numel())


def run(rounds: int, batch: int, new_tokens: int) -> tuple[list[dict], dict[str, float]]:
    """Return a row a case, and the ratio of ours to transformers' speed."""
    rows, ratios = [], {}
    for family in SIZES:
        cases: dict[str, Case] = {who: (Generator, (who, family, batch, new_tokens)) for who in WHO}
        seconds = {who: statistics.median(taken) for who, taken in measure_time(cases, rounds).items()}
        for who in WHO:
            speed = round(batch * new_tokens / seconds[who], 1)
            rows.append({"model": family, "implementation": who, "tokens_per_cpu_s": speed})
        ratios[f"speed_over_transformers {family}"] = round(seconds["transformers"] / seconds["tandem"], 3)
    return rows, ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    rows, ratios = run(options.rounds, options.batch, options.new_tokens)
    print(f"{'model':<8}{'implementation':<16}{'tokens/CPU s':>13}")
    for row in rows:
        print(f"{row['model']:<8}{row['implementation']:<16}{row['tokens_per_cpu_s']:>13}")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    if options.json:
        write_report(options.json, rows, ratios)


if __name__ == "__main__":
    main()
