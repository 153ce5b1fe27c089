"""Which layers get a LoRA: kohya's defaults and options, patterns, and the message of every mistake."""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from library.config.schema import NetworkConfig
from library.errors import UserError
from networks.adapters.lora import LoRALinear
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork, attach_lora, inject_adapter
from networks.options import NetworkOptions, parse_network_args
from tests.networks.conftest import inject, make_flux, put_back, run_flux, train_a_little
from tests.targets import FLUX_TARGETS

DOUBLE = 14  # linear layers of a double block in diffusers: 8 attention, 4 MLP, 2 modulation
SINGLE = 6  # of a single block: q, k, v, proj_mlp, proj_out, modulation


def test_every_linear_of_the_blocks_is_trained_by_default_and_nothing_else() -> None:
    model = make_flux()
    blocks = ("transformer_blocks.", "single_transformer_blocks.")
    expected = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(blocks)}
    network = inject(model)
    assert set(network.modules) == expected
    assert len(expected) == 2 * DOUBLE + 2 * SINGLE
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.{part}.weight" for name in expected for part in ("lora_A", "lora_B")}


def test_every_linear_of_the_model_has_a_kind_or_is_the_final_layer() -> None:
    names = {n for n, m in make_flux().named_modules() if isinstance(m, nn.Linear)}
    assert {n for n in names if FLUX_TARGETS.group_of(n) is None} == {"proj_out", "norm_out.linear"}
    assert all(FLUX_TARGETS.keys.find(n) for n in names)


def test_fresh_lora_changes_nothing_and_a_trained_one_can_be_switched_off_and_scaled() -> None:
    model = make_flux()
    base = run_flux(model)
    network = inject(model)
    assert torch.equal(run_flux(model), base)
    train_a_little(network)
    full = run_flux(model)
    assert not torch.allclose(full, base, atol=1e-2)
    network.set_multiplier(0.0)
    assert torch.equal(run_flux(model), base)
    network.set_multiplier(1.0)
    assert torch.equal(run_flux(model), full)


def ranks(*network_args: str) -> dict[str, int]:
    return {name: layer.rank for name, layer in inject(make_flux(), *network_args).modules.items()}


@pytest.mark.parametrize(
    ("option", "count"),
    [
        ("img_attn_dim", 4),
        ("txt_attn_dim", 4),
        ("img_mlp_dim", 2),
        ("txt_mlp_dim", 2),
        ("img_mod_dim", 1),
        ("txt_mod_dim", 1),
        ("single_dim", 5),
        ("single_mod_dim", 1),
    ],
)
def test_a_kinds_dim_sets_its_rank_and_zero_leaves_it_out(option: str, count: int) -> None:
    assert sum(rank == 7 for rank in ranks(f"{option}=7").values()) == 2 * count
    assert len(ranks(f"{option}=0")) == 2 * (DOUBLE + SINGLE - count)


def test_in_dims_add_the_input_layers_in_kohyas_order() -> None:
    found = ranks("in_dims=[1,2,3,0,5]")
    extra = {name: rank for name, rank in found.items() if "blocks." not in name}
    assert extra == {
        "x_embedder": 1,
        "time_text_embed.timestep_embedder.linear_1": 2,
        "time_text_embed.timestep_embedder.linear_2": 2,
        "time_text_embed.text_embedder.linear_1": 3,
        "time_text_embed.text_embedder.linear_2": 3,
        "context_embedder": 5,
    }


@pytest.mark.parametrize(
    ("argument", "double", "single"),
    [
        ("train_double_block_indices=1", {1}, {0, 1}),
        ("train_double_block_indices=none", set(), {0, 1}),
        ("train_single_block_indices=0-1", {0, 1}, {0, 1}),
        ("train_single_block_indices=", {0, 1}, set()),
        ("train_single_block_indices=all", {0, 1}, {0, 1}),
    ],
)
def test_block_indices_choose_blocks(argument: str, double: set[int], single: set[int]) -> None:
    names = ranks(argument)
    assert {int(n.split(".")[1]) for n in names if n.startswith("transformer_")} == double
    assert {int(n.split(".")[1]) for n in names if n.startswith("single_")} == single


def test_include_keeps_only_what_matches_and_exclude_then_takes_away() -> None:
    attention = ranks(r"include_patterns=['.*\.attn\.to_[qkv]', '.*proj_out']")
    assert len(attention) == 4 * 3 + 2
    some = ranks(r"include_patterns=.*\.attn\.to_[qkv]", r"exclude_patterns=single.*")
    assert set(some) == {f"transformer_blocks.{i}.attn.to_{c}" for i in (0, 1) for c in "qkv"}


def test_description_counts_kinds_and_pattern_matches() -> None:
    network = inject(make_flux(), "single_dim=8", r"exclude_patterns=.*norm.*", alpha=2.0)
    text = network.describe()
    total = sum(p.numel() for p in network.parameters())
    assert f"LoRA on flux: {len(network.modules)} modules, {total:,} parameters, float32" in text
    assert "exclude_patterns '.*norm.*': 6 modules" in text
    single = next(line for line in text.splitlines() if "single " in line)
    assert single.split()[:7] == ["single", "10", "modules", "rank", "8", "alpha", "2"]


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    alone = inject(make_flux(), r"include_patterns=.*blocks\.1\.ff\.net\.2").modules
    among = inject(make_flux()).modules
    for name, layer in alone.items():
        assert torch.equal(layer.lora_A.weight, among[name].lora_A.weight)
    q, k = (among[f"transformer_blocks.0.attn.to_{c}"].lora_A.weight for c in "qk")
    assert not torch.equal(q, k)
    options = parse_network_args(NetworkConfig(network_dim=4), FLUX_TARGETS)
    other = inject_adapter(make_flux(), options, FLUX_TARGETS, seed=1).modules
    assert not torch.equal(other["transformer_blocks.0.attn.to_q"].lora_A.weight, q)


def test_bf16_weights_on_request() -> None:
    options = parse_network_args(NetworkConfig(), FLUX_TARGETS)
    network = inject_adapter(make_flux(), options, FLUX_TARGETS, seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert "bfloat16" in network.describe()


def test_whole_model_gives_output_and_gradients_of_peft_with_the_same_weights() -> None:
    ours, theirs = make_flux(), make_flux()
    network = inject(ours, "single_dim=8", alpha=3.0)
    train_a_little(network)
    names = sorted(network.modules)
    rank_pattern = {f"^{name}": 8 for name, layer in network.modules.items() if layer.rank == 8}
    config = LoraConfig(r=4, lora_alpha=3, target_modules=names, rank_pattern=rank_pattern)
    inject_adapter_in_model(config, theirs)
    peft_layers = {name: theirs.get_submodule(name) for name in names}
    with torch.no_grad():
        for name, layer in peft_layers.items():
            layer.lora_A["default"].weight.copy_(network.modules[name].lora_A.weight)
            layer.lora_B["default"].weight.copy_(network.modules[name].lora_B.weight)
    outputs = [run_flux(model) for model in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().mean().backward()
    for name, layer in peft_layers.items():
        for part in ("lora_A", "lora_B"):
            got = getattr(network.modules[name], part).weight.grad
            # fp32 through four blocks, products summed in another order
            torch.testing.assert_close(got, getattr(layer, part)["default"].weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("module_dropout", [0.0, 0.9])
def test_ddp_sees_a_gradient_for_every_parameter(module_dropout: float, tmp_path) -> None:
    """Without find_unused_parameters a second step fails if any parameter had no gradient in the first."""
    model = make_flux()
    network = inject(model, f"module_dropout={module_dropout}")
    model.train()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            run_flux(wrapped).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["include_patterns=attn"], "'attn' matches no trained module; patterns match whole names, write '.*attn.*'"),
        (["exclude_patterns=.*convolution.*"], "matches no trained module; a name looks like 'transformer_blocks.0"),
        (["train_double_block_indices=0-2"], "train_double_block_indices: no block 2; this model's are 0 to 1"),
        (["train_double_block_indices=none", "img_attn_dim=4"], "img_attn_dim: this model has no img_attn layers"),
        (["exclude_patterns=.*"], "nothing is left to train"),
        (["train_double_block_indices=none", "train_single_block_indices=none"], "nothing is left to train"),
    ],
)
def test_an_option_that_matches_nothing_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        inject(make_flux(), *arguments)
    assert message in str(caught.value)


def test_in_dims_for_a_layer_the_model_lacks_is_refused() -> None:
    model = make_flux()
    del model.time_text_embed.guidance_embedder  # as in schnell
    with pytest.raises(UserError, match="in_dims: this model has no guidance_in layers"):
        inject(model, "in_dims=[0,0,0,4,0]")
    inject(model, "in_dims=[4,0,0,0,0]")


def test_injecting_twice_is_a_bug() -> None:
    model = make_flux()
    inject(model)
    with pytest.raises(ValueError, match="has an adapter already"):
        inject(model)


def test_a_file_can_be_attached_with_its_own_ranks(mixed_lora, tmp_path) -> None:
    model, network = mixed_lora()
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS)
    read = load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    other = make_flux()
    attached = attach_lora(other, read.weights, FLUX_TARGETS, "a.safetensors")
    torch.testing.assert_close(run_flux(other), run_flux(model), rtol=1e-5, atol=1e-6)  # the scale is in B
    assert "in_dims" not in attached.describe()
    shallow = make_flux(blocks=1)
    with pytest.raises(UserError, match=r"a.safetensors: the model has no single_transformer_blocks\.1\.attn\.to_k"):
        attach_lora(shallow, read.weights, FLUX_TARGETS, "a.safetensors")
    assert not any(isinstance(module, LoRALinear) for module in shallow.modules())


@pytest.mark.parametrize(
    ("arguments", "dim", "said"),
    [
        ((), 161, "network_dim: a rank of 161, where no layer can have more than"),
        (("img_attn_dim=33",), 4, "network_args: img_attn_dim: a rank of 33, where no layer can have more than 32"),
        (("in_dims=[4,4,4000,4,4]",), 4, "network_args: in_dims: a rank of 4000, where no layer can have more than"),
        (("train_double_block_indices=0-999999999",), 4, "no block 999999999; this model's are 0 to 1"),
    ],
)
def test_ranks_and_blocks_beyond_the_model_are_refused_before_anything_is_made(
    arguments: tuple[str, ...], dim: int, said: str
) -> None:
    model = make_flux()
    before = len(list(model.parameters()))
    with pytest.raises(UserError, match=said):
        inject(model, *arguments, dim=dim)
    assert len(list(model.parameters())) == before


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("factor=100000", "factor=100000: no layer has more than"),
        ("single_factor=100000", "single_factor=100000: no layer has more than"),
        ("img_mod_factor=4", "img_mod_factor: no img_mod layers are trained; set img_mod_dim too"),
        ("img_mod_factor=0", "img_mod_factor=0: must be a whole number of at least 1, or -1"),
    ],
)
def test_a_factor_that_no_layer_has_is_refused(argument: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        inject(make_flux(), argument, "img_mod_dim=0", network_type="lokr")
    with pytest.raises(UserError, match=f"{argument.split('=')[0]}: has no effect on network_type lora, only on lokr"):
        inject(make_flux(), argument)


def test_full_matrices_and_factors_by_kind_are_what_is_trained_and_said() -> None:
    """SimpleTuner's lycoris_config.json: Attention 16, FeedForward 8, here half of that for a small model."""
    args = ("full_matrix=True", "factor=8", "img_mlp_factor=4", "img_mod_dim=1", "img_mod_factor=2")
    network = inject(make_flux(), *args, dim=1, network_type="lokr")
    for name, layer in network.modules.items():
        kind = FLUX_TARGETS.group_of(name)
        factor = {"img_mlp": 4, "img_mod": 2}.get(kind.name if kind else "", 8)
        trained = layer.trained()
        assert trained.keys() == {"lokr_w1", "lokr_w2"}
        sizes = torch.tensor([layer.out_features, layer.in_features])
        assert (torch.tensor(trained["lokr_w1"].shape) <= factor).all()
        product = torch.tensor(trained["lokr_w1"].shape) * torch.tensor(trained["lokr_w2"].shape)
        assert (product == sizes).all()
    said, total = network.describe(), sum(p.numel() for p in network.parameters())
    rank = float(re.findall(r"as many parameters as a LoRA of rank ([\d.]+) has", said)[0])
    lora = inject(make_flux(), "img_mod_dim=1", dim=1)
    assert total == pytest.approx(rank * sum(p.numel() for p in lora.parameters()), rel=0.05 / rank)
    assert "rank and alpha have no effect on all modules: their matrices are full" in said
    some = inject(make_flux(), "factor=4", dim=4, network_type="lokr").describe()
    assert re.search(r"w1 4x4, rank 4 +alpha 4 ", some)
    with pytest.raises(UserError, match="decompose_both=True: full_matrix=True decomposes neither"):
        inject(make_flux(), "full_matrix=True", "decompose_both=True", network_type="lokr")


ATTENTION = r"include_patterns=.*attn\.to_[qkv]"


def test_one_group_without_lora_plus_and_two_with_it() -> None:
    network = inject(make_flux(), ATTENTION)
    (group,) = network.parameter_groups(1e-4)
    assert (group["name"], group["lr"], len(group["params"])) == ("lora", 1e-4, 2 * len(network.modules))
    down, up = network.parameter_groups(1e-4, 16)
    assert (down["name"], down["lr"], up["name"], up["lr"]) == ("lora_A", 1e-4, "lora_B", 16e-4)
    layers = network.modules.values()
    assert [id(p) for p in up["params"]] == [id(layer.lora_B.weight) for layer in layers]
    assert [id(p) for p in down["params"]] == [id(layer.lora_A.weight) for layer in layers]


def test_state_goes_out_and_in_bit_for_bit() -> None:
    model, other = make_flux(), make_flux()
    network = inject(model)
    train_a_little(network)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert "transformer_blocks.0.attn.to_q.lora_A.weight" in state
    put_back(inject(other), state)
    assert torch.equal(run_flux(other), run_flux(model))


def test_loading_with_another_alpha_keeps_the_update_and_the_configs_alpha() -> None:
    trained_model, model = make_flux(), make_flux()
    trained = inject(trained_model, alpha=3.0)
    train_a_little(trained)
    network = inject(model, alpha=4.0)
    line = network.load(trained.weights(), "a.safetensors")
    assert line == "a.safetensors: 40 modules loaded, 40 of them rescaled to this run's alpha / rank"
    assert {layer.alpha for layer in network.modules.values()} == {4.0}
    # B is multiplied by 0.75 in fp32: one rounding
    torch.testing.assert_close(run_flux(model), run_flux(trained_model), rtol=1e-5, atol=1e-5)


def weights(network: AdapterNetwork) -> dict[str, LoraWeights]:
    train_a_little(network)
    return network.weights()


def test_a_file_that_matches_only_in_part_is_refused_by_name() -> None:
    few, all_layers = inject(make_flux(), ATTENTION), inject(make_flux())
    with pytest.raises(UserError) as caught:
        all_layers.load(weights(inject(make_flux(), ATTENTION)), "a.safetensors")
    assert "a.safetensors: not in the file: single_transformer_blocks.0.norm.linear" in str(caught.value)
    assert "and 23 more; choose the same layers with network_args" in str(caught.value)
    with pytest.raises(UserError, match=r"a.safetensors: not trained here: single_transformer_blocks.0.norm.linear"):
        few.load(weights(inject(make_flux())), "a.safetensors")


def test_a_module_with_a_zero_update_may_be_missing_here() -> None:
    read = inject(make_flux()).weights()  # fresh: every lora_B is zero
    assert inject(make_flux(), ATTENTION).load(read, "a.safetensors") == "a.safetensors: 12 modules loaded"


def test_a_file_of_which_nothing_matches_is_refused() -> None:
    with pytest.raises(UserError, match=r"none of its 1 modules \(blocks.0.q\) is trained here; wrong model"):
        inject(make_flux()).load({"blocks.0.q": LoraWeights(torch.ones(1, 2), torch.ones(2, 1), 1)}, "a")


def test_other_ranks_and_shapes_are_refused_by_name() -> None:
    network = inject(make_flux(), ATTENTION)
    with pytest.raises(UserError, match=r"attn.to_q has rank 8, this network 4"):
        network.load(weights(inject(make_flux(), ATTENTION, dim=8)), "a")
    read = weights(inject(make_flux(), ATTENTION))
    name = "transformer_blocks.1.attn.to_v"
    read[name] = LoraWeights(torch.ones(4, 48), torch.ones(48, 4), 4.0)
    with pytest.raises(UserError, match=rf"{name} is for a layer of 48x48, the model's has 32x32"):
        network.load(read, "a")


def parse(*network_args: str, **fields: float) -> NetworkOptions:
    return parse_network_args(NetworkConfig(network_args=list(network_args), **fields), FLUX_TARGETS)


def test_all_options_are_read() -> None:
    options = parse(
        "rank_dropout=0.1",
        "module_dropout = 0.2",
        "loraplus_lr_ratio=16",
        "img_attn_dim=8",
        "in_dims=[1, 0, 2, 0, 3]",
        "train_double_block_indices=0-3, 8",
        "train_single_block_indices=all",
        r"include_patterns=.*attn\.to_[qk]",
        r"exclude_patterns=[r'.*\.0\..*', '.*=.*']",
        network_dim=32,
        network_alpha=8,
        network_dropout=0.3,
    )
    assert (options.dim, options.alpha) == (32, 8)
    assert (options.dropout, options.rank_dropout, options.module_dropout) == (0.3, 0.1, 0.2)
    assert options.loraplus_lr_ratio == 16
    expected = {"img_attn": 8, "img_in": 1, "time_in": 0, "vector_in": 2, "guidance_in": 0, "txt_in": 3}
    assert options.dims == expected
    assert options.blocks == {"train_double_block_indices": (range(4), range(8, 9)), "train_single_block_indices": None}
    assert options.include_patterns == (r".*attn\.to_[qk]",)
    assert options.exclude_patterns == (r".*\.0\..*", ".*=.*")


@pytest.mark.parametrize(
    ("text", "patterns"),
    [("'.*a'", (".*a",)), ("r'.*a'", (".*a",)), ("[a-z_]+.*", ("[a-z_]+.*",)), ("['a', 'b']", ("a", "b"))],
)
def test_patterns_may_be_bare_quoted_or_a_list(text: str, patterns: tuple[str, ...]) -> None:
    assert parse(f"include_patterns={text}").include_patterns == patterns


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("img_atn_dim=4", "unknown key 'img_atn_dim'; did you mean 'img_attn_dim'?"),
        ("zzz=4", "unknown key 'zzz'; known keys: decompose_both, exclude_patterns, factor, full_matrix, img_attn_dim"),
        ("rank_dropout", "'rank_dropout' is not of the form key=value; write it like rank_dropout=0.1"),
        ("rank_dropout=1.0", "rank_dropout=1.0: must be a number of at least 0 and below 1"),
        ("module_dropout=-1", "module_dropout=-1: must be a number of at least 0 and below 1"),
        ("rank_dropout=nan", "rank_dropout=nan: must be a number of at least 0 and below 1"),
        ("rank_dropout=much", "rank_dropout=much: must be a number of at least 0"),
        ("loraplus_lr_ratio=0", "loraplus_lr_ratio=0: must be a number above 0; 16 is usual"),
        ("single_dim=4.5", "single_dim=4.5: must be a whole number, 0 to leave these layers out"),
        ("single_dim=-4", "single_dim=-4: must be a whole number, 0 to leave these layers out"),
        ("in_dims=[1,2]", "in_dims=[1,2]: must be 5 whole numbers (img, time, vector, guidance, txt)"),
        ("train_single_block_indices=3-1", "'3-1' is no index or range; write '0-3,8', 'all' or 'none'"),
        ("train_single_block_indices=a", "'a' is no index or range"),
        ("include_patterns=(", "include_patterns: '(' is no regular expression (missing ), unterminated"),
        ("include_patterns=['a', 3]", "must be a regular expression or a list of them"),
        ("include_patterns=[]", "must be a regular expression or a list of them"),
        ("include_patterns=", "must be a regular expression or a list of them"),
        ("include_patterns='a", "the quotes are not closed"),
        ("train_blocks=single", "train_blocks is not taken: write train_single_block_indices=none"),
        ("split_qkv=maybe", "split_qkv=maybe: must be True or False"),
    ],
)
def test_a_bad_argument_is_named_with_its_remedy(argument: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argument)
    assert str(caught.value).startswith("network_args: ")
    assert message in str(caught.value)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(UserError, match="single_dim is given twice; keep one"):
        parse("single_dim=4", "single_dim=8")


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(UserError, match=r"network_dropout=1.0: must be a number of at least 0 and below 1"):
        parse(network_dropout=1.0)
