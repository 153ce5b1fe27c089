"""Draw loss against learning rate, to choose one: a short training whose rate rises from step to step.

    python tools/lr_range_test.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml

What is trained is thrown away; the plot and the numbers are written to output_dir, as lr_range.png, .svg and .jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from library.training.optim.lr_range import RangeTest


from library.config import TrainConfig, load_config
from library.config.markers import MOST_RATE
from library.errors import UserError, exit_on_user_error
from library.files import write_text
from library.training.report.progress import counting, shown_path
from tools.command import count, number, training_tool_parser


def range_test(config: TrainConfig, lr_from: float, lr_to: float, steps: int) -> RangeTest:
    """Prepare the run as training would, and sweep."""
    from library.training.optim.lr_range import refuse_own_rates, sweep
    from library.training.tasks.image_lora import ImageLora

    refuse_own_rates(config.optimizer)
    if config.training.resume:
        raise UserError("resume: a range test begins anew; remove it, or start from network_weights")
    task = ImageLora(config)
    task.open()
    task.prepare()
    with counting(task.console) as start:
        return sweep(task, lr_from, lr_to, steps, start("learning rates", steps))


@exit_on_user_error
def main() -> None:
    """Test from the command line."""
    rate = number(above=0, most=MOST_RATE)
    parser = training_tool_parser(__doc__)
    parser.add_argument("--lr_from", type=rate, default=1e-6, metavar="X", help="first rate (default: %(default)s)")
    parser.add_argument("--lr_to", type=rate, default=1.0, metavar="X", help="last rate (default: %(default)s)")
    parser.add_argument("--range_steps", type=count, default=100, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--save_to", type=Path, metavar="PATH", help="without ending; default: output_dir/lr_range")
    own, rest = parser.parse_known_args(sys.argv[1:])
    if not 0 < own.lr_from < own.lr_to or own.range_steps < 2:
        raise UserError("lr_from: a sweep needs 0 < lr_from < lr_to and at least 2 range_steps; change them")
    if own.save_to is not None and not own.save_to.name:
        raise UserError(f"--save_to {own.save_to}: a folder; name what is to be written in it, without ending")
    config = load_config(rest)
    from library.training.optim.lr_range import as_lines, draw

    test = range_test(config, own.lr_from, own.lr_to, own.range_steps)
    if not test.rates:
        raise UserError(f"lr_from: the loss breaks at {own.lr_from:g} already; lower it")
    save_to = own.save_to or Path(config.saving.output_dir) / "lr_range"
    write_text(save_to.with_suffix(".jsonl"), "".join(json.dumps(line) + "\n" for line in as_lines(test)))
    for path in [*draw(test, save_to), save_to.with_suffix(".jsonl")]:
        print(shown_path(path))
    rate, reason = test.suggestion()
    print(f"suggested learning_rate = {rate:.2g}: {reason}" if rate else f"no suggestion: {reason}")


if __name__ == "__main__":
    main()
