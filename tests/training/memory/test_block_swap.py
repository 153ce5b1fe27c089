"""Swapped blocks against the same model whole on its device; on a CPU the ring's copies are made at once."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.config.model_types import MODEL_TYPES
from library.config.run_schema import AccelerateConfig
from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.family_by_name import family_class
from library.models.flux.model import optimise_forward
from library.models.vae import image_positions, pack_latents
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe, quantize_model
from library.training.compiling import compile_blocks
from library.training.memory.block_swap import RING, Ring, kind_sizes, most_swapped, swap_blocks, swapped_per_kind
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.runs import lora, run, same, write_dataset
from tests.targets import FLUX_TARGETS
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline, tiny_flux_transformer

CPU = torch.device("cpu")
SWAPPED = 3  # of 4 double and 8 single blocks: 1 double and 4 single off the device


FEW = ("train_double_block_indices=none", "train_single_block_indices=0,7")


@pytest.fixture(autouse=True)
def _every_weight_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's weights are all below the size from which moving pays."""
    monkeypatch.setattr("library.training.memory.block_swap._SMALLEST", 1)


@functools.cache
def _transformer(fp8: bool, double: int, single: int) -> nn.Module:
    whole = tiny_flux_transformer(double_blocks=double, single_blocks=single).requires_grad_(False)
    transformer = optimise_forward(whole)
    if fp8:
        quantize_model(transformer, Recipe(Fp8Scheme("row")))
    return transformer


def _with_lora(fp8: bool = False, *network_args: str, double: int = 4, single: int = 8) -> tuple[Any, AdapterNetwork]:
    transformer = copy.deepcopy(_transformer(fp8, double, single))
    config = NetworkConfig(network_dim=4, network_alpha=4, network_args=list(network_args))
    network = inject_adapter(transformer, parse_network_args(config, FLUX_TARGETS), FLUX_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.05, generator=random)
    return transformer, network


def _swap(transformer: Any, swapped: int = SWAPPED) -> list[Ring]:
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    return swap_blocks(transformer, blocks, swapped, CPU)


def _forward(transformer: nn.Module) -> Tensor:
    inputs = tiny_flux_inputs()
    return transformer(
        hidden_states=pack_latents(inputs["latents"]),
        timestep=inputs["sigmas"],
        guidance=torch.full((2,), 4.0),
        pooled_projections=inputs["pooled_prompt_embeds"],
        encoder_hidden_states=inputs["prompt_embeds"],
        txt_ids=torch.zeros(12, 3),
        img_ids=image_positions(4, 4),
        return_dict=False,
    )[0]


def _step(transformer: nn.Module, network: AdapterNetwork) -> list[Tensor]:
    """Return the output and every LoRA gradient."""
    for parameter in network.parameters():
        parameter.grad = None
    output = _forward(transformer)
    output.square().mean().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [output.detach(), *gradients]  # type: ignore[list-item]


def _poison(ring: Ring) -> None:
    """Fill with NaN what a block would read if its weights were not in the ring when it runs."""
    ring._at_home = [[torch.full(view.shape, float("nan")).to(view.dtype) for view in views] for views in ring._at_home]
    for block in range(len(ring.homes)):
        ring._point(block, ring._at_home[block])


@pytest.mark.parametrize(
    ("checkpointing", "fp8", "network_args"),
    [(False, False, ()), (True, True, ()), (False, True, FEW), (True, False, FEW)],
    ids=["all", "all, recomputed, fp8", "few, fp8", "few, recomputed"],
)
def test_output_and_gradients_equal_those_of_the_whole_model_bit_for_bit(
    checkpointing: bool, fp8: bool, network_args: tuple[str, ...]
) -> None:
    whole, swapped = _with_lora(fp8, *network_args), _with_lora(fp8, *network_args)
    swap = _swap(swapped[0])
    for ring in swap:
        _poison(ring)
    if checkpointing:
        whole[0].enable_gradient_checkpointing()
        swapped[0].enable_gradient_checkpointing()
    expected = _step(*whole)
    for _ in range(2):  # the second step finds the ring as the first left it
        assert all(torch.equal(a, b) for a, b in zip(_step(*swapped), expected, strict=True))
    with torch.no_grad():
        evaluated = [_forward(swapped[0].eval()) for _ in range(2)]  # forward only, twice: from the last to the first
    assert all(torch.equal(output, expected[0]) for output in evaluated)
    assert all(torch.equal(a, b) for a, b in zip(_step(swapped[0].train(), swapped[1]), expected, strict=True))


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_blocks_compute_with_what_the_ring_brought(fp8: bool) -> None:
    """As blocks that are not compiled and whose weights stay, but for rounding: a compiler may sum in another order."""
    whole, swapped = (_with_lora(fp8, double=3, single=4) for _ in range(2))  # each block is compiled
    rings = _swap(swapped[0], 2)
    assert len(rings) == 2
    for ring in rings:
        _poison(ring)
    blocks = [*swapped[0].transformer_blocks, *swapped[0].single_transformer_blocks]
    compile_blocks(blocks, AccelerateConfig(torch_compile=True, dynamo_backend="aot_eager"))
    swapped[0].enable_gradient_checkpointing()
    expected = _step(*whole)
    for _ in range(2):
        for found, wanted in zip(_step(*swapped), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_dropout_which_takes_another_way_through_the_layers_is_the_same_too() -> None:
    whole, swapped = (_with_lora(False, "rank_dropout=0.3") for _ in range(2))
    for ring in _swap(swapped[0]):
        _poison(ring)
    torch.manual_seed(0)
    expected = _step(whole[0].train(), whole[1])
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(_step(swapped[0].train(), swapped[1]), expected, strict=True))


def test_every_weight_is_read_from_the_ring_or_from_where_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, network = _with_lora()
    swap = _swap(transformer)
    homes = {home.untyped_storage().data_ptr() for ring in swap for home in ring.homes}
    slots = {slot.untyped_storage().data_ptr() for ring in swap for slot in ring.slots}
    read: list[int] = []
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        read.append(weight.untyped_storage().data_ptr())
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    _step(transformer, network)
    assert not homes & set(read)
    assert slots <= set(read)


def test_a_step_copies_each_swapped_block_once_up_and_once_down_but_for_the_turns() -> None:
    transformer, network = _with_lora()
    rings = _swap(transformer)
    assert [len(ring.homes) for ring in rings] == [1 + RING, 4 + RING]
    assert [ring.copies for ring in rings] == [RING, RING]
    for step in (1, 2):
        _step(transformer, network)
        # up: all but the two that lie in the ring; down: all but the two that lie there at the turn
        assert [ring.copies for ring in rings] == [RING + step * 2 * (len(r.homes) - RING) for r in rings]


def test_nothing_is_ever_copied_back_and_the_device_holds_what_was_planned() -> None:
    transformer, network = _with_lora()
    bytes_whole = sum(p.nbytes for p in transformer.transformer_blocks[0].parameters() if not p.requires_grad)
    rings = _swap(transformer)
    versions = [[home._version for home in ring.homes] for ring in rings]
    for _ in range(2):
        _step(transformer, network)
        with torch.no_grad():
            _forward(transformer)
    assert [[home._version for home in ring.homes] for ring in rings] == versions  # counts every write in place
    for ring in rings:
        assert len(ring.slots) == RING
        assert all(slot.nbytes == ring.homes[0].nbytes for slot in ring.slots)
    resident = sum(
        tensor.nbytes
        for block in transformer.transformer_blocks
        for tensor in block.parameters()
        if not tensor.requires_grad and tensor.untyped_storage().data_ptr() not in _storages(rings[0])
    )
    # 4 double blocks less the one that left: the ring's two, the one that stays, and small tensors of all
    assert resident + sum(slot.nbytes for slot in rings[0].slots) < 3.2 * bytes_whole


def _storages(ring: Ring) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in (*ring.homes, *ring.slots)}


def test_names_and_values_of_the_state_dict_stay_at_any_time() -> None:
    transformer, network = _with_lora()
    before = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    _swap(transformer)
    for _ in range(2):
        after = transformer.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        _step(transformer, network)


def test_counting_is_that_of_kohya() -> None:
    # sd-scripts, FluxParams of 19 and 38 blocks: "maximum value is 35 for FLUX.1"
    flux = [(19, 340), (38, 142)]  # millions of weights
    assert swapped_per_kind(flux, 35) == [17, 36]
    assert swapped_per_kind(flux, 16) == [8, 16]
    assert swapped_per_kind([(60, 340)], 45) == [45]
    with pytest.raises(UserError, match="blocks_to_swap: 36 is more than this model allows; set at most 35"):
        swapped_per_kind(flux, 36)
    with pytest.raises(UserError, match="blocks_to_swap: 3 is more than this model allows; set at most 0"):
        swapped_per_kind([(2, 340), (2, 142)], 3)


def test_a_run_with_swapped_blocks_gives_the_same_lora_and_samples(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base", double_blocks=4, single_blocks=8)
    dataset = write_dataset(tmp_path / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --w 64 --h 64 --s 2\n")
    settings: dict[str, object] = {"sample_prompts": prompts, "sample_every_n_steps": 2, "max_train_steps": 3}
    settings |= {"preserve": "prior", "preserve_prompts": prompts, "general_prompts": "none"}  # the LoRA is off between
    whole = run(base, dataset, tmp_path / "whole", cache_directory=tmp_path / "one", **settings)
    swapped = run(
        base, dataset, tmp_path / "swapped", blocks_to_swap=SWAPPED, cache_directory=tmp_path / "other", **settings
    )
    painted = [next((tmp_path / cache).glob("painted/*/*.png")).read_bytes() for cache in ("one", "other")]
    assert painted[0] == painted[1]
    assert same(lora(tmp_path / "swapped"), lora(tmp_path / "whole"))
    assert whole.val_loss == swapped.val_loss
    for picture in (tmp_path / "whole" / "samples").glob("step*.png"):
        assert picture.read_bytes() == (tmp_path / "swapped" / "samples" / picture.name).read_bytes()


def test_any_number_of_kinds_shares_the_swapped_blocks_by_their_weights() -> None:
    sizes = [(4, 100), (10, 50), (20, 24)]
    assert swapped_per_kind(sizes, 3) == [1, 2, 4]
    assert swapped_per_kind(sizes, 4) == [1, 2, 8]  # what does not divide goes to the last kinds
    assert swapped_per_kind(sizes, 10) == [2, 8, 16]  # the first has no more to give
    with pytest.raises(UserError, match="set at most 10"):
        swapped_per_kind(sizes, 11)


@pytest.mark.parametrize(
    "name",
    [
        *("flux", "qwen_image", "qwen_image_21", "z_image", "flux2_klein", "flux3_klein", "flux3_klein_edit", "krea2"),
        "ernie_image",
    ],
)
def test_a_published_models_largest_number_is_the_one_in_the_configurations_table(name: str) -> None:
    family = family_class(name)
    with torch.device("meta"):
        transformer = family.transformer_class(**family.published).requires_grad_(False)
    assert most_swapped(kind_sizes(family.blocks(transformer))) == MODEL_TYPES[name].swappable_blocks
