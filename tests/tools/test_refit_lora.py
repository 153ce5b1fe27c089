"""tools/refit_lora.py on the trained tiny FLUX: what diffusers computes with fp8 numbers and the refitted file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.quantize_model as quantize_model
from library.checksums import weights_fingerprint
from library.config.schema import ModelConfig
from library.errors import UserError
from library.fidelity.calibration import CalibrationOptions, CalibrationPlan
from library.models.flux.files import FLUX_TARGETS
from networks.files.adapters import load_lora
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.precision.files.gguf_files import write_gguf
from tests.runs import ROOT, call, pipeline_forward
from tests.tiny import bfl_state_dict
from tools.refit_lora import parser, refit

WITHOUT = "attn.add_q_proj"  # the one kind of layer that has no LoRA here
IMAGES = 4


class Case:
    """A bf16 base, a LoRA for it, two fp8 files of it, a dataset; made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = ROOT / "assets" / "tiny-flux"
        shutil.copytree(ROOT / "assets" / "demo_dataset", folder / "data")
        self.dataset = folder / "data" / "dataset.toml"
        config = ModelConfig(pretrained_model_name_or_path=str(self.base))
        options = CalibrationOptions(
            str(self.dataset), images=IMAGES + 3
        )  # the tool chooses the first of the very same ones
        plan = CalibrationPlan(config, options, torch.float32, torch.device("cpu"))
        everything = plan.prepare(Console(quiet=True))
        self.unseen = [*everything.fit, *everything.check][IMAGES:]
        weights = self.base / "transformer" / "diffusion_pytorch_model.safetensors"
        save_file(bfl_state_dict(load_file(weights)), folder / "flux1.safetensors")
        self.model = FluxTransformer2DModel.from_pretrained(self.base / "transformer")
        random = torch.Generator().manual_seed(1)
        self.lora = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear) and not name.endswith(WITHOUT) and "blocks." in name:
                up = torch.randn(layer.out_features, 16, generator=random)
                down = torch.randn(16, layer.in_features, generator=random)
                strength = 0.03 * layer.weight.norm() / (up @ down).norm()
                self.lora[name] = LoraWeights(down * strength.sqrt(), up * strength.sqrt() / 0.5, 8.0)
        self.files = {}
        for kind, flags in {"plain": [], "musubi": ["--scheme", "row"]}.items():
            self.files[kind] = folder / f"{kind}.safetensors"
            call(
                quantize_model,
                "--model",
                folder / "flux1.safetensors",
                "--save_to",
                self.files[kind],
                "--layout",
                kind,
                *flags,
            )

    def save(self, name: str, layout: str) -> Path:
        path = self.folder / f"{name}.safetensors"
        meta = {"tandem.base_fingerprint": weights_fingerprint(self.base / "transformer")}
        save_adapter(path, self.lora, FLUX_TARGETS, layout, metadata=meta)
        return path

    def run(self, lora: Path, deploy: Path | str, save_to: Path, **more: object) -> Any:
        flags = {
            "lora": lora, "model": self.base, "deploy": deploy, "dataset_config": self.dataset, "save_to": save_to,
            "calibration_images": IMAGES, "calibration_sigmas": "0.8 0.3",
        } | more  # fmt: skip
        words = [word for key, value in flags.items() for word in (f"--{key}", *str(value).split())]
        return refit(parser().parse_args(words), Console(quiet=True))

    def velocity(self, state: dict[str, Tensor], lora: dict[str, LoraWeights]) -> Tensor:
        """Return what diffusers computes with ``state`` and a LoRA added, for images that were not calibrated on."""
        model = FluxTransformer2DModel.from_config(self.model.config).eval()
        model.load_state_dict(state)
        random = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, weights in lora.items():
                model.get_submodule(name).weight += weights.delta()
            found = []
            for batch in self.unseen:
                noisy = 0.5 * batch.latents + 0.5 * torch.randn(batch.latents.shape, generator=random)
                found.append(pipeline_forward(model, noisy, torch.tensor([0.5]), batch.text, 3.5).flatten())
        return torch.cat(found)

    def errors(self, kind: str, fitted: dict[str, LoraWeights]) -> tuple[float, float]:
        """Return by how much the fp8 model with the LoRA as trained, and with ``fitted``, is off the bf16 one's."""
        served, wanted = self.served(kind), self.velocity(self.model.state_dict(), self.lora)
        before, after = (float((self.velocity(served, lora) - wanted).norm()) for lora in (self.lora, fitted))
        return before, after

    def served(self, kind: str) -> dict[str, Tensor]:
        """Return diffusers' state dict with the numbers that the fp8 file's values stand for, by a dozen lines."""
        raw, state = load_file(self.files[kind]), self.model.state_dict()
        bfl = bfl_state_dict(state)
        for key, tensor in bfl.items():
            stored = raw[key].float()
            scale = raw.get(key.removesuffix("weight") + "scale_weight")
            bfl[key] = stored if scale is None else stored * scale.float()
            assert bfl[key].shape == tensor.shape
        return from_bfl(bfl, state)


def from_bfl(bfl: dict[str, Tensor], like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo ``bfl_state_dict`` by marking every number of ``like`` with its place and looking where it went."""
    marks, start = {}, 0
    for name, tensor in like.items():
        marks[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float64).view(tensor.shape)
        start += tensor.numel()
    flat = torch.empty(start)
    for key, mark in bfl_state_dict(marks).items():
        flat[mark.long().flatten()] = bfl[key].flatten().float()
    return {name: flat[mark.long()] for name, mark in marks.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("refit"))


@pytest.mark.parametrize("kind", ["plain", "musubi"])
def test_the_fp8_model_with_the_refitted_lora_is_nearer_to_bf16(case: Case, kind: str, tmp_path: Path) -> None:
    lora, saved = case.save("lora", "diffusers"), tmp_path / "out.safetensors"
    fits = case.run(lora, case.files[kind], saved)
    fitted = load_lora(saved, FLUX_TARGETS)
    before, after = case.errors(kind, fitted.weights)
    assert after < 0.75 * before
    mean = [sum(getattr(fit, key) for fit in fits.values()) for key in ("before", "after")]
    assert mean[1] <= 0.65 * mean[0]  # the project's target for a layer
    with safe_open(lora, "pt") as one, safe_open(saved, "pt") as other:
        assert set(one.keys()) == set(other.keys())
        assert all(one.get_slice(k).get_shape() == other.get_slice(k).get_shape() for k in one.keys())  # noqa: SIM118
    assert {n: (w.rank, w.alpha) for n, w in fitted.weights.items()} == dict.fromkeys(case.lora, (16, 16.0))
    # the file says what it fits, and what does not fit it
    assert fitted.metadata["tandem.base_fingerprint"] == weights_fingerprint(case.files[kind])
    assert json.loads(fitted.metadata["tandem.refitted"])["lora"] == "lora.safetensors"
    assert base_mismatch(fitted.metadata, weights_fingerprint(case.files[kind])) is None
    remark = base_mismatch(fitted.metadata, weights_fingerprint(case.base / "transformer"))
    assert remark is not None
    assert f"fitted to {kind}.safetensors" in remark


@pytest.mark.parametrize("deploy", ["int8", "int8_convrot", "nvfp4", "gguf"])
def test_every_deployed_format_can_be_refitted_to(case: Case, deploy: str, tmp_path: Path) -> None:
    served: Path | str = deploy
    if deploy == "int8_convrot":
        served = tmp_path / "int8.safetensors"
        call(quantize_model, "--model", case.folder / "flux1.safetensors", "--save_to", served, "--scheme", deploy)
    if deploy == "gguf":
        state = load_file(case.folder / "flux1.safetensors")
        served = write_gguf(tmp_path / "q4.gguf", state, lambda n, _: "Q4_0" if "_blocks." in n else "F16")
    fits = case.run(case.save("lora", "diffusers"), served, tmp_path / "out.safetensors")
    mean = [sum(getattr(fit, key) for fit in fits.values()) for key in ("before", "after")]
    assert mean[1] < 0.8 * mean[0]


def test_layers_that_share_a_are_fitted_as_one_and_keep_sharing_it(case: Case, tmp_path: Path) -> None:
    """sd-scripts trains one LoRA on the fused qkv: its file must keep its shapes."""
    first = case.lora["transformer_blocks.0.attn.to_q"].down
    original = dict(case.lora)
    try:
        for part in ("q", "k", "v"):
            name = f"transformer_blocks.0.attn.to_{part}"
            case.lora[name] = LoraWeights(first, case.lora[name].up, 8.0)
        lora = case.save("kohya", "kohya")
    finally:
        case.lora = original
    fits = case.run(lora, "cast", tmp_path / "out.safetensors")
    key = "lora_unet_double_blocks_0_img_attn_qkv"
    one, other = load_file(lora), load_file(tmp_path / "out.safetensors")
    assert {k: t.shape for k, t in one.items()} == {k: t.shape for k, t in other.items()}
    assert one[f"{key}.lora_down.weight"].shape[0] == 16
    assert not torch.equal(one[f"{key}.lora_down.weight"], other[f"{key}.lora_down.weight"])
    unit = " + ".join(f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
    assert fits[unit].after < 0.8 * fits[unit].before


def test_a_correction_rank_reaches_layers_without_a_lora(case: Case, tmp_path: Path) -> None:
    lora = case.save("lora", "diffusers")
    case.run(lora, case.files["plain"], tmp_path / "out.safetensors", correction_rank=8)
    fitted = load_lora(tmp_path / "out.safetensors", FLUX_TARGETS).weights
    assert fitted["transformer_blocks.0.attn.to_q"].rank == 24
    assert fitted[f"transformer_blocks.0.{WITHOUT}"].rank == 8
    assert "x_embedder" not in fitted  # not in fp8
    before, after = case.errors("plain", fitted)
    assert after < 0.6 * before


def test_what_cannot_be_done_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    lora, out = case.save("lora", "diffusers"), tmp_path / "out.safetensors"
    refused = {
        "none of its layers is quantised": {"deploy": case.base},
        "and none of cast, tensor": {"deploy": "int4"},
        "is quantised; give the bf16 model": {"model": case.files["plain"], "ae": case.base, "clip_l": case.base,
                                           "t5xxl": case.base, "clip_l_tokenizer": case.base / "tokenizer",
                                           "t5xxl_tokenizer": case.base / "tokenizer_2"},
        "is no noise level": {"calibration_sigmas": "1.5"},
        "calibration_images: '0' is no whole number from 1": {"calibration_images": 0},
        "correction_rank: '-1' is no whole number from 0": {"correction_rank": -1},
        "save_precision: invalid choice": {"save_precision": "fp8"},  # LoRA tensors are never stored in fp8
    }  # fmt: skip
    for message, change in refused.items():
        with pytest.raises(UserError, match=message):
            case.run(lora, **({"deploy": "cast", "save_to": out} | change))
    assert not out.exists()
