"""Training steps of small language models: Tandem, transformers and a textbook implementation, side by side.

GPT-2 and Llama of 13 million weights (vocabulary 8192, 256 tokens, 6 layers, width 384), batch 8, clipping at 1, fused
AdamW, in fp32 and under bf16 autocast. Time as ``bench.measure`` takes it; memory is the peak of a process that took
two steps, gradients and optimizer included. With ``--compile`` the same once more through ``torch.compile``: ours
block by block as ``train_llm.py`` does it, the others whole; memory is not measured then, the compiler has more.

    python bench/llm_train.py [--json PATH] [--rounds 5] [--family gpt2 llama] [--compile]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from accelerate.utils import compile_regions

from bench.llm_peers import SIZES, build, loss_of
from bench.measure import Case, measure_memory, measure_time, write_report
from library.errors import exit_on_user_error

WHO = ("tandem", "transformers", "textbook")
PRECISIONS = ("fp32", "autocast bf16")


class LMStepper:
    """One model and its optimizer; a step is a batch."""

    base_bytes = 0  # nothing is frozen

    def __init__(
        self, who: str, family: str, precision: str, batch: int = 8, length: int = 256, compiled: bool = False
    ) -> None:
        self.model = build(who, family)
        if compiled:
            self.model = compile_regions(self.model) if who == "tandem" else torch.compile(self.model)
        self._loss, self._autocast = loss_of(who, self.model), precision != "fp32"
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._tokens = torch.randint(0, 8192, (batch, length + 1), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        """Take one training step; return its loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._loss(self._tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()


def run(families: list[str], rounds: int, compiled: bool) -> tuple[list[dict], dict[str, float]]:
    """Return a row a case, and the ratios of ours to the best of the others."""
    rows, ratios = [], {}
    for family, precision, compiling in itertools.product(families, PRECISIONS, [False, True] if compiled else [False]):
        name = f"{family} {precision}{' compiled' if compiling else ''}"
        cases: dict[str, Case] = {who: (LMStepper, (who, family, precision, 8, 256, compiling)) for who in WHO}
        seconds = {who: statistics.median(taken) for who, taken in measure_time(cases, rounds).items()}
        memory = {} if compiling else {who: measure_memory(who, case)["peak_mib"] for who, case in cases.items()}
        for who in WHO:
            row = {"case": name, "implementation": who, "tokens_per_cpu_s": round(8 * 256 / seconds[who])}
            rows.append(row | ({"peak_mib": round(memory[who])} if memory else {}))
        ratios[f"speed_over_best {name}"] = round(min(seconds[w] for w in WHO[1:]) / seconds["tandem"], 3)
        if memory:
            ratios[f"memory_over_least {name}"] = round(memory["tandem"] / min(memory[w] for w in WHO[1:]), 3)
    return rows, ratios


@exit_on_user_error
def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each case")
    parser.add_argument("--family", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--compile", action="store_true", help="also through torch.compile")
    options = parser.parse_args()
    rows, ratios = run(options.family, options.rounds, options.compile)
    print(f"{'case':<32}{'implementation':<16}{'tokens/CPU s':>13}{'peak MiB':>10}")
    for row in rows:
        memory = row.get("peak_mib", "")
        print(f"{row['case']:<32}{row['implementation']:<16}{row['tokens_per_cpu_s']:>13}{memory:>10}")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    if options.json:
        write_report(options.json, rows, ratios)


if __name__ == "__main__":
    main()
