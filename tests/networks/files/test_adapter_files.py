"""Files of other kinds, LyCORIS's and others' too: merging into every layout at any strength, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.run_schema import KINDS_OF_LAYOUT
from library.config.schema import NetworkConfig
from library.errors import UserError
from networks.files.adapters import load_adapter, load_lora
from networks.files.layouts import LAYOUTS, layout_of, split_key
from networks.files.readers import check_save_format
from networks.files.weights import KINDS as WEIGHTS
from networks.merging.merge import LoraSource, merge_loras
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.conftest import comfy_weight, filled, make_flux, run_flux
from tests.targets import FLUX_TARGETS
from tests.tiny import bfl_state_dict

KINDS = ["dora", "lokr", "loha"]
STEM = "lycoris_transformer_blocks_0_attn_to_k"


def trained(kind: str) -> tuple[torch.nn.Module, AdapterNetwork]:
    """Return a model with a network of ``kind`` that has been given values."""
    model = make_flux()
    return model, filled(model, network_type=kind, network_dim=6)


def save(network: AdapterNetwork, path: Path, save_format: str = "comfy") -> Path:
    network.save(path, save_format, "fp32", {})
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_merged_into_bfls_layout_is_the_running_model(kind: str, tmp_path: Path) -> None:
    model, network = trained(kind)
    path = save(network, tmp_path / "a.safetensors")
    base = {f"model.diffusion_model.{k}": v for k, v in bfl_state_dict(make_flux().state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    merge_loras(tmp_path / "base.safetensors", [LoraSource(path, 1.0)], tmp_path / "m.safetensors", FLUX_TARGETS)
    merged = load_file(tmp_path / "m.safetensors")
    expected = make_flux()
    for name, layer in network.modules.items():
        identity = torch.eye(layer.in_features)
        with torch.no_grad():  # W'^T, read off the layer by what it makes of unit vectors
            expected.get_submodule(name).weight.copy_((layer(identity) - layer.bias).t())
    torch.testing.assert_close(run_flux(expected), run_flux(model), rtol=1e-3, atol=1e-4)
    wanted = bfl_state_dict(expected.state_dict())
    for key, tensor in wanted.items():
        # fp32: a weight as a sum of products against the formula of the file
        torch.testing.assert_close(merged[f"model.diffusion_model.{key}"], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strength_is_a_share_of_the_change(kind: str, tmp_path: Path) -> None:
    path = save(trained(kind)[1], tmp_path / "a.safetensors")
    stem = {k.partition(".")[2]: t for k, t in load_file(path).items() if k.startswith(STEM)}
    make_flux().save_pretrained(tmp_path / "base")
    merge_loras(tmp_path / "base", [LoraSource(path, 0.3)], tmp_path / "merged", FLUX_TARGETS)
    name = "transformer_blocks.0.attn.to_k.weight"
    before = load_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors")[name].double()
    after = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")[name].double()
    expected = before + 0.3 * (comfy_weight(before, stem) - before)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)  # fp32


def test_lengths_of_columns_are_divided_as_everywhere(tmp_path: Path) -> None:
    weight = make_flux().transformer_blocks[0].attn.to_k.weight.detach().double()
    rng = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 32, generator=rng), torch.randn(32, 2, generator=rng)
    lengths = torch.rand(1, 32, generator=rng) + 0.5
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": lengths, "alpha": torch.tensor(1.0)}
    save_file({f"{STEM}.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "dora.safetensors")
    changed = weight + 0.5 * (up @ down).double()
    expected = changed * (lengths.double() / changed.norm(dim=0, keepdim=True))
    (module,) = load_adapter(tmp_path / "dora.safetensors", FLUX_TARGETS).weights.values()
    torch.testing.assert_close(module.apply(weight.float(), 1.0).double(), expected, rtol=1e-5, atol=1e-6)


LOKR = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 8), "alpha": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{STEM}.{k}": t for k, t in LOKR.items() if k != "lokr_w2"}, "has lokr_w1, which is no complete LoKr"),
        ({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_t2": torch.ones(1)}).items()}, f"encoders: {STEM}.lokr_t2;"),
        ({f"lora_unet_double_blocks_0_img_attn_qkv.{k}": t for k, t in LOKR.items()}, "32 output rows, 96 expected"),
        ({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_w1": torch.full((4, 4), torch.nan)}).items()}, "NaN or infinity"),
        ({f"{STEM}.lora_down.weight": torch.ones(2, 32)}, "has no up-projection; the file is incomplete"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as caught:
        load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS)
    assert message in str(caught.value)


def test_a_file_for_another_model_is_refused_by_shape(tmp_path: Path) -> None:
    save_file({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_w2": torch.ones(4, 8)}).items()}, tmp_path / "a.safetensors")
    make_flux().save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match="to_k is for 16x32, the base has 32x32; it was trained on another model"):
        merge_loras(tmp_path / "base", [LoraSource(tmp_path / "a.safetensors", 1.0)], tmp_path / "m", FLUX_TARGETS)


def test_a_plain_lora_is_no_other_kind_and_the_reverse(mixed_lora, tmp_path: Path) -> None:
    _, lora = mixed_lora()
    lora.save(tmp_path / "lora.safetensors", "kohya", "fp32", {})
    file = load_adapter(tmp_path / "lora.safetensors", FLUX_TARGETS)
    assert file.weights.keys() == lora.modules.keys()
    assert file.layout == "kohya"
    path = save(trained("loha")[1], tmp_path / "loha.safetensors")
    with pytest.raises(UserError, match=r"is a LoHa \(.*hada_w1_a\), no LoRA; merge it into a model with merge_lora"):
        load_lora(path, FLUX_TARGETS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network_dim": 4}, "network_dim as in the file"),
        ({"network_type": "lokr"}, "is a LoHa, here it is a LoKr, and 39 other layers likewise; set network_type"),
        ({"network_args": ["train_single_block_indices=0"]}, "not trained here: single_transformer_blocks.1"),
    ],
)
def test_going_on_from_another_network_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save(trained("loha")[1], tmp_path / "loha.safetensors")
    settings = {"network_type": "loha", "network_dim": 6, "network_alpha": 3.0} | changes
    options = parse_network_args(NetworkConfig(**settings), FLUX_TARGETS)
    network = inject_adapter(make_flux(), options, FLUX_TARGETS, seed=0)
    with pytest.raises(UserError, match=message):
        network.load_file(path)


@pytest.mark.parametrize("save_format", ["diffusers", "comfy"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_dora_in_16_bits_changes_what_was_trained(save_format: str, precision: str, tmp_path: Path) -> None:
    model, network = trained("dora")
    with torch.no_grad():
        for layer in network.modules.values():
            layer.lora_B.weight.mul_(0.05)  # a change of about 1 % of the weight, as after a usual run
            layer.magnitude.copy_(layer.row_norms() * 1.005)
    network.save(tmp_path / "dora.safetensors", save_format, precision, {})
    read = load_adapter(tmp_path / "dora.safetensors", FLUX_TARGETS).weights
    model.double()
    for name, layer in network.modules.items():
        base = layer.weight.double()
        with torch.no_grad():
            expected = (layer(torch.eye(layer.in_features).double()) - layer.bias).t() - base
        change = read[name].apply(base.float(), 1.0).double() - base
        assert float((change - expected).norm() / expected.norm()) < 2.0**-7


@pytest.mark.parametrize("kind", ["lokr", "loha"])
@pytest.mark.parametrize("save_format", ["comfy", "kohya"])
def test_going_on_with_another_alpha_keeps_the_update_and_the_configs_alpha(
    kind: str, save_format: str, tmp_path: Path
) -> None:
    model, network = trained(kind)
    path = save(network, tmp_path / "a.safetensors", save_format)
    options = parse_network_args(NetworkConfig(network_type=kind, network_dim=6, network_alpha=1.0), FLUX_TARGETS)
    other = make_flux()
    fresh = inject_adapter(other, options, FLUX_TARGETS, seed=0)
    assert fresh.load_file(path).endswith("of them rescaled to this run's alpha / rank")
    assert {layer.alpha for layer in fresh.modules.values()} == {1.0}
    torch.testing.assert_close(run_flux(other), run_flux(model), rtol=1e-5, atol=1e-6)


def test_only_layouts_that_can_be_asked_for_are_offered() -> None:
    with pytest.raises(UserError, match="set save_format = diffusers or comfy$"):
        check_save_format("dora", "kohya", [], FLUX_TARGETS)


def test_every_tensor_is_read_by_the_name_it_is_written_with() -> None:
    written_as = [(kind, layout_of(kind, name)) for name, kinds in KINDS_OF_LAYOUT.items() for kind in kinds]
    assert {id(layout) for _, layout in written_as} == {id(layout) for layout in LAYOUTS.values()}
    for kind, layout in written_as:
        for name in set[str]().union(*WEIGHTS[kind].complete):
            if (written := layout.names.get(name, name)) is not None:
                assert split_key(f"blocks.0.to_q.{written}") == ("blocks.0.to_q", name)


LAYER = "transformer_blocks.0.attn.to_k"
FOREIGN_STEM = "lycoris_transformer_blocks_0_attn_to_k"
JOINED = "lora_unet_double_blocks_0_img_attn_qkv"
ALPHA = 3.0
FOREIGN_KINDS = ["lora", "lokr", "loha"]


def adapter(kind: str, out: int, columns: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Return a file's tensors behind a module's stem, and the update alpha / rank * ... in float64."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=rng)

    if kind == "lora":
        t = {"lora_down.weight": draw(4, columns), "lora_up.weight": draw(out, 4)}
        product = t["lora_up.weight"].double() @ t["lora_down.weight"].double()
    elif kind == "lokr":  # w1 has no multiple of three rows, so that no joined layer's parts are whole rows of it
        t = {"lokr_w1": draw(4, 4), "lokr_w2_a": draw(out // 4, 4), "lokr_w2_b": draw(4, columns // 4)}
        product = torch.kron(t["lokr_w1"].double(), t["lokr_w2_a"].double() @ t["lokr_w2_b"].double())
    else:
        t = {f"hada_w{i}_{side}": draw(*((out, 4) if side == "a" else (4, columns))) for i in (1, 2) for side in "ab"}
        d = {name: tensor.double() for name, tensor in t.items()}
        product = (d["hada_w1_a"] @ d["hada_w1_b"]) * (d["hada_w2_a"] @ d["hada_w2_b"])
    return t | {"alpha": torch.tensor(ALPHA)}, ALPHA / 4 * product


def base(name: str = LAYER) -> Tensor:
    return make_flux().get_submodule(name).weight.detach()


def write(path: Path, stem: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file({f"{stem}.{name}": tensor for name, tensor in tensors.items()}, path, metadata)
    return path


def test_ai_toolkits_lokr_of_full_rank_has_an_alpha_that_means_nothing(tmp_path: Path) -> None:
    w1, w2 = torch.randn(4, 4), torch.randn(8, 8)
    alpha = torch.tensor(9999999999).half()  # its lokr_full_rank, saved in fp16: infinity
    tensors = {"lokr_w1": w1, "lokr_w2": w2, "alpha": alpha}
    (module,) = load_adapter(write(tmp_path / "a.safetensors", FOREIGN_STEM, tensors), FLUX_TARGETS).weights.values()
    close(module.apply(base(), 1.0), base().double() + torch.kron(w1.double(), w2.double()))


@pytest.mark.parametrize(
    "config",
    [
        LoHaConfig(r=4, alpha=9),
        LoKrConfig(r=2, alpha=9, alpha_pattern={"to_q": 5}),
        LoKrConfig(r=64, alpha=9, rank_pattern={"to_q": 80}),  # whole factors, scaled all the same
        LoKrConfig(r=2, alpha=9, decompose_both=True, decompose_factor=4),
    ],
    ids=str,
)
def test_a_folder_of_pefts_has_the_alpha_of_its_config(config: LoHaConfig | LoKrConfig, tmp_path: Path) -> None:
    config.target_modules, config.init_weights = {"to_q", "to_k"}, False
    model = get_peft_model(make_flux(), config)
    model.save_pretrained(tmp_path)
    read = load_adapter(tmp_path, FLUX_TARGETS).weights
    layers = {n.removeprefix("base_model.model."): m for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    assert read.keys() == layers.keys()
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.detach()
        close(read[name].apply(weight, 1.0), weight.double() + layer.get_delta_weight("default").detach().double())


def test_a_lokr_of_pefts_without_low_rank_is_refused_where_no_rank_is_stated(tmp_path: Path) -> None:
    get_peft_model(make_flux(), LoKrConfig(r=64, alpha=9, target_modules=["to_q"])).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"alpha": 9, "rank_pattern": {"to_k": 3}}')
    with pytest.raises(UserError, match=r"to_q: no r of it in PEFT's config; merge it with peft"):
        load_adapter(tmp_path, FLUX_TARGETS)


def decomposed(kind: str, axis: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors with a ``dora_scale`` of rows (axis 1 is summed) or columns (axis 0), and m V / |V|."""
    weight = base().double()
    tensors, update = adapter(kind, *weight.shape)
    changed = weight + update
    scale = (weight.norm(dim=axis, keepdim=True) * (1 + 0.2 * torch.rand(weight.shape[0]).view(-1, 1)[:1])).float()
    expected = changed * scale.double() / changed.norm(dim=axis, keepdim=True)
    return tensors | {"dora_scale": scale.contiguous()}, expected


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)  # fp32 products of 32 terms


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", FOREIGN_KINDS)
def test_a_decomposed_weight_is_read_as_it_was_trained(kind: str, axis: int, tmp_path: Path) -> None:
    tensors, expected = decomposed(kind, axis)
    file = load_adapter(write(tmp_path / "a.safetensors", FOREIGN_STEM, tensors), FLUX_TARGETS)
    close(file.weights[LAYER].apply(base(), 1.0), expected)
    close(file.weights[LAYER].apply(base(), 0.3), base().double() + 0.3 * (expected - base().double()))
    assert len(file.notes) == (axis == 1)  # columns mean the same everywhere


def test_the_header_tells_whose_rows_dora_scale_is_divided_by(tmp_path: Path) -> None:
    tensors, trained = decomposed("lora", axis=1)
    weight = base().double()
    update = ALPHA / 4 * tensors["lora_up.weight"].double() @ tensors["lora_down.weight"].double()
    in_comfyui = (weight + update) * tensors["dora_scale"].double() / weight.norm(dim=1, keepdim=True)
    of = {"tandem.dora_norm": "base"}, {"tandem.version": "1"}, {"ss_network_module": "lycoris.kohya"}, {"ot_a": ""}
    for metadata, expected in zip(of, (in_comfyui, in_comfyui, trained, trained), strict=True):
        file = load_adapter(write(tmp_path / "a.safetensors", FOREIGN_STEM, tensors, metadata), FLUX_TARGETS)
        assert file.notes == ()
        close(file.weights[LAYER].apply(base(), 1.0), expected)
    (note,) = load_adapter(write(tmp_path / "b.safetensors", FOREIGN_STEM, tensors), FLUX_TARGETS).notes
    assert "1 dora_scale are taken for row norms of W + BA" in note


def network(kind: str) -> AdapterNetwork:
    """Return a network of the one layer."""
    only = [f"include_patterns={LAYER}"]
    config = NetworkConfig(network_type=kind, network_dim=4, network_alpha=ALPHA, network_args=only)
    return inject_adapter(make_flux(), parse_network_args(config, FLUX_TARGETS), FLUX_TARGETS, seed=0)


def test_training_goes_on_from_a_lycoris_dora_where_it_stopped(tmp_path: Path) -> None:
    tensors, expected = decomposed("lora", axis=1)
    path = write(tmp_path / "a.safetensors", FOREIGN_STEM, tensors)
    live = network("dora")
    assert "note: " in live.load_file(path)
    layer = live.modules[LAYER]
    with torch.no_grad():
        close((layer(torch.eye(layer.in_features)) - layer.bias).t(), expected)


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_a_kind_that_cannot_be_trained_on_is_refused(kind: str, tmp_path: Path) -> None:
    tensors, _ = decomposed(kind, axis=1)
    with pytest.raises(
        UserError, match=r"is a Lo\w+ with dora_scale, here it is a .*; merge it into the model instead"
    ):
        network(kind).load_file(write(tmp_path / "a.safetensors", FOREIGN_STEM, tensors))


def test_a_file_of_several_kinds_is_read_layer_by_layer(tmp_path: Path) -> None:
    names = {"lora": "attn_to_q", "lokr": "attn_to_k", "loha": "attn_to_v"}
    tensors, expected = {}, {}
    for kind, name in names.items():
        own, _ = decomposed(kind, axis=1)
        own = own if kind == "lokr" else {k: t for k, t in own.items() if k != "dora_scale"}
        tensors |= {f"lycoris_transformer_blocks_0_{name}.{k}": t for k, t in own.items()}
        expected[name] = {"lokr": "lokr with dora_scale"}.get(kind, kind)
    save_file(tensors, tmp_path / "a.safetensors")
    found = load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS).weights
    assert {name.split(".", 2)[2].replace(".", "_"): w.kind for name, w in found.items()} == expected


@pytest.mark.parametrize("kind", [*FOREIGN_KINDS, "dora"])
def test_what_was_trained_on_a_joined_layer_changes_its_parts_by_their_rows(kind: str, tmp_path: Path) -> None:
    weight = bfl_state_dict(make_flux().state_dict())["double_blocks.0.img_attn.qkv.weight"].double()
    tensors, update = adapter(kind.replace("dora", "lora"), *weight.shape)
    expected = weight + update
    if kind == "dora":
        tensors["dora_scale"] = torch.rand(len(weight), 1) + 0.5
        expected = expected * tensors["dora_scale"].double() / expected.norm(dim=1, keepdim=True)
    found = load_adapter(write(tmp_path / "a.safetensors", JOINED, tensors), FLUX_TARGETS).weights
    assert sorted(found) == [f"transformer_blocks.0.attn.to_{part}" for part in "kqv"]
    parts = [
        found[f"transformer_blocks.0.attn.to_{p}"].apply(base(LAYER.replace("to_k", f"to_{p}")), 1.0) for p in "qkv"
    ]
    close(torch.cat(parts), expected)


@pytest.mark.parametrize(
    ("stem", "changes", "message"),
    [
        (FOREIGN_STEM, {"dora_scale": torch.ones(32)}, r"dora_scale \(32,\) is not one norm a row or column of 32x32"),
        (FOREIGN_STEM, {"dora_scale": torch.ones(1, 1)}, "is not one norm a row"),
        (FOREIGN_STEM, {"lora_up.weight": torch.ones(32, 3)}, r"up \(32, 3\) .*are no LoRA of a linear layer"),
        (
            JOINED,
            {"dora_scale": torch.ones(1, 32), "lora_up.weight": torch.ones(96, 4)},
            "norms are those of all columns",
        ),
    ],
)
def test_norms_that_fit_no_layer_are_refused(
    stem: str, changes: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    tensors = adapter("lora", 32, 32)[0] | changes
    with pytest.raises(UserError, match=message):
        load_adapter(write(tmp_path / "a.safetensors", stem, tensors), FLUX_TARGETS)


def test_ai_toolkits_magnitude_is_pefts(tmp_path: Path) -> None:
    tensors, expected = decomposed("lora", axis=1)
    down = tensors["lora_down.weight"] * (ALPHA / 4)  # ai-toolkit saves no alpha
    peft = {"lora_A.weight": down, "lora_B.weight": tensors["lora_up.weight"]}
    path = write(
        tmp_path / "a.safetensors", f"transformer.{LAYER}", {**peft, "magnitude": tensors["dora_scale"].flatten()}
    )
    close(load_adapter(path, FLUX_TARGETS).weights[LAYER].apply(base(), 1.0), expected)


def test_a_file_that_lacks_a_part_or_is_of_another_kind_says_so(tmp_path: Path) -> None:
    rotated = write(
        tmp_path / "oft.safetensors", FOREIGN_STEM, {"oft_blocks": torch.zeros(4, 8, 8), "alpha": torch.ones(())}
    )
    with pytest.raises(UserError, match="oft.safetensors: is an OFT, which is not read"):
        load_adapter(rotated, FLUX_TARGETS)
    pair = {"lora_A.weight": torch.ones(4, 32), "lora_B.weight": torch.ones(32, 4)}
    write(tmp_path / "adapter_model.safetensors", f"base_model.model.{LAYER}", pair)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4, "use_dora": true}')
    with pytest.raises(UserError, match="use_dora is set, but the file has no magnitudes"):
        load_adapter(tmp_path, FLUX_TARGETS)
