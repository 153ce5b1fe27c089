"""LoRA files against diffusers and PEFT, and against files whose keys and updates are written out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.run_schema import SAVE_FORMATS
from library.errors import UserError
from library.models.layer_names import KeyRow
from networks.files.adapters import load_lora
from networks.files.joined import fuse_parts, split_parts
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.network import attach_lora
from tests.networks.conftest import diffusers_pipeline, inject, make_flux, random_pair, run_flux, train_a_little
from tests.targets import FLUX_KEYS, FLUX_TARGETS


def output_in_diffusers(path: Path) -> Tensor:
    pipe = diffusers_pipeline("flux", make_flux())
    pipe.load_lora_weights(str(path))
    return run_flux(pipe.transformer)


def deltas(weights: dict[str, LoraWeights]) -> dict[str, Tensor]:
    return {name: w.delta(torch.float64) for name, w in weights.items()}


def test_diffusers_computes_what_our_network_computes(mixed_lora, tmp_path: Path) -> None:
    model, network = mixed_lora()
    assert len({layer.rank for layer in network.modules.values()}) > 2  # mixed ranks, alpha 3 throughout
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS)
    ours = run_flux(model)
    assert (run_flux(make_flux()) - ours).abs().max() > 0.1
    # the same products in fp32, scaled at another place: far below the 1e-4 that is asked for
    torch.testing.assert_close(output_in_diffusers(tmp_path / "a.safetensors"), ours, rtol=1e-5, atol=1e-5)


def test_diffusers_takes_a_pattern_for_the_top_level_alone(tmp_path: Path) -> None:
    """proj_out of the model and of every single block share their last name; ranks and alphas must not mix."""
    rng = torch.Generator().manual_seed(0)
    lora = {
        "proj_out": random_pair((16, 32), 2, 5.0, rng, up=0.1),
        "single_transformer_blocks.0.proj_out": random_pair((32, 160), 4, 1.0, rng, up=0.1),
        "single_transformer_blocks.1.proj_out": random_pair((32, 160), 4, 1.0, rng, up=0.1),
    }
    save_adapter(tmp_path / "a.safetensors", lora, FLUX_TARGETS)
    model = make_flux()
    attach_lora(model, lora, FLUX_TARGETS, "a")
    torch.testing.assert_close(output_in_diffusers(tmp_path / "a.safetensors"), run_flux(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_format", ["kohya", "comfy"])
def test_diffusers_loads_the_original_layouts_too(save_format: str, tmp_path: Path) -> None:
    model = make_flux()
    # its converter splits linear1 at FLUX.1's width only, so the double blocks have to do here
    network = inject(model, "train_single_block_indices=none", "img_mlp_dim=6", alpha=3.0)
    train_a_little(network)
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS, save_format)
    torch.testing.assert_close(output_in_diffusers(tmp_path / "a.safetensors"), run_flux(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_format", SAVE_FORMATS)
def test_every_format_returns_the_same_updates_through_every_other(
    save_format: str, mixed_lora, tmp_path: Path
) -> None:
    _, network = mixed_lora()
    expected = deltas(network.weights())
    weights = network.weights()
    for number, through in enumerate((save_format, *SAVE_FORMATS, save_format)):
        path = tmp_path / f"{number}.safetensors"
        save_adapter(path, weights, FLUX_TARGETS, through)
        read = load_lora(path, FLUX_TARGETS)
        assert read.layout == through
        weights = read.weights
    # scales that differ within a fused layer are folded into B: one fp32 rounding each time
    torch.testing.assert_close(deltas(weights), expected, rtol=1e-6, atol=1e-6)


def hand_made(down_suffix: str, up_suffix: str, names: dict[str, tuple[int, int]], alpha: bool) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(3)
    tensors = {}
    for name, (out, columns) in names.items():
        tensors[name + down_suffix] = torch.randn(4, columns, generator=rng)
        tensors[name + up_suffix] = torch.randn(out, 4, generator=rng)
        if alpha:
            tensors[name + ".alpha"] = torch.tensor(2.0)
    return tensors


def dotted(prefix: str) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}transformer_blocks.1.attn.to_q": (32, 32),
        f"{prefix}single_transformer_blocks.0.proj_mlp": (128, 32),
        f"{prefix}transformer_blocks.0.ff.net.0.proj": (128, 32),
    }


def underscored(prefix: str) -> dict[str, tuple[int, int]]:
    return {prefix + name.replace(".", "_"): shape for name, shape in dotted("").items()}


AB = (".lora_A.weight", ".lora_B.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")


@pytest.mark.parametrize("alpha", [True, False], ids=["alpha", "no alpha"])
@pytest.mark.parametrize(
    ("names", "suffixes", "layout"),
    [
        (dotted("transformer."), AB, "diffusers"),
        (dotted("transformer."), DOWN_UP, "diffusers"),
        (dotted("transformer."), (".lora.down.weight", ".lora.up.weight"), "diffusers"),
        (dotted("diffusion_model."), AB, "comfy"),
        (dotted("model.diffusion_model."), DOWN_UP, "comfy"),
        (dotted("base_model.model."), AB, "peft"),
        (dotted("base_model.model.transformer."), (".lora_A.default.weight", ".lora_B.default.weight"), "peft"),
        (dotted(""), AB, "bare"),
        (underscored("lora_transformer_"), DOWN_UP, "kohya"),
        (underscored("lora_unet_"), DOWN_UP, "kohya"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_published_layouts_of_split_modules_are_read(
    names: dict, suffixes: tuple[str, str], layout: str, alpha: bool, tmp_path: Path
) -> None:
    tensors = hand_made(*suffixes, names, alpha)
    save_file(tensors, tmp_path / "a.safetensors")
    read = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    assert read.layout == layout
    assert sorted(read.weights) == sorted(dotted(""))
    for given, name in zip(names, dotted(""), strict=True):
        scale = 0.5 if alpha else 1.0  # alpha 2 at rank 4; without alpha the scale is 1
        expected = scale * tensors[given + suffixes[1]].double() @ tensors[given + suffixes[0]].double()
        torch.testing.assert_close(read.weights[name].delta(torch.float64), expected)


@pytest.mark.parametrize(
    ("prefix", "suffixes", "separator"),
    [("lora_unet_", DOWN_UP, "_"), ("diffusion_model.", AB, "."), ("diffusion_model.", DOWN_UP, "."), ("", AB, ".")],
)
def test_fused_modules_of_the_original_layout_are_split(
    prefix: str, suffixes: tuple[str, str], separator: str, tmp_path: Path
) -> None:
    shapes = {
        "double_blocks.0.img_attn.qkv": (96, 32),
        "double_blocks.1.txt_attn.proj": (32, 32),
        "single_blocks.1.linear1": (224, 32),
        "single_blocks.1.linear2": (32, 160),
        "img_in": (32, 16),
        "final_layer.adaLN_modulation.1": (64, 32),
    }
    names = {prefix + name.replace(".", separator): shape for name, shape in shapes.items()}
    tensors = hand_made(*suffixes, names, alpha=True)
    save_file(tensors, tmp_path / "a.safetensors")
    read = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS).weights
    d = {
        name: 0.5 * tensors[given + suffixes[1]].double() @ tensors[given + suffixes[0]].double()
        for name, given in zip(shapes, names, strict=True)
    }
    expected = {
        "transformer_blocks.0.attn.to_q": d["double_blocks.0.img_attn.qkv"][:32],
        "transformer_blocks.0.attn.to_k": d["double_blocks.0.img_attn.qkv"][32:64],
        "transformer_blocks.0.attn.to_v": d["double_blocks.0.img_attn.qkv"][64:],
        "transformer_blocks.1.attn.to_add_out": d["double_blocks.1.txt_attn.proj"],
        "single_transformer_blocks.1.attn.to_q": d["single_blocks.1.linear1"][:32],
        "single_transformer_blocks.1.attn.to_k": d["single_blocks.1.linear1"][32:64],
        "single_transformer_blocks.1.attn.to_v": d["single_blocks.1.linear1"][64:96],
        "single_transformer_blocks.1.proj_mlp": d["single_blocks.1.linear1"][96:],
        "single_transformer_blocks.1.proj_out": d["single_blocks.1.linear2"],
        "x_embedder": d["img_in"],
        # diffusers has scale before shift, the original shift before scale
        "norm_out.linear": torch.cat(
            [d["final_layer.adaLN_modulation.1"][32:], d["final_layer.adaLN_modulation.1"][:32]]
        ),
    }
    torch.testing.assert_close(deltas(read), expected)


def test_kohya_files_hold_the_published_keys_with_qkv_fused(tmp_path: Path) -> None:
    network = inject(make_flux(), alpha=2.0)
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS, "kohya")
    tensors = load_file(tmp_path / "a.safetensors")
    modules = {
        *(f"double_blocks_{i}_{s}_{m}" for i in (0, 1) for s in ("img", "txt")
          for m in ("attn_qkv", "attn_proj", "mlp_0", "mlp_2", "mod_lin")),
        *(f"single_blocks_{i}_{m}" for i in (0, 1) for m in ("linear1", "linear2", "modulation_lin")),
    }  # fmt: skip
    assert {key.partition(".")[0] for key in tensors} == {f"lora_unet_{module}" for module in modules}
    qkv = "lora_unet_double_blocks_0_img_attn_qkv"
    assert tensors[f"{qkv}.lora_down.weight"].shape == (12, 32)  # 3 x rank 4
    assert tensors[f"{qkv}.alpha"] == 6.0  # 3 x alpha 2: the scale stays 1/2
    assert tensors["lora_unet_single_blocks_0_linear1.lora_up.weight"].shape == (224, 16)  # 4 x rank 4


def test_a_folder_saved_by_peft_is_read_with_its_alphas(tmp_path: Path) -> None:
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["to_q", "proj_out"], rank_pattern={"proj_out": 2},
        alpha_pattern={r"^proj_out": 5, r"single_transformer_blocks\.1\.proj_out": 3}, init_lora_weights=False,
        use_rslora=True,
    )  # fmt: skip
    theirs = get_peft_model(make_flux(), config)
    theirs.save_pretrained(tmp_path / "peft")
    read = load_lora(tmp_path / "peft", FLUX_TARGETS)
    assert read.layout == "peft"
    model = make_flux()
    attach_lora(model, read.weights, FLUX_TARGETS, "peft")
    torch.testing.assert_close(run_flux(model), run_flux(theirs), rtol=1e-5, atol=1e-5)


def test_a_file_saved_by_diffusers_is_read_with_its_alphas(tmp_path: Path) -> None:
    theirs = make_flux()
    theirs.add_adapter(
        LoraConfig(
            r=4, lora_alpha=6, target_modules=["to_k", "proj_mlp"], rank_pattern={"proj_mlp": 2},
            alpha_pattern={"proj_mlp": 3}, init_lora_weights=False,
        )
    )  # fmt: skip
    FluxPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(theirs),
        **_collate_lora_metadata({"transformer": theirs}),
    )
    read = load_lora(tmp_path / "pytorch_lora_weights.safetensors", FLUX_TARGETS)
    assert read.layout == "diffusers"
    model = make_flux()
    attach_lora(model, read.weights, FLUX_TARGETS, "diffusers")
    torch.testing.assert_close(run_flux(model), run_flux(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_take_the_asked_precision_and_alphas_stay_exact(
    precision: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    network = inject(make_flux(), alpha=0.3)
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS, "comfy", precision)
    tensors = load_file(tmp_path / "a.safetensors")
    assert {t.dtype for key, t in tensors.items() if not key.endswith(".alpha")} == {dtype}
    alpha = tensors["diffusion_model.single_blocks.0.linear2.alpha"]
    assert (alpha.dtype, alpha.shape) == (torch.float32, ())
    assert alpha == torch.tensor(0.3)


def test_equal_loras_give_equal_bytes(tmp_path: Path) -> None:
    weights = inject(make_flux()).weights()
    for name in ("a", "b"):
        save_adapter(tmp_path / name, weights, FLUX_TARGETS, metadata={"ss_x": "1", "ss_a": "2", "tandem.v": "3"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_metadata_comes_back_and_diffusers_finds_its_own(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", inject(make_flux()).weights(), FLUX_TARGETS, metadata={"ss_seed": "7"})
    metadata = load_lora(tmp_path / "a", FLUX_TARGETS).metadata
    assert (metadata["ss_seed"], metadata["format"]) == ("7", "pt")
    config = json.loads(metadata["lora_adapter_metadata"])
    assert (config["transformer.r"], config["transformer.lora_alpha"]) == (4, 4.0)
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == metadata


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    weights = inject(make_flux()).weights()
    save_adapter(tmp_path / "a", weights, FLUX_TARGETS)
    before = (tmp_path / "a").read_bytes()
    name = "transformer_blocks.0.ff.net.2"
    bad = LoraWeights(weights[name].down.clone().fill_(float("nan")), weights[name].up, 1.0)
    with pytest.raises(UserError, match=r"a: transformer.transformer_blocks.0.ff.net.2.lora_A.weight holds NaN or inf"):
        save_adapter(tmp_path / "a", {**weights, name: bad}, FLUX_TARGETS)
    large = LoraWeights(weights[name].down.clone().fill_(1e7), weights[name].up, 1.0)
    with pytest.raises(UserError, match=r"lora_A.weight leaves the range of fp16; save in bf16 or fp32"):
        save_adapter(tmp_path / "a", {**weights, name: large}, FLUX_TARGETS, precision="fp16")
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_layers_that_a_format_has_no_name_for_are_refused(tmp_path: Path) -> None:
    weights = inject(make_flux()).weights()
    strange = {"decoder.0": next(iter(weights.values()))}
    with pytest.raises(UserError, match=r"decoder.0 is not in flux's original layout; use save_format=diffusers"):
        save_adapter(tmp_path / "a", strange, FLUX_TARGETS, "kohya")


GOOD = hand_made(*AB, dotted("transformer."), alpha=False)
FIRST = "transformer.transformer_blocks.1.attn.to_q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_te1_text_projection.lora_down.weight": torch.ones(4, 8)},
         "1 keys are no LoRA weights of flux's transformer or text encoders: lora_te1_text_projection.lora_down"),
        ({"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.ones(4, 8)},
         "lora_te1_text_model_encoder_layers_0_mlp_fc1 has no up-projection"),
        ({f"{FIRST}.lora_magnitude_vector": torch.ones(32)}, "to_q.lora_magnitude_vector), no LoRA; merge it"),
        ({f"{FIRST}.dora_scale": torch.ones(32, 1)}, "to_q.dora_scale"),
        ({"lora_unet_double_blocks_0_img_attn_qkv.lokr_w1": torch.ones(4, 4)}, "img_attn_qkv.lokr_w1"),
        ({"transformer.transformer_blocks.0.attn.norm_q.lora_A.weight": torch.ones(4, 8)}, "attn.norm_q.lora_A"),
        ({f"{FIRST}.lora_B.weight": None}, f"{FIRST} has no up-projection; the file is incomplete"),
        ({f"{FIRST}.lora_A.weight": torch.ones(3, 32)}, "down (3, 32) and up (32, 4) are no LoRA of a linear layer"),
        ({f"{FIRST}.lora_A.weight": torch.full((4, 32), float("inf"))}, f"{FIRST} holds NaN or infinity"),
        ({f"{FIRST}.lora_down.weight": torch.ones(4, 32)}, f"{FIRST} has two down tensors; keep one of them"),
        ({"transformer_blocks.1.attn.to_q.lora_A.weight": torch.ones(4, 32),
          "transformer_blocks.1.attn.to_q.lora_B.weight": torch.ones(32, 4)},
         "transformer_blocks.1.attn.to_q is there twice, in two namings"),
        ({"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": torch.ones(4, 32),
          "diffusion_model.double_blocks.0.img_attn.qkv.lora_B.weight": torch.ones(90, 4)},
         "img_attn.qkv: 90 output rows, 96 expected for 32 input columns; the file was made for another model"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_read_is_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    tensors = {key: tensor for key, tensor in {**GOOD, **change}.items() if tensor is not None}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as caught:
        load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'a.safetensors'}: ")


def test_files_that_are_no_lora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing.safetensors: no such file"):
        load_lora(tmp_path / "missing.safetensors", FLUX_TARGETS)
    (tmp_path / "text").write_text("this is no LoRA, it is a sentence")
    with pytest.raises(UserError, match="text: not a safetensors file"):
        load_lora(tmp_path / "text", FLUX_TARGETS)
    save_file({}, tmp_path / "empty")
    with pytest.raises(UserError, match="empty: no tensors; not a LoRA file"):
        load_lora(tmp_path / "empty", FLUX_TARGETS)


@pytest.mark.parametrize("text", ["{broken", "[1]"])
def test_adapter_metadata_that_cannot_be_honoured_is_refused(text: str, tmp_path: Path) -> None:
    save_file(GOOD, tmp_path / "a", metadata={"lora_adapter_metadata": text})
    with pytest.raises(UserError, match="metadata lora_adapter_metadata: not a JSON object"):
        load_lora(tmp_path / "a", FLUX_TARGETS)


QKV = KeyRow("qkv", ("q", "k", "v"), rows=(1, 1, 1))
LINEAR1 = KeyRow("linear1", ("q", "k", "v", "mlp"), rows=(1, 1, 1, 4))
WIDTH = 6


def part(rank: int, alpha: float, seed: int, out: int = WIDTH) -> LoraWeights:
    return random_pair((out, WIDTH), rank, alpha, torch.Generator().manual_seed(seed))


def stacked(row: KeyRow, parts: dict[int, LoraWeights]) -> torch.Tensor:
    """The original module's update: the parts' updates under each other, zeros where there is none."""
    heights = [multiple * WIDTH for multiple in row.rows]
    return torch.cat([parts[i].delta() if i in parts else torch.zeros(h, WIDTH) for i, h in enumerate(heights)])


CASES = {
    "equal": (QKV, {i: part(3, 1.5, i) for i in range(3)}),
    "with mlp": (LINEAR1, {i: part(3, 5.0, i, WIDTH * (4 if i == 3 else 1)) for i in range(4)}),
    "q missing": (QKV, {1: part(3, 1.5, 1), 2: part(3, 1.5, 2)}),
    "mlp missing": (LINEAR1, {0: part(2, 1.0, 1)}),
    "mixed ranks, one scale": (QKV, {0: part(2, 1.0, 0), 1: part(4, 2.0, 1), 2: part(4, 2.0, 2)}),
    "mixed ranks, one alpha": (QKV, {0: part(2, 3.0, 0), 1: part(4, 3.0, 1), 2: part(1, 3.0, 2)}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_update_is_the_parts_updates_and_splits_into_them_again(case) -> None:
    row, parts = case
    fused = fuse_parts(row, parts)
    expected = stacked(row, parts)
    torch.testing.assert_close(fused.delta(), expected)
    again = split_parts(row, fused)
    assert {i: p.rank for i, p in again.items()} == {i: p.rank for i, p in parts.items()}
    torch.testing.assert_close(stacked(row, again), expected)


@pytest.mark.parametrize("name", ["equal", "with mlp"])
def test_equal_parts_keep_their_bits_and_their_alpha(name: str) -> None:
    row, parts = CASES[name]
    again = split_parts(row, fuse_parts(row, parts))
    for i, before in parts.items():
        assert torch.equal(again[i].down, before.down)
        assert torch.equal(again[i].up, before.up)
        assert again[i].alpha == before.alpha


def test_a_dense_fused_lora_splits_with_one_down_and_fuses_back_to_itself() -> None:
    fused = part(6, 2.0, 0, 3 * WIDTH)  # rank 6: a multiple of 3, but not block-diagonal
    parts = split_parts(QKV, fused)
    torch.testing.assert_close(stacked(QKV, parts), fused.delta())
    back = fuse_parts(QKV, parts)
    assert (back.rank, back.alpha) == (6, 2.0)
    assert torch.equal(back.up, fused.up)


def test_halves_are_swapped_for_modulations_in_the_other_order() -> None:
    row = KeyRow("adaLN", ("norm_out",), halves_swapped=True)
    fused = part(2, 1.0, 0, 4)
    (split,) = split_parts(row, fused).values()
    assert torch.equal(split.up, fused.up[[2, 3, 0, 1]])
    assert torch.equal(fuse_parts(row, {0: split}).up, fused.up)


def test_rows_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="20 output rows, 18 expected for 6 input columns"):
        split_parts(QKV, part(3, 1.0, 0, 20))


def original_shapes() -> dict[str, tuple[int, int]]:
    """Original linear layers at FLUX.1's width: diffusers' converter splits linear1 at 3072."""
    wide = {"qkv": 9216, "linear1": 21504, "mlp.0": 12288}
    shapes = {}
    for row in FLUX_KEYS.rows:
        name = row.original.replace("{i}", "0")
        out = next((size for part, size in wide.items() if name.endswith(part)), 3072)
        shapes[name] = (out, 3072)
    return shapes


def test_every_row_of_every_original_layer_lands_where_diffusers_puts_it() -> None:
    checkpoint, start = {}, {}
    count = 0
    for name, (out, columns) in original_shapes().items():
        start[name] = count
        # one number per row instead of a matrix: which original row it is
        checkpoint[f"{name}.weight"] = torch.arange(count, count + out)
        checkpoint[f"{name}.bias"] = torch.zeros(out)
        count += out
        assert columns == 3072
    for norm in ("img_attn.norm", "txt_attn.norm"):
        checkpoint[f"double_blocks.0.{norm}.query_norm.scale"] = torch.zeros(1)
        checkpoint[f"double_blocks.0.{norm}.key_norm.scale"] = torch.zeros(1)
    checkpoint["single_blocks.0.norm.query_norm.scale"] = torch.zeros(1)
    checkpoint["single_blocks.0.norm.key_norm.scale"] = torch.zeros(1)
    converted = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    seen = set()
    for name, shape in original_shapes().items():
        place = FLUX_KEYS.find(name)
        assert place is not None
        assert place.original == name
        top = start[name]
        for module, rows in zip(place.modules, place.row.part_rows(*shape), strict=True):
            expected = torch.arange(top, top + rows)
            assert torch.equal(converted[f"{module}.weight"], place.row.swap(expected)), module
            top += rows
            seen.add(f"{module}.weight")
        assert top == start[name] + shape[0]
    linears = {k for k in converted if k.endswith(".weight") and "attn.norm" not in k}
    assert seen == linears


def test_names_are_found_with_dots_and_underscores_in_both_namings() -> None:
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1, joint_attention_dim=8,
        pooled_projection_dim=8, in_channels=4, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            for spelling in (name, name.replace(".", "_")):
                place = FLUX_KEYS.find(spelling)
                assert place is not None
                assert place.part is not None
                assert place.modules[place.part] == name
                assert FLUX_KEYS.find(place.original.replace(".", "_")) is not None
    for wrong in ("double_blocks.x.img_attn.qkv", "transformer_blocks.0.attn.norm_q", "single_blocks.0", ""):
        assert FLUX_KEYS.find(wrong) is None


def test_a_model_given_as_a_lora_is_told_for_what_it_is(tmp_path: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in make_flux().state_dict().items()}, tmp_path / "m.safetensors"
    )
    with pytest.raises(UserError, match=r"holds a model or something else, no LoRA \(.*\); give a LoRA's file"):
        load_lora(tmp_path / "m.safetensors", FLUX_TARGETS)
