"""make demo-fp8: what happens to a fill LoRA when it is served in fp8, and how that is removed.

    python tools/demo_fp8.py

Three commands that anyone could type, shown before they run: a LoRA is trained in high precision on the built-in tiny
FLUX Fill; the model is cast to fp8 as many published files are; the report compares both as users run them (the LoRA
rounded into the fp8 weights and the known pixels pasted back), names the causes, tries the fixes and shows the best.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import exit_on_user_error
from tools.command import show_and_run, tool_parser

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("output/demo_fp8")
MODEL = "assets/tiny-flux-fill"


def commands(steps: int | None = None) -> list[list[str]]:
    """Return the demo's commands; ``steps`` replaces the number of training steps."""
    lora, served = FOLDER / "demo_fp8.safetensors", FOLDER / "tiny-flux-fill-fp8"
    train = ["train_lora.py", "--config_file", "configs/demo_fp8.toml"]
    train += ["--max_train_steps", str(steps)] if steps else []
    cast = ["tools/quantize_model.py", "--model", MODEL, "--layout", "plain", "--save_to", str(served)]
    report = ["tools/precision_report.py", "--model", MODEL, "--model_type", "flux_fill", "--deploy", str(served)]
    report += ["--lora", str(lora), "--deploy_lora", "stochastic", "--paste", "pixels", "--guidance_scale", "1"]
    report += ["--dataset_config", "assets/demo_dataset/dataset.toml", "--cache_directory", str(FOLDER / "cache")]
    report += ["--images", "6", "--steps", "8", "--sigmas", "0.8", "0.5", "0.25"]
    report += ["--fix", "settings", "bypass", "refit", "correction", "together", "--save_to", str(FOLDER / "report")]
    return [train, cast, report]


@exit_on_user_error
def main() -> None:
    """Run the commands; end with the first that fails."""
    tool_parser(__doc__).parse_args()
    for words in commands():
        if words[0].endswith("quantize_model.py") and (ROOT / FOLDER / "tiny-flux-fill-fp8").exists():
            continue  # a folder with something in it is never written over
        show_and_run(words, ROOT)
    print(f"\nLook at {FOLDER / 'report' / 'images.png'} and {FOLDER / 'report' / 'report.html'}.")


if __name__ == "__main__":
    main()
