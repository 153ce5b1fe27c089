"""LyCORIS's and others' adapters as they were trained: weight decomposition of each kind, and kinds on joined layers.

The expected weights are the trainers' formulas, written out in float64 from LyCORIS's ``modules/{locon,loha,lokr}.py``
(``forward``, ``apply_weight_decompose``), OneTrainer's ``DoRAModule`` and ComfyUI's ``weight_decompose``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from networks.files.adapters import load_adapter
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.conftest import make_flux
from tests.tiny import bfl_state_dict

LAYER = "transformer_blocks.0.attn.to_k"
STEM = "lycoris_transformer_blocks_0_attn_to_k"
JOINED = "lora_unet_double_blocks_0_img_attn_qkv"
ALPHA = 3.0
KINDS = ["lora", "lokr", "loha"]


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
    (module,) = load_adapter(write(tmp_path / "a.safetensors", STEM, tensors), FLUX_TARGETS).weights.values()
    close(module.apply(base(), 1.0), base().double() + torch.kron(w1.double(), w2.double()))


@pytest.mark.parametrize(
    "config", [LoHaConfig(r=4, alpha=9), LoKrConfig(r=2, alpha=9, alpha_pattern={"to_q": 5})], ids=str
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


def test_a_lokr_of_pefts_without_low_rank_is_refused(tmp_path: Path) -> None:
    config = LoKrConfig(r=64, alpha=9, target_modules=["to_q"])
    get_peft_model(make_flux(), config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"is a LoKr without low rank, .*; merge it with peft"):
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
@pytest.mark.parametrize("kind", KINDS)
def test_a_decomposed_weight_is_read_as_it_was_trained(kind: str, axis: int, tmp_path: Path) -> None:
    tensors, expected = decomposed(kind, axis)
    file = load_adapter(write(tmp_path / "a.safetensors", STEM, tensors), FLUX_TARGETS)
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
        file = load_adapter(write(tmp_path / "a.safetensors", STEM, tensors, metadata), FLUX_TARGETS)
        assert file.notes == ()
        close(file.weights[LAYER].apply(base(), 1.0), expected)
    (note,) = load_adapter(write(tmp_path / "b.safetensors", STEM, tensors), FLUX_TARGETS).notes
    assert "1 dora_scale are taken for row norms of W + BA" in note


def network(kind: str) -> AdapterNetwork:
    """Return a network of the one layer."""
    only = [f"include_patterns={LAYER}"]
    config = NetworkConfig(network_type=kind, network_dim=4, network_alpha=ALPHA, network_args=only)
    return inject_adapter(make_flux(), parse_network_args(config, FLUX_TARGETS), FLUX_TARGETS, seed=0)


def test_training_goes_on_from_a_lycoris_dora_where_it_stopped(tmp_path: Path) -> None:
    tensors, expected = decomposed("lora", axis=1)
    path = write(tmp_path / "a.safetensors", STEM, tensors)
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
        network(kind).load_file(write(tmp_path / "a.safetensors", STEM, tensors))


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


@pytest.mark.parametrize("kind", [*KINDS, "dora"])
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
        (STEM, {"dora_scale": torch.ones(32)}, r"dora_scale \(32,\) is not one norm a row or column of 32x32"),
        (STEM, {"dora_scale": torch.ones(1, 1)}, "is not one norm a row"),
        (STEM, {"lora_up.weight": torch.ones(32, 3)}, r"up \(32, 3\) .*are no LoRA of a linear layer"),
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
    rotated = write(tmp_path / "oft.safetensors", STEM, {"oft_blocks": torch.zeros(4, 8, 8), "alpha": torch.ones(())})
    with pytest.raises(UserError, match="oft.safetensors: is an OFT, which is not read"):
        load_adapter(rotated, FLUX_TARGETS)
    pair = {"lora_A.weight": torch.ones(4, 32), "lora_B.weight": torch.ones(32, 4)}
    write(tmp_path / "adapter_model.safetensors", f"base_model.model.{LAYER}", pair)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4, "use_dora": true}')
    with pytest.raises(UserError, match="use_dora is set, but the file has no magnitudes"):
        load_adapter(tmp_path, FLUX_TARGETS)
