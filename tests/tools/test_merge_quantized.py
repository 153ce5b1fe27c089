"""merge_lora.py into quantised models, and refit_lora.py for them: what is left of the update, written, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.merge_lora as merge_lora
import tools.quantize_model as quantize_model
from library.checksums import weights_fingerprint
from library.config.schema import ModelConfig
from library.console import Console
from library.errors import UserError
from library.fidelity.calibration import CalibrationOptions, CalibrationPlan
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange
from networks.files.adapters import load_lora
from networks.files.metadata import base_mismatch
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.precision.files.comfy import by_kitchen, comfy_tensors, rebuilt, same
from tests.precision.files.gguf_files import write_gguf
from tests.runs import ROOT, call, pipeline_forward
from tests.targets import FLUX_TARGETS
from tests.tiny import bfl_state_dict
from tools.refit_lora import parser, refit

BASE = ROOT / "assets" / "tiny-flux"
PARTS = {
    "ae": BASE, "clip_l": BASE, "t5xxl": BASE,
    "clip_l_tokenizer": BASE / "tokenizer", "t5xxl_tokenizer": BASE / "tokenizer_2",
}  # fmt: skip
MODULES = ("transformer_blocks.0.attn.to_k", "transformer_blocks.1.ff.net.2", "single_transformer_blocks.0.proj_mlp")
TENSORS = ("double_blocks.0.img_attn.qkv.weight", "double_blocks.1.img_mlp.2.weight", "single_blocks.0.linear1.weight")


class Files:
    """The tiny model as BFL's single file in bf16, fp8 files of it, and a LoRA of 1 % of three of its layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "assets" / "demo_dataset", folder / "data")
        self.dataset = folder / "data" / "dataset.toml"
        self.state = load_file(BASE / "transformer" / "diffusion_pytorch_model.safetensors")
        self.high = {name: tensor.bfloat16() for name, tensor in bfl_state_dict(self.state).items()}
        self.model = folder / "flux1.safetensors"
        save_file(self.high, self.model)
        random = torch.Generator().manual_seed(0)
        self.lora = {}
        for name in MODULES:
            weight = self.state[f"{name}.weight"].float()
            up, down = (torch.randn(s, generator=random) for s in ((weight.shape[0], 4), (4, weight.shape[1])))
            size = (0.01 * weight.norm() / (up @ down).norm()).sqrt()
            self.lora[name] = LoraWeights(down * size, up * size, 4.0)
        self.lora_file = folder / "lora.safetensors"
        save_adapter(self.lora_file, self.lora, FLUX_TARGETS)

    def updates(self) -> dict[str, Tensor]:
        """Return tensor -> update, in BFL's stacking."""
        deltas = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in self.state.items()}
        for name, weights in self.lora.items():
            deltas[f"{name}.weight"] = weights.up @ weights.down
        return {name: tensor for name, tensor in bfl_state_dict(deltas).items() if name in TENSORS}

    def fp8(self, layout: str, *flags: str) -> Path:
        target = self.folder / f"{layout}.safetensors"
        if not target.exists():
            command(quantize_model, model=self.model, save_to=target, layout=layout)
        return target


def command(tool: object, **flags: object) -> None:
    call(tool, *(w for key, value in flags.items() for w in (f"--{key}", *([] if value is True else [value]))))


def numbers(path: Path) -> dict[str, Tensor]:
    """Return weight -> what its codes stand for, by the formats' definitions alone."""
    raw, found = load_file(path), {}
    for name in TENSORS:
        layer = name.removesuffix(".weight")
        scale = raw.get(f"{layer}.scale_weight", raw.get(f"{layer}.weight_scale"))
        values = raw[name].float()
        if scale is not None and scale.ndim == 3:
            values = (values.view(*scale.shape[:2], -1) * scale.float()).view(values.shape)
        elif scale is not None:
            values = values * scale.float()
        found[name] = values
    return found


def gain(merged: Tensor, base: Tensor, update: Tensor) -> float:
    return float(((merged - base).double() * update.double()).sum() / update.double().square().sum())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("merge_quantized"))


@pytest.mark.parametrize("precision", ["fp8", "fp8_scaled", "fp8_block64"])
def test_a_bf16_model_keeps_the_update_under_every_rounding(files: Files, precision: str, tmp_path: Path) -> None:
    """The tiny layers have 26 to 180 thousand entries and rounding noise of 3 times the update: spread up to 0.02."""
    for rounding in ("nearest", "stochastic") if precision == "fp8_scaled" else ("nearest",):
        out = tmp_path / f"{rounding}.safetensors"
        command(
            merge_lora, model=files.model, lora=files.lora_file, save_to=out, save_precision=precision,
            rounding=rounding, seed=1,
        )  # fmt: skip
        stored, updates = numbers(out), files.updates()
        for name in TENSORS:
            high = files.high[name].float()
            error = (stored[name] - high - updates[name]).norm() / high.norm()
            assert float(error) < (0.06 if rounding == "stochastic" else 0.04)
        together = [torch.cat([d[n].flatten() for n in TENSORS]) for d in (stored, files.high, updates)]
        assert gain(*together) == pytest.approx(1, abs=0.05)


def test_rounding_into_an_fp8_file_is_refused_by_the_layers_names(files: Files, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit) as stopped:
        command(merge_lora, model=files.fp8("comfy_scaled"), lora=files.lora_file, save_to=out)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert "lose more than 5 % of the update of" in printed.err
    assert all(name.removesuffix(".weight") in printed.err for name in TENSORS)
    assert "left by rounding nearest" in printed.out
    assert not out.exists()
    assert not list(tmp_path.iterdir())  # no spool left behind


def test_compensated_rounding_brings_the_whole_effect_into_an_fp8_file(files: Files, tmp_path: Path, capsys) -> None:
    base, out = files.fp8("comfy_scaled"), tmp_path / "out.safetensors"
    command(
        merge_lora, model=base, lora=files.lora_file, save_to=out, dataset_config=files.dataset,
        calibration_images=3, calibration_sigmas=0.6, **PARTS,
    )  # fmt: skip
    before, after, updates = numbers(base), numbers(out), files.updates()
    near = tmp_path / "near.safetensors"
    command(merge_lora, model=base, lora=files.lora_file, save_to=near, accept_loss=True)
    nearest = numbers(near)
    raw, new = load_file(base), load_file(out)
    for name in TENSORS:
        kept, lost = (gain(one[name], before[name], updates[name]) for one in (after, nearest))
        assert lost < 0.75
        assert kept > lost + 0.1
    for name in raw:  # what has no update keeps its bits
        layer = name.rpartition(".")[0]
        if f"{layer}.weight" not in TENSORS:
            assert torch.equal(raw[name].reshape(-1).view(torch.uint8), new[name].reshape(-1).view(torch.uint8))
    table = capsys.readouterr().out.partition("left by compensated")[2]
    rows = [line.split() for line in table.splitlines() if line.strip().startswith(("double", "single"))]
    # of what the update does to the outputs, on the images of the calibration
    assert [float(row[3]) for row in rows[:3]] == pytest.approx([1, 1, 1], abs=0.05)


MIXED = {TENSORS[0]: "int8_convrot", TENSORS[1]: "nvfp4", TENSORS[2]: "tensor"}


@pytest.fixture(scope="module")
def mixed(files: Files) -> Path:
    """A file whose layers have three formats, markers and scales of activations; and mxfp8 made by comfy-kitchen."""
    made = {scheme: files.folder / f"{scheme}.safetensors" for scheme in MIXED.values()}
    for scheme, path in made.items():
        command(quantize_model, model=files.model, save_to=path, scheme=scheme, layout="comfy_quant")
    tensors = dict(files.high)
    for name, scheme in MIXED.items():
        own, layer = load_file(made[scheme]), name.removesuffix("weight")
        tensors |= {each: tensor for each, tensor in own.items() if each.startswith(layer) and "bias" not in each}
        tensors[f"{layer}input_scale"] = torch.tensor(0.75 + len(tensors) % 7)
    own = "double_blocks.0.txt_mlp.0"
    weight = by_kitchen(files.high[f"{own}.weight"], "mxfp8")
    tensors |= comfy_tensors(own, weight, {"format": "mxfp8", "other": [1, 2]})
    path = files.folder / "mixed.safetensors"
    save_file(tensors, path, {"modelspec.title": "mixed", "_note": "kept"})
    return path


@pytest.mark.parametrize("rounding", ["stochastic", "compensated"])
def test_each_layer_of_a_mixed_file_keeps_its_format_and_all_else_its_bits(
    files: Files, mixed: Path, rounding: str, tmp_path: Path
) -> None:
    out, flags = tmp_path / "out.safetensors", {"rounding": rounding}
    if rounding == "compensated":
        flags |= {"dataset_config": files.dataset, "calibration_images": 2, "calibration_sigmas": 0.6, **PARTS}
    command(merge_lora, model=mixed, lora=files.lora_file, save_to=out, accept_loss=True, **flags)
    before, after, updates = WeightFiles(mixed), WeightFiles(out), files.updates()
    assert before.quantized is not None
    assert after.quantized is not None
    assert after.metadata["_note"] == "kept"
    raw, new = load_file(mixed), load_file(out)
    changed = {name for stored in TENSORS for name in before.quantized.weights[stored].tensors.values()}
    assert set(raw) == set(new)
    for name in raw.keys() - changed:  # markers, scales of activations, mxfp8 and what is not quantised
        assert same(raw[name], new[name])
    for name in TENSORS:
        kind = {"int8_convrot": "int8_tensorwise", "nvfp4": "nvfp4"}.get(MIXED[name])
        ours = after.read_float(RowRange(name))
        if kind:  # the new numbers are what comfy-kitchen reads
            assert same(ours, rebuilt(after.quantized.weights[name], new, kind, torch.float32))
        lost = (ours - before.read_float(RowRange(name)) - updates[name]).norm() / files.high[name].float().norm()
        assert float(lost) < (0.2 if kind == "nvfp4" else 0.06)  # no more than rounding once more


def test_gguf_is_not_merged_into(files: Files, tmp_path: Path, capsys) -> None:
    matrices = {n: t for n, t in files.high.items() if t.ndim > 1}
    path = write_gguf(tmp_path / "model.gguf", matrices, lambda name, _: "Q8_0" if name in TENSORS else "F16")
    out = tmp_path / "out.safetensors"
    with pytest.raises(SystemExit) as stopped:
        command(merge_lora, model=path, lora=files.lora_file, save_to=out)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "is read only here; its servers add a LoRA at run time" in text
    assert text.count("\n") == 1
    assert not out.exists()


def test_what_does_not_go_together_is_refused(files: Files, tmp_path: Path, capsys) -> None:
    model, fp8, lora, out = files.model, files.fp8("comfy_scaled"), files.lora_file, tmp_path / "out.safetensors"
    cases = {
        "a LoRA is never quantised": {"lora": lora, "save_precision": "fp8"},
        "has no effect here": {"model": model, "lora": lora, "rounding": "nearest"},
        "goes with --dataset_config": {
            "model": model,
            "lora": lora,
            "save_precision": "fp8",
            "rounding": "compensated",
        },
        "is quantised and stays as it is": {"model": fp8, "lora": lora, "save_precision": "fp8_block64"},
    }
    for message, given in cases.items():
        with pytest.raises(SystemExit):
            command(merge_lora, save_to=out, **given)
        assert message in capsys.readouterr().err
    assert not out.exists()


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


@pytest.mark.parametrize("kind", ["plain", pytest.param("musubi", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(
    "deploy", ["int8_convrot", "gguf", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "nvfp4"))]
)
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
