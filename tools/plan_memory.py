"""What a run takes on a card, counted before there is one: by phase and part.

    python tools/plan_memory.py configs/flux_lora_16gb.toml
    python tools/plan_memory.py configs/flux_lora.toml --gpu_memory 12            # and what would make it fit
    python tools/plan_memory.py my.toml --gpu_memory 24 --network_dim 64

The run is traced from its configuration to the end of the second step on tensors that have shapes and no numbers, on
this machine's card or, without one, on a device that computes nothing: no weights are read, no memory is taken. Flags
of train_lora.py change the configuration. A model or dataset that is not there yet is replaced by the published model,
and by one image of 1024 x 1024 pixels.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.table import Table

from library.config import load_config
from library.config.load import names_language_model
from library.config.schema import TrainConfig
from library.console import Console
from library.errors import UserError, exit_on_user_error
from library.files import write_text
from tools.command import answer_early, number, tool_parser


def arguments() -> tuple[argparse.Namespace, TrainConfig]:
    """Parse and check the command line."""
    parser = tool_parser(__doc__)
    parser.add_argument("config", type=Path, help="training configuration, TOML")
    parser.add_argument("--gpu_memory", type=number(above=0), help="GiB of the card; what makes the run fit is sought")
    parser.add_argument("--save_to", type=Path, metavar="JSON", help="write the phases there too")
    options, flags = parser.parse_known_args()
    words = ["--config_file", str(options.config), *flags]
    if names_language_model(words):
        raise UserError(f"{options.config}: trains a language model, which is not counted; give an image LoRA's file")
    return options, load_config(words)


answer_early(__name__, lambda: arguments()[0])

from library.training.memory.budget import GIB
from library.training.memory.dry_run import plan_memory
from library.training.memory.policy import PARTS, RESERVE, MemoryPlan, remedies, room_in
from library.training.tasks.image_lora import ImageLora

_SOURCES = {
    "card": "counted on fake tensors on this machine's card",
    "fake device": "counted on fake tensors on a device that computes nothing",
}


def table(plan: MemoryPlan) -> Table:
    """Return each phase's highest point in GiB, by part."""
    shown = Table(box=None, header_style="bold")
    for name in ("phase", *PARTS, "in all"):
        shown.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for phase, parts in plan.phases.items():
        numbers = [parts.get(part, 0) for part in PARTS]
        shown.add_row(phase, *(f"{n / GIB:.2f}" for n in numbers), f"{sum(numbers) / GIB:.2f}")
    return shown


@exit_on_user_error
def main() -> None:
    """Print the table, and look for settings that fit."""
    options, config = arguments()
    if config.parallel.splits_model:
        raise UserError(f"{options.config}: its model is split among GPUs; count it without a layout, on one GPU")
    console = Console(markup=False, highlight=False, width=140)
    with console.status("counting: a minute or two at full depth"):
        plan = plan_memory(ImageLora, config)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(table(plan))
    console.print(f"peak {plan.peak / GIB:.2f} GiB, {_SOURCES[plan.source]}", soft_wrap=True)
    if options.save_to:
        write_text(options.save_to, json.dumps(asdict(plan) | {"peak": plan.peak}, indent=1))
    if options.gpu_memory:
        _advise(config, plan, round(options.gpu_memory * GIB), console)


def _advise(config: TrainConfig, plan: MemoryPlan, memory: int, console: Console) -> None:
    """Say whether the run fits; if not, what makes it.

    Raises:
        UserError: nothing does.
    """
    room, limit = room_in(memory), f"{memory / GIB:g} GiB, of which {RESERVE / GIB:g} is left for CUDA itself"
    if plan.peak <= room:
        console.print(f"fits into {limit}")
        return
    console.print(f"does not fit into {limit}; what takes less, the cheapest first, one on top of the other:")
    last = None
    for last in remedies(config, plan, room, partial(plan_memory, ImageLora)):
        fitting = ": fits" if last.plan.peak <= room else ""
        console.print(
            f"  {list(last.lines.values())[-1]:36}{last.plan.peak / GIB:6.2f} GiB{fitting}   ({last.cost})",
            soft_wrap=True,
        )
    if last is None or last.plan.peak > room:
        raise UserError("nothing of it is enough: lower resolution or batch_size in the dataset, or network_dim")
    console.print("", "set:", *(f"  {line}" for line in last.lines.values()), sep="\n")


if __name__ == "__main__":
    main()
