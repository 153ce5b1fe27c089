"""A tiny random model and a tiny dataset on disk, and one call that trains on them: for tests of whole runs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import FluxPipeline
from PIL import Image, ImageDraw
from safetensors import safe_open
from safetensors.torch import load_file

from library.config import load_config
from library.training.run import Run
from tests.curves import without_curves
from tests.forked import flags_of, run_script
from tests.processes import run_command
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline
from train_lora import train

ROOT = Path(__file__).resolve().parents[1]
# A run that ended amid an epoch has workers of its data loader until a collection comes, which waits so many seconds.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
COLOURS = ["red", "green", "blue", "yellow", "white", "black", "purple", "orange"]


def call(tool: Any, *words: object) -> None:
    """Run a tool's ``main`` in this process on the command line ``words``."""
    with mock.patch.object(sys, "argv", [tool.__name__, *map(str, words)]):
        tool.main()


def printed(tool: Any, *words: object) -> str:
    """Return what a tool prints."""
    with redirect_stdout(io.StringIO()) as stream:
        call(tool, *words)
    return stream.getvalue()


def refusal(tool: Any, *words: object) -> str:
    """Return the one line of a tool that ends with exit code 2."""
    with redirect_stderr(io.StringIO()) as stream, pytest.raises(SystemExit) as ended:
        call(tool, *words)
    line = stream.getvalue()
    assert (ended.value.code, line.count("\n")) == (2, 1), line
    return line


def write_dataset(
    folder: Path, images: int = 8, size: tuple[int, int] = (64, 64), text: str = "", **keys: object
) -> Path:
    """Write ``images`` pictures with tag captions and a dataset TOML; return the TOML's path.

    Args:
        folder: made if needed.
        images: at most eight.
        size: width and height.
        text: TOML lines for the dataset table.
        keys: TOML keys of the one subset.
    """
    pictures = folder / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    for i, colour in enumerate(COLOURS[:images]):
        image = Image.new("RGB", size, colour)
        ImageDraw.Draw(image).ellipse((4 + 2 * i, 8, 30 + 2 * i, 40), fill=COLOURS[i - 3])
        image.save(pictures / f"{i}.png")
        (pictures / f"{i}.txt").write_text(f"a disc, {colour}, {COLOURS[i - 3]}, plain")
    subset = "\n".join(
        f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    )
    toml = folder / "dataset.toml"
    toml.write_text(
        f'[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 64\n{text}\n'
        f'[[datasets.subsets]]\nimage_dir = "images"\n{subset}\n'
    )
    return toml


def write_base(folder: Path) -> Path:
    """Write the tiny random FLUX pipeline; return its folder."""
    return tiny_flux_pipeline(folder)


def arguments(base: Path, dataset: Path, output: Path, **settings: object) -> list[str]:
    """Return command line flags for a short run; ``settings`` override them."""
    defaults: dict[str, object] = {
        "pretrained_model_name_or_path": base,
        "dataset_config": dataset,
        "output_dir": output,
        "network_dim": 4,
        "network_alpha": 1,
        "mixed_precision": "no",  # on a GPU too: what is compared is compared in fp32
        "learning_rate": 1e-3,
        "max_train_steps": 4,
        "max_data_loader_n_workers": 0,
        "seed": 3,
        "overwrite": True,
    }
    return flags_of(defaults | settings)


def run(base: Path, dataset: Path, output: Path, curves: bool = False, **settings: object) -> Run:
    """Train in this process and return the run; ``curves``: with lr.png, which takes longer than the training."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it refuses a second run of other precision otherwise
    with nullcontext() if curves else without_curves():
        return train(load_config(arguments(base, dataset, output, **settings)))


def train_flags(flags: list[str]) -> None:
    """Train as a job of a worker group."""
    train(load_config(flags))


def start(flags: list[str], cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run train_lora.py in a process of its own."""
    return run_script(ROOT / "train_lora.py", flags, cwd, environment)


def launch(
    launcher: list[str], flags: list[str], cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run train_lora.py as a user does, through ``launcher`` (arguments of python)."""
    command = [sys.executable, *launcher, str(ROOT / "train_lora.py"), *flags]
    return run_command(command, cwd, {"PYTHONPATH": str(ROOT), **(environment or {})})


def lora(output: Path, name: str = "lora") -> dict[str, torch.Tensor]:
    """Return the tensors of a run's LoRA file."""
    return load_file(output / f"{name}.safetensors")


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two files hold the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two LoRA files relative to the largest weight of each tensor."""
    assert one.keys() == other.keys()
    return max(((one[k] - other[k]).abs().max() / other[k].abs().max().clamp_min(1e-12)).item() for k in one)


def pipeline_forward(
    transformer: torch.nn.Module,
    latents: torch.Tensor,
    sigmas: torch.Tensor,
    text: dict[str, torch.Tensor],
    guidance: float = 1.0,
) -> torch.Tensor:
    """Call a FLUX transformer as diffusers' FluxPipeline does, with its helpers; return the velocity [B, C, h, w]."""
    batch, channels, height, width = latents.shape
    packed = FluxPipeline._pack_latents(latents, batch, channels, height, width)
    output = transformer(
        hidden_states=packed,
        timestep=sigmas,
        guidance=torch.full((batch,), guidance),
        pooled_projections=text["pooled_prompt_embeds"],
        encoder_hidden_states=text["prompt_embeds"],
        txt_ids=torch.zeros(text["prompt_embeds"].shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(output, height * 8, width * 8, vae_scale_factor=8)


@torch.no_grad()
def velocity(transformer: torch.nn.Module) -> torch.Tensor:
    """Return the velocity of a tiny FLUX transformer on fixed inputs."""
    inputs = tiny_flux_inputs()
    return pipeline_forward(transformer, inputs.pop("latents"), inputs.pop("sigmas"), inputs)


def metrics(output: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses_of(output: Path, key: str = "loss") -> list[float]:
    """Return the loss of every training line of a run's metrics, or ``val_loss`` of every validation."""
    return [line[key] for line in metrics(output) if key in line]


def assert_same_metrics(
    one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], keys: Sequence[str], rel: float
) -> None:
    """Compare two runs' metrics: the same steps, and ``keys`` in the same lines, equal to ``rel``."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for expected, found in zip(one, other, strict=True):
        for key in keys:
            assert found.get(key) == (pytest.approx(expected[key], rel=rel) if key in expected else None), key


def metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file, or of the LoRA of a run in a folder."""
    with safe_open(file / "lora.safetensors" if file.is_dir() else file, framework="pt") as opened:
        return opened.metadata()
