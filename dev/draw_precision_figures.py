"""Draw the figures of ``docs/precision.md``.

    python dev/draw_precision_figures.py
    python dev/draw_precision_figures.py --lora output/demo_fp8/demo_fp8.safetensors

Most are measured on layers made from a seed. Those of the border run the trained tiny FLUX Fill with a LoRA, which
``make demo-fp8`` trains; without its file they are left as they are. Everything is a function of the seeds and of that
file. About a minute, two with the border.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

import dev.figures.border as border
import tools.quantize_model as quantize_model
from dev.figures.drawings import FIGURES, save
from library.errors import exit_on_user_error

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "assets" / "tiny-flux-fill"
DATASET = ROOT / "assets" / "demo_dataset" / "dataset.toml"


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--only", nargs="+", choices=[*FIGURES, "border"], default=[*FIGURES, "border"], help="of these")
    default = Path("output/demo_fp8/demo_fp8.safetensors")
    top.add_argument("--lora", type=Path, default=default, help="for the tiny FLUX Fill (default: %(default)s)")
    top.add_argument("--images", type=int, default=8, help="pictures for the border (default: %(default)s)")
    top.add_argument("--steps", type=int, default=8, help="sampling steps for the border (default: %(default)s)")
    top.add_argument("--save_to", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    return top


def draw_border(options: argparse.Namespace, console: Console) -> list[Path]:
    """Run the tiny fill model and draw where it errs; return what was written.

    Raises:
        UserError: the LoRA is not one for this model.
    """
    with tempfile.TemporaryDirectory() as folder:
        deploy = Path(folder) / "cast"
        words = ["--model", str(MODEL), "--layout", "plain", "--save_to", str(deploy)]
        quantize_model.quantize(quantize_model.parse(words), console)
        runs = border.run_cases(
            str(MODEL), deploy, options.lora, str(DATASET), Path(folder), options.images, options.steps, console
        )
    for name, each in runs.differences.items():
        seam = each.picture_seam
        console.print(
            f"{name}: picture {each.picture:.2%} off; within 8 pixels: error over the interior's "
            f"{seam['inside'][8]:.2f}, high-pass {seam['high_pass'][8]:.2f}, signed {seam['signed'][8]:+.2%}; "
            f"step {seam['step']:.2f}; latents {each.latents:.2%}, ring {each.seam['inside'][2]:.2f}"
        )
    return [
        save(border.rings(runs), options.save_to / "precision_border.png"),
        save(border.pictures(runs), options.save_to / "precision_border_pictures.png"),
    ]


@exit_on_user_error
def main() -> None:
    """Parse the command line and draw."""
    options = parser().parse_args()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    options.save_to.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        if name in options.only:
            console.print(str(save(draw(), options.save_to / f"precision_{name}.png")))
    if "border" not in options.only:
        return
    if not options.lora.exists():
        console.print(
            f"{options.lora}: no such LoRA, so the border's figures were not drawn; `make demo-fp8` trains it"
        )
        return
    console.print("\n".join(map(str, draw_border(options, console))))


if __name__ == "__main__":
    main()
