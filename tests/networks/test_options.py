"""network_args: what is accepted, and the message of everything that is not."""

from __future__ import annotations

import pytest

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from networks.options import NetworkOptions, parse_network_args


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
    assert options.blocks == {
        "train_double_block_indices": (range(4), range(8, 9)),
        "train_single_block_indices": None,
    }
    assert options.include_patterns == (r".*attn\.to_[qk]",)
    assert options.exclude_patterns == (r".*\.0\..*", ".*=.*")


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("'.*a'", (".*a",)),
        ("r'.*a'", (".*a",)),
        ("[a-z_]+.*", ("[a-z_]+.*",)),
        ("['a', 'b']", ("a", "b")),
    ],
)
def test_patterns_may_be_bare_quoted_or_a_list(text: str, patterns: tuple[str, ...]) -> None:
    assert parse(f"include_patterns={text}").include_patterns == patterns


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("img_atn_dim=4", "unknown key 'img_atn_dim'; did you mean 'img_attn_dim'?"),
        ("zzz=4", "unknown key 'zzz'; known keys: decompose_both, exclude_patterns, factor, img_attn_dim"),
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
