"""Merging against the running LoRA and against the sum written out in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

import networks.files.base
from library.checksums import weights_fingerprint
from library.errors import UserError
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import make_flux, run_flux
from tests.targets import FLUX_KEYS, FLUX_TARGETS


def original_layout(model: FluxTransformer2DModel, prefix: str = "") -> dict[str, Tensor]:
    """Return the model's weights under BFL's keys: the inverse of diffusers' conversion."""
    state = model.state_dict()
    tensors = {}
    for row in FLUX_KEYS.rows:
        for block in range(2) if "{i}" in row.original else (0,):
            modules = [part.replace("{i}", str(block)) for part in row.parts]
            for kind in ("weight", "bias"):
                joined = torch.cat([state[f"{module}.{kind}"] for module in modules])
                swapped = torch.cat(joined.chunk(2)[::-1]) if row.halves_swapped else joined
                tensors[f"{prefix}{row.original.replace('{i}', str(block))}.{kind}"] = swapped
    tensors[f"{prefix}double_blocks.0.img_attn.norm.query_norm.scale"] = torch.ones(16)
    return tensors


@pytest.fixture
def lora(mixed_lora, tmp_path: Path):
    """A saved LoRA, its weights and the running model's output."""
    model, network = mixed_lora()
    path = tmp_path / "lora.safetensors"
    save_adapter(path, network.weights(), FLUX_TARGETS, "kohya")
    return path, network.weights(), run_flux(model)


def test_merged_folder_computes_what_the_running_lora_computes(lora, tmp_path: Path) -> None:
    path, _, expected = lora
    make_flux().save_pretrained(tmp_path / "base")
    report = merge_loras(tmp_path / "base", [LoraSource(path, 1.0)], tmp_path / "merged", FLUX_TARGETS)
    assert (report.changed, report.notes) == (44, ())
    merged = FluxTransformer2DModel.from_pretrained(tmp_path / "merged").eval()
    # W + BA rounded to fp32 once, against x W + x A B: fp32 rounding in a sum of up to 160 products
    torch.testing.assert_close(run_flux(merged), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_original_layout_gets_the_same_updates_in_its_own_rows(prefix: str, lora, tmp_path: Path) -> None:
    path, weights, _ = lora
    model = make_flux()
    final = {"norm_out.linear": LoraWeights(torch.randn(2, 32), torch.randn(64, 2), 1.0)}
    save_adapter(tmp_path / "final.safetensors", final, FLUX_TARGETS)
    save_file(original_layout(model, prefix), tmp_path / "base.safetensors")
    sources = [LoraSource(path, 0.5), LoraSource(tmp_path / "final.safetensors", 2.0)]
    merge_loras(tmp_path / "base.safetensors", sources, tmp_path / "out.safetensors", FLUX_TARGETS)
    state = model.state_dict()
    for name, w in weights.items():
        state[f"{name}.weight"] = state[f"{name}.weight"].double() + 0.5 * w.delta(torch.float64)
    state["norm_out.linear.weight"] = state["norm_out.linear.weight"].double() + 2 * final["norm_out.linear"].delta(
        torch.float64
    )
    model.load_state_dict(state)
    expected = original_layout(model, prefix)
    merged = load_file(tmp_path / "out.safetensors")
    assert merged.keys() == expected.keys()
    # fp32 sums of products up to about 4: the default relative 1.3e-6 and 1e-5 absolute
    torch.testing.assert_close(merged, {k: v.float() for k, v in expected.items()}, check_dtype=True)


def test_bf16_base_is_rounded_once_from_the_exact_sum(lora, tmp_path: Path) -> None:
    path, weights, _ = lora
    model = make_flux().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    twice = [LoraSource(path, 0.3), LoraSource(path, -0.2)]
    merge_loras(tmp_path / "base", twice, tmp_path / "merged", FLUX_TARGETS)
    merged = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")
    state = model.state_dict()
    assert merged.keys() == state.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        exact = state[name].double()
        if w := weights.get(name.removesuffix(".weight")) if name.endswith(".weight") else None:
            exact = exact + (0.3 - 0.2) * w.delta(torch.float64)
        # half a unit in the last of 8 bits, and fp32's error where the sum lies on the edge between two
        assert torch.all((tensor.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001 + 1e-7)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("fp32", torch.float32)])
def test_all_floats_take_the_asked_precision_and_integers_stay(
    precision: str, dtype: torch.dtype, lora, tmp_path: Path
) -> None:
    base = {**original_layout(make_flux()), "step": torch.tensor([3])}
    save_file(base, tmp_path / "base.safetensors", metadata={"modelspec.title": "x", "modelspec.hash_sha256": "0x1"})
    seen = []
    merge_loras(
        tmp_path / "base.safetensors", [LoraSource(lora[0], 1.0)], tmp_path / "out.safetensors", FLUX_TARGETS,
        precision, lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    merged = load_file(tmp_path / "out.safetensors")
    assert {t.dtype for name, t in merged.items() if name != "step"} == {dtype}
    assert torch.equal(merged["step"], base["step"])
    assert seen == [(i + 1, len(base)) for i in range(len(base))]
    from safetensors import safe_open

    with safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.title"] == "x"
    assert "modelspec.hash_sha256" not in metadata
    assert json.loads(metadata["tandem.merged_loras"]) == [{"lora": "lora.safetensors", "ratio": 1.0}]


def test_a_sharded_pipeline_keeps_its_shards_and_its_other_parts(lora, tmp_path: Path) -> None:
    path, _, expected = lora
    base = tmp_path / "base"
    make_flux().save_pretrained(base / "transformer", max_shard_size="60KB")
    index_name = "diffusion_pytorch_model.safetensors.index.json"
    index = json.loads((base / "transformer" / index_name).read_text())
    assert len(set(index["weight_map"].values())) > 2
    (base / "vae").mkdir()
    (base / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"vae")
    (base / "model_index.json").write_text("{}")
    (tmp_path / "merged").mkdir()
    merge_loras(base, [LoraSource(path, 1.0)], tmp_path / "merged", FLUX_TARGETS, "fp32")
    names = sorted(str(p.relative_to(base)) for p in base.rglob("*"))
    assert sorted(str(p.relative_to(tmp_path / "merged")) for p in (tmp_path / "merged").rglob("*")) == names
    assert (tmp_path / "merged" / "vae" / "diffusion_pytorch_model.safetensors").read_bytes() == b"vae"
    assert json.loads((tmp_path / "merged" / "transformer" / index_name).read_text()) == index
    merged = FluxTransformer2DModel.from_pretrained(tmp_path / "merged" / "transformer").eval()
    torch.testing.assert_close(run_flux(merged), expected, rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "lora.safetensors", "merged"]


def test_a_lora_trained_on_other_weights_is_remarked(tmp_path: Path, mixed_lora) -> None:
    base = tmp_path / "base"
    make_flux().save_pretrained(base)
    _, network = mixed_lora()
    for name, stated in (("same", weights_fingerprint(base)), ("other", "0123")):
        metadata = {"tandem.base_fingerprint": stated}
        save_adapter(tmp_path / name, network.weights(), FLUX_TARGETS, metadata=metadata)
    sources = [LoraSource(tmp_path / name, 1.0) for name in ("same", "other")]
    file = base / "diffusion_pytorch_model.safetensors"  # alone it is the base that its folder is
    assert merge_loras(file, sources[:1], tmp_path / "merged.safetensors", FLUX_TARGETS).notes == ()
    (note,) = merge_loras(base, sources, tmp_path / "merged", FLUX_TARGETS).notes
    assert note.startswith(f"{tmp_path / 'other'}: trained on base 0123, this one is {weights_fingerprint(base)}")


def test_what_does_not_fit_is_refused_before_anything_is_written(lora, tmp_path: Path, monkeypatch) -> None:
    path = lora[0]
    base = tmp_path / "base"
    make_flux().save_pretrained(base)
    single = tmp_path / "base.safetensors"
    save_file(original_layout(make_flux()), single)
    shallow = tmp_path / "shallow"
    make_flux(blocks=1).save_pretrained(shallow)
    narrow = tmp_path / "narrow.safetensors"
    weights = {"transformer_blocks.0.attn.to_k": LoraWeights(torch.ones(2, 64), torch.ones(64, 2), 1.0)}
    save_adapter(narrow, weights, FLUX_TARGETS)
    vae = tmp_path / "vae.safetensors"
    save_file({"decoder.conv_in.weight": torch.ones(2, 2)}, vae)
    fp8 = tmp_path / "fp8.safetensors"
    save_file({"img_in.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, fp8)
    two = tmp_path / "two"
    two.mkdir()
    shutil.copy(single, two / "a.safetensors")
    shutil.copy(single, two / "b.safetensors")
    before = sorted(tmp_path.iterdir())
    new = tmp_path / "new"
    cases = [
        (tmp_path / "nowhere", path, new, "nowhere: no such file or folder; check --model"),
        (base, tmp_path / "nolora.safetensors", new, "nolora.safetensors: no such file"),
        (shallow, path, new, "modules are not in the base (single_transformer_blocks.1.attn.to_k"),
        (base, narrow, new, "transformer_blocks.0.attn.to_k is for 64x64, the base has 32x32"),
        (single, narrow, new, "transformer_blocks.0.attn.to_k is for 64x64, the base has 32x32"),
        (vae, path, new, "holds no transformer of flux; give its transformer file"),
        (fp8, path, new, "fp8.safetensors: img_in.weight is stored as F8_E4M3; merge into the bf16 or fp16 file"),
        (two, path, new, "two: 2 safetensors files and no index; give one of the files"),
        (single, path, new, "new: the base is one file; end --save_to in .safetensors"),
        (single, path, single, "is the base itself; choose another --save_to"),
        (base, path, shallow, "shallow: exists and is no empty folder; choose another --save_to"),
        (base, path, tmp_path / "m.safetensors", "m.safetensors: the base is a folder; give --save_to a folder's name"),
        (base, path, base / "merged", "merged: lies inside the base; choose another --save_to"),
    ]
    for model, source, save_to, message in cases:
        with pytest.raises(UserError) as caught:
            merge_loras(model, [LoraSource(source, 1.0)], save_to, FLUX_TARGETS)
        assert message in str(caught.value)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(networks.files.base.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"new: needs 0.0 GB, .* has 0.0 GB; free some space or choose another disk"):
        merge_loras(base, [LoraSource(path, 1.0)], new, FLUX_TARGETS)
    assert sorted(tmp_path.iterdir()) == before


def test_a_value_beyond_fp16_is_named_and_nothing_is_left(lora, tmp_path: Path) -> None:
    model = make_flux()
    model.x_embedder.weight.data.fill_(1e5)
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match=r"x_embedder.weight leaves the range of fp16; use --save_precision bf16"):
        merge_loras(tmp_path / "base", [LoraSource(lora[0], 1.0)], tmp_path / "new", FLUX_TARGETS, "fp16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "lora.safetensors"]


def test_a_strength_that_leaves_nothing_of_the_model_is_refused() -> None:
    for strength in (float("-inf"), float("nan"), -2000.0):
        with pytest.raises(UserError, match=r"--lora a.safetensors: a strength of .*; give one from -1000 to 1000"):
            LoraSource(Path("a.safetensors"), strength)


@pytest.mark.parametrize(("precision", "folder"), [(None, True), ("fp16", False)])
def test_a_merge_that_is_not_finite_is_refused_and_nothing_is_written(
    tmp_path: Path, precision: str | None, folder: bool
) -> None:
    huge = torch.full((2, 32), 1e30)
    weights = {"transformer_blocks.1.attn.to_q": LoraWeights(huge, huge.t().contiguous(), 2.0)}
    save_adapter(tmp_path / "lora.safetensors", weights, FLUX_TARGETS)
    model = make_flux()
    model.save_pretrained(tmp_path / "base")
    save_file(original_layout(model), tmp_path / "base.safetensors")
    base, out = (tmp_path / f"{name}{'' if folder else '.safetensors'}" for name in ("base", "out"))
    with pytest.raises(UserError, match="is not finite with the LoRAs in it; lower their strengths") as refused:
        merge_loras(base, [LoraSource(tmp_path / "lora.safetensors", 1.0)], out, FLUX_TARGETS, precision)
    assert ("transformer_blocks.1.attn.to_q" if folder else "double_blocks.1.img_attn.qkv") in str(refused.value)
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "base.safetensors", "lora.safetensors"]


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", ["single_transformer_blocks.0.attn.to_q.weight", "proj_out.bias"])
def test_a_base_that_is_not_finite_is_refused_and_nothing_is_written(
    tmp_path: Path, lora, value: str, name: str
) -> None:
    model = make_flux()
    model.get_parameter(name).data.view(-1)[3] = float(value)
    model.save_pretrained(tmp_path / "base")
    changed = name in {f"{each}.weight" for each in lora[1]}
    assert changed == ("to_q" in name)
    merge = lambda: merge_loras(tmp_path / "base", [LoraSource(lora[0], 1.0)], tmp_path / "out", FLUX_TARGETS)  # noqa: E731
    if value == "inf" and not changed:  # a mask may hold it
        merge()
        return
    with pytest.raises(UserError, match=f"{name} holds NaN or infinity in the base already; download or make"):
        merge()
    assert not (tmp_path / "out").exists()
