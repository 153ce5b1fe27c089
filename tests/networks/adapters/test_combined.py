"""Adapters of every kind beside a layer, at any strength and several at once: held to full weights in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from networks.adapters.combined import CombinedLinear
from networks.files.adapters import load_trainable
from networks.files.weights import (
    AdapterWeights,
    CombinedWeights,
    DoraLohaWeights,
    DoraLokrWeights,
    DoraWeights,
    LohaWeights,
    LokrWeights,
    LoraWeights,
)
from networks.merging.low_rank import combine_loras
from networks.network import attach_lora
from tests.networks.conftest import make_flux, run_flux
from tests.targets import FLUX_TARGETS

Sizes = tuple[int, int, int, int]  # rows of w1 and w2, columns of w1 and w2


def drawn(random: torch.Generator, *shape: int) -> Tensor:
    return 0.4 * torch.randn(*shape, generator=random)


def factor(random: torch.Generator, name: str, rows: int, columns: int, rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return a factor of a LoKr, of low rank if ``rank`` is not 0, and the same multiplied out in float64."""
    if not rank:
        whole = drawn(random, rows, columns)
        return {name: whole}, whole.double()
    a, b = drawn(random, rows, rank), drawn(random, rank, columns)
    return {f"{name}_a": a, f"{name}_b": b}, a.double() @ b.double()


def lokr(random: torch.Generator, sizes: Sizes, ranks: tuple[int, int], alpha: float) -> tuple[LokrWeights, Tensor]:
    """Return a LoKr and its update: alpha counts as soon as a factor is a product, w2's rank before w1's."""
    w1, one = factor(random, "lokr_w1", sizes[0], sizes[2], ranks[0])
    w2, two = factor(random, "lokr_w2", sizes[1], sizes[3], ranks[1])
    rank = ranks[1] or ranks[0]
    return LokrWeights(w1 | w2, alpha), torch.kron(one, two) * (alpha / rank if rank else 1.0)


def drawn_part(kind: str, sizes: Sizes, weight: Tensor, random: torch.Generator) -> tuple[AdapterWeights, Tensor]:
    """Return an adapter and its update in float64."""
    rows, columns = weight.shape
    ranks = {"full": (0, 0), "low": (0, 2), "both": (3, 2), "w1 alone": (1, 0)}
    made: AdapterWeights
    if kind in ranks:
        made, update = lokr(random, sizes, ranks[kind], 3.0)
    elif kind == "loha":
        tensors = {f"hada_w{i}_a": drawn(random, rows, 3) for i in (1, 2)}
        tensors |= {f"hada_w{i}_b": drawn(random, 3, columns) for i in (1, 2)}
        d = {name: tensor.double() for name, tensor in tensors.items()}
        made = LohaWeights(tensors, 2.0)
        update = (d["hada_w1_a"] @ d["hada_w1_b"]) * (d["hada_w2_a"] @ d["hada_w2_b"]) * 2 / 3
    else:
        down, up = drawn(random, 2, columns), drawn(random, rows, 2)
        made, update = LoraWeights(down, up, 5.0), up.double() @ down.double() * 2.5
    return made, update


ADDED = ["full", "low", "both", "w1 alone", "loha", "lora"]


@pytest.mark.parametrize("seed", range(24))
def test_several_adapters_beside_a_layer_are_their_sum(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    a, b, c, d = (int(n) for n in torch.randint(1, 7, (4,), generator=random))
    base = nn.Linear(c * d, a * b, bias=seed % 2 == 0)
    kinds = [ADDED[int(i)] for i in torch.randint(len(ADDED), (1 + seed % 3,), generator=random)]
    made = [drawn_part(kind, (a, b, c, d), base.weight, random) for kind in kinds]
    strengths = [float(s) for s in 2 * torch.randn(len(made), generator=random)]
    combined = CombinedWeights.of_parts([(w, s) for (w, _), s in zip(made, strengths, strict=True)])
    layer = CombinedLinear(base)
    assert layer.misfit(combined) is None
    layer.load_weights(combined)
    layer.multiplier = -0.7
    update = sum(s * u for (_, u), s in zip(made, strengths, strict=True))
    assert isinstance(update, Tensor)
    x = torch.randn(2, 3, c * d, generator=random)
    bias = 0 if base.bias is None else base.bias.double()
    with torch.no_grad():
        expected = x.double() @ (base.weight.double() - 0.7 * update).t() + bias
        close(layer(x), expected)
    close(combined.delta(), update)
    close(combined.scaled(0.3).delta(), 0.3 * update)
    rows = torch.randperm(a * b, generator=random)[: max(1, a * b // 2)]  # of a joined layer
    close(combined.of_rows(rows).delta(), update[rows])
    close(combined.of_rows(rows).beside(x, 2.0, lambda: base.weight), x.double() @ (2 * update[rows]).t())


@pytest.mark.parametrize("kind", ["lora", "full", "loha"])
@pytest.mark.parametrize("norm", ["magnitude", "dora_scale"])
def test_an_adapter_with_norms_has_a_strength_beside_the_layer(kind: str, norm: str) -> None:
    random = torch.Generator().manual_seed(3)
    base = nn.Linear(12, 20)
    weight = base.weight.detach().double()
    made, update = drawn_part(kind, (4, 5, 3, 4), base.weight, random)
    lengths = torch.rand(20, generator=random) + 0.5
    wanted = {"magnitude": lengths} if norm == "magnitude" else {"dora_scale": lengths[:, None]}
    of = {"lora": DoraWeights, "full": DoraLokrWeights, "loha": DoraLohaWeights}[kind]
    dora = of({**made.tensors, **wanted}, made.alpha)
    over = (weight + update if norm == "magnitude" else weight).norm(dim=1, keepdim=True)
    changed = weight + 0.6 * ((weight + update) * lengths.double()[:, None] / over - weight)
    beside, added = drawn_part("low", (4, 5, 3, 4), base.weight, random)
    layer = CombinedLinear(base)
    layer.load_weights(CombinedWeights.of_parts([(dora, 1.2), (beside, -0.5)]))
    layer.multiplier = 0.5
    x = torch.randn(7, 12, generator=random)
    with torch.no_grad():
        close(layer(x), x.double() @ (changed - 0.25 * added).t() + base.bias.double())


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)  # fp32 sums of up to 36 terms


NAME = "transformer_blocks.0.attn.to_k"
STEMS = {  # as these programs write the layer
    "LyCORIS in sd-scripts": "lora_unet_double_blocks_0_img_attn_qkv",
    "SimpleTuner": "lycoris_transformer_blocks_0_attn_to_k",
    "SimpleTuner, dotted": NAME,
    "ai-toolkit": f"transformer.{NAME}",
    "ai-toolkit, original names": "diffusion_model.double_blocks.0.img_attn.qkv",
    "OneTrainer": "lora_transformer_transformer_blocks_0_attn_to_k",
    "PEFT": f"base_model.model.{NAME}",
}


@pytest.mark.parametrize("form", ["full", "low", "both"])
@pytest.mark.parametrize("program", STEMS)
def test_a_lokr_of_any_program_beside_a_lora_is_the_merged_model(program: str, form: str, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(len(program))
    joined = "qkv" in STEMS[program]
    sizes = (4, 24, 8, 4) if joined else (4, 8, 8, 4)
    made, update = lokr(random, sizes, {"full": (0, 0), "low": (0, 2), "both": (2, 2)}[form], 3.0)
    tensors = {f"{STEMS[program]}.{name}": tensor for name, tensor in made.tensors.items()}
    tensors[f"{STEMS[program]}.alpha"] = torch.tensor(3.0)
    save_file(tensors, tmp_path / "lokr.safetensors")
    lora, more = drawn_part("lora", (4, 8, 4, 8), torch.zeros(32, 32), random)
    read = load_trainable(tmp_path / "lokr.safetensors", FLUX_TARGETS).weights
    assert len(read) == (3 if joined else 1)
    model, expected = make_flux(), make_flux()
    attach_lora(model, combine_loras([(read, 0.8), ({NAME: lora}, -0.5)]), FLUX_TARGETS, "both").set_multiplier(1.5)
    names = [NAME.replace("to_k", f"to_{part}") for part in "qkv"] if joined else [NAME]
    for name, rows in zip(names, update.split(32), strict=True):
        added = 1.5 * (0.8 * rows - (0.5 * more if name == NAME else 0))
        with torch.no_grad():
            expected.get_submodule(name).weight += added.float()
    torch.testing.assert_close(run_flux(model), run_flux(expected), rtol=1e-4, atol=1e-5)
    assert float((run_flux(model) - run_flux(make_flux())).detach().abs().max()) > 1e-3
