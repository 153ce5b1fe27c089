"""From ``network_dim``, ``network_alpha`` and ``network_args`` to a checked :class:`NetworkOptions`.

``network_args`` are kohya's ``key=value`` strings:

    rank_dropout, module_dropout   probabilities below 1
    loraplus_lr_ratio              learning rate of lora_B over that of lora_A
    loraplus_unet_lr_ratio, loraplus_text_encoder_lr_ratio
                                   the same for the transformer and for text encoders alone
    train_t5xxl                    "True": T5 is trained too, at the second value of text_encoder_lr
    <kind>_dim                     rank of one kind of layers (``img_attn_dim``, ...); 0 leaves the kind out
    in_dims                        ranks of the input layers, [img,time,vector,guidance,txt]; 0 leaves one out
    train_double_block_indices, train_single_block_indices (FLUX), train_block_indices (Qwen-Image, Z-Image)
                                   "0-3,8", "all" or "none"
    include_patterns, exclude_patterns
                                   regular expression, or a Python list of them, on whole module names as
                                   diffusers has them, or, where none matches, as the original checkpoint has
                                   them. With include_patterns only what matches one of them is trained;
                                   exclude_patterns then take away

    split_qkv                      "False": one LoRA for the layers that are one in the original checkpoint (FLUX's and
                                   Z-Image's qkv, FLUX's linear1), which is sd-scripts' default; "True": each its own
    factor, full_matrix, decompose_both
                                   of network_type lokr, see ``networks.adapters.lycoris``
    <kind>_factor                  lokr's factor of one kind of layers, as ``<kind>_dim`` is their rank
    trainable_token_indices        "49152-49154,7": rows of a language model's embedding and head that are trained

alpha is the same for every rank, as in kohya's: a layer's scale is ``network_alpha / its rank``. Ranks by kind,
block choices and patterns are the transformer's; text encoders take ``network_dim`` everywhere, as in kohya's.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from library.config.markers import split_pairs
from library.config.rules import network_conflicts
from library.config.schema import NetworkConfig
from library.errors import UserError, did_you_mean, error_prefix
from library.files import read_toml
from library.models.layer_names import LoraTargets

_REPLACED = read_toml(Path(__file__).with_name("replaced_args.toml"))[0]
_INDEX = r"\d{1,9}"
_MOST = 10**9  # of a rank or factor
_TEXT_KEYS = ("train_t5xxl", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")  # of families that train text
_LANGUAGE_KEYS = ("trainable_token_indices",)
_OF_TRANSFORMER = (
    "dims",
    "dim_sources",
    "factors",
    "blocks",
    "include_patterns",
    "exclude_patterns",
    "train_t5xxl",
    "split_qkv",
)


class Dropouts(NamedTuple):
    """Probabilities with which a LoRA layer drops neurons of ``A(x)``, whole ranks of a sample, or itself."""

    of_neurons: float = 0.0
    of_ranks: float = 0.0
    of_module: float = 0.0


NO_DROPOUTS = Dropouts()


@dataclass(frozen=True)
class NetworkOptions:
    """What to inject where.

    Attributes:
        dim, alpha: rank and alpha of every layer that no other option speaks of.
        kind: of adapter, see ``networks.adapters.base``.
        rank_stabilised: the scale is alpha / sqrt(rank).
        pissa: A and B start from the largest singular directions of the weights, see ``networks.adapters.lora``.
        split_qkv: layers that are one in the original checkpoint have LoRAs of their own.
        factor, decompose_both, full_matrix: how lokr cuts a layer, see ``networks.adapters.lycoris``.
        factors: kind -> its factor, from the ``*_factor`` options.
        dropout, rank_dropout, module_dropout: probabilities, see ``networks.adapters.lora``.
        dims: kind -> rank (0: left out), from the ``*_dim`` options and lists such as ``in_dims``.
        dim_sources: kind -> the option its rank came from, for messages.
        blocks: option -> ranges of block indices that are trained; None: all.
        include_patterns, exclude_patterns: regular expressions on whole module names.
        loraplus_lr_ratio: learning rate of lora_B over that of lora_A; None: the same.
        loraplus_text_encoder_lr_ratio: the same for text encoders.
        train_t5xxl: the second text encoder is trained too.
        trainable_token_indices: tokens of a language model whose rows are trained in full.
    """

    dim: int
    alpha: float
    dropout: float = 0.0
    rank_dropout: float = 0.0
    module_dropout: float = 0.0
    dims: Mapping[str, int] = field(default_factory=dict)
    dim_sources: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, tuple[range, ...] | None] = field(default_factory=dict)
    include_patterns: tuple[str, ...] = ()
    exclude_patterns: tuple[str, ...] = ()
    loraplus_lr_ratio: float | None = None
    loraplus_text_encoder_lr_ratio: float | None = None
    train_t5xxl: bool = False
    kind: str = "lora"
    rank_stabilised: bool = False
    pissa: bool = False
    split_qkv: bool = True
    factor: int = -1
    factors: Mapping[str, int] = field(default_factory=dict)
    decompose_both: bool = False
    full_matrix: bool = False
    trainable_token_indices: tuple[int, ...] = ()

    @property
    def dropouts(self) -> Dropouts:
        """The dropouts of a layer."""
        return Dropouts(self.dropout, self.rank_dropout, self.module_dropout)

    def of_transformer(self) -> str | None:
        """Return an option that only a transformer follows, if one is set."""
        set_ones = [*self.dim_sources.values(), *(f"{kind}_factor" for kind in self.factors), *self.blocks]
        set_ones += [name for name in ("include_patterns", "exclude_patterns") if getattr(self, name)]
        return set_ones[0] if set_ones else None

    def trained_layers(self, targets: LoraTargets, components: Collection[str]) -> list[str]:
        """Return the modules of ``components`` that these options train, a block's standing for those of all blocks.

        No model is needed for that, so a few of the layers may be missing in one.
        """
        tables = [("", targets.file_prefix, targets.keys)]
        tables += [(f"{encoder.name}.", encoder.name, encoder.keys) for encoder in targets.text_encoders]
        wanted = [(prefix, keys) for prefix, component, keys in tables if component in components]
        modules = ([prefix + name for name in names] for prefix, keys in wanted for names in keys.modules)
        found = (next((name for name in names if self._trains(name, targets)), None) for names in modules)
        return [name for name in found if name is not None]

    def _trains(self, name: str, targets: LoraTargets) -> bool:
        group = targets.group_of(name)
        if group is None or not self.dims.get(group.name, self.dim if group.default else 0):
            return False
        if targets.text_encoder_of(name):
            return True
        if self.include_patterns and not any(targets.matches(pattern, name) for pattern in self.include_patterns):
            return False
        return not any(targets.matches(pattern, name) for pattern in self.exclude_patterns)

    def for_text_encoders(self) -> NetworkOptions:
        """Return what of these options speaks of text encoders too: the kind, its rank, alpha and dropouts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return NetworkOptions(**{name: value for name, value in values.items() if name not in _OF_TRANSFORMER})


def parse_network_args(config: NetworkConfig, targets: LoraTargets) -> NetworkOptions:
    """Check the network section against a family's options, before any model is loaded."""
    dim_options = targets.dim_options()
    foreign = {*(() if targets.text_encoders else _TEXT_KEYS), *(() if targets.own_names else _LANGUAGE_KEYS)}
    parsed_keys = [key for key in _PARSERS if key not in foreign]
    factor_options = {option.removesuffix("dim") + "factor": kind for option, kind in dim_options.items()}
    known = (*parsed_keys, *dim_options, *factor_options, *targets.dim_lists, *targets.block_options)
    values = _known_pairs(config.network_args, known)
    _check_kind(config, values)
    dims: dict[str, int] = {}
    sources: dict[str, str] = {}
    factors: dict[str, int] = {}
    blocks: dict[str, tuple[range, ...] | None] = {}
    with error_prefix("network_args"):
        for option, text in values.items():
            if option in dim_options:
                dims[dim_options[option]] = _rank(option, text)
                sources[dim_options[option]] = option
            elif option in factor_options:
                factors[factor_options[option]] = _factor(option, text)
            elif option in targets.dim_lists:
                ranks = _rank_list(option, text, targets.dim_lists[option])
                dims.update(ranks)
                sources.update(dict.fromkeys(ranks, option))
            elif option in targets.block_options:
                blocks[option] = _block_ranges(option, text)
        parsed = {option: _PARSERS[option](option, text) for option, text in values.items() if option in _PARSERS}
        if not parsed.get("split_qkv", True):
            _check_joined(config, targets)
        if parsed.get("full_matrix") and parsed.get("decompose_both"):
            raise UserError("decompose_both=True: full_matrix=True decomposes neither matrix; remove one of them")
        ratio = parsed.pop("loraplus_lr_ratio", None)
        return NetworkOptions(
            dim=config.network_dim,
            alpha=config.network_alpha,
            dropout=_probability("network_dropout", str(config.network_dropout)),
            dims=dims,
            dim_sources=sources,
            factors=factors,
            blocks=blocks,
            loraplus_lr_ratio=parsed.pop("loraplus_unet_lr_ratio", ratio),
            loraplus_text_encoder_lr_ratio=parsed.pop("loraplus_text_encoder_lr_ratio", ratio),
            kind=config.network_type,
            rank_stabilised=config.use_rslora,
            pissa=config.init_lora_weights == "pissa",
            **parsed,
        )


def _check_kind(config: NetworkConfig, values: Mapping[str, str]) -> None:
    """Refuse options that the kind of adapter, or the way it begins, has no meaning for."""
    kind, start = config.network_type, config.init_lora_weights
    low_rank = kind in ("lora", "dora")
    dropouts = {option: option in values for option in ("rank_dropout", "module_dropout")}
    for option, given in {"network_dropout": config.network_dropout > 0, **dropouts}.items():
        if given and not (low_rank and (kind == "lora" or option != "module_dropout")):
            raise UserError(f"{option}: network_type {kind} has no such dropout; remove it")
        if given and start != "default":
            raise UserError(f"{option}: would drop the start of init_lora_weights {start} as well; remove one of them")
    for key in values:
        if key.startswith("loraplus_") and not low_rank:
            raise UserError(f"network_args: {key}: network_type {kind} has no A and B; remove it")
    if conflicts := list(network_conflicts(config)):
        raise UserError(conflicts[0].message)
    if config.use_rslora and not low_rank:
        raise UserError(f"use_rslora: is about the scale of a LoRA or DoRA, not of network_type {kind}; remove it")
    if start != "default" and kind != "lora":
        raise UserError(f"init_lora_weights: {start} is for network_type lora, not {kind}; remove it")
    if start != "default" and config.network_weights:
        raise UserError(f"init_lora_weights: {start} and network_weights are two ways to begin; remove one of them")


def _known_pairs(pairs: list[str], known: tuple[str, ...]) -> dict[str, str]:
    """Return key -> value text, every key being known and given once."""
    values = split_pairs(pairs, "network_args")
    for key in values:
        if key in _REPLACED:
            raise UserError(f"network_args: {key} is not taken: {_REPLACED[key]}")
        if key not in known:
            hint = did_you_mean(key, known) or f"; known keys: {', '.join(sorted(known))}"
            raise UserError(f"network_args: unknown key {key!r}{hint}")
    return values


def _value(read: Callable[[str], Any], fits: Callable[[Any], bool], words: str) -> Callable[[str, str], Any]:
    """Return a parser of options whose text ``read`` turns into a value that ``fits``; it must be, in ``words``."""

    def parse(option: str, text: str) -> Any:
        with suppress(ValueError):
            if (value := read(text)) is not None and fits(value):
                return value
        raise UserError(f"{option}={text}: must be {words}")

    return parse


_probability = _value(float, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")
_ratio = _value(float, lambda value: 0 < value < float("inf"), "a number above 0; 16 is usual")
_flag = _value(lambda text: {"true": True, "false": False}.get(text.lower()), lambda _: True, "True or False")
_rank = _value(int, lambda value: 0 <= value < _MOST, "a whole number, 0 to leave these layers out")
_factor = _value(
    int,
    lambda value: value == -1 or 0 < value < _MOST,
    "a whole number of at least 1, or -1 for one near the root",
)


def _check_joined(config: NetworkConfig, targets: LoraTargets) -> None:
    """Refuse ``split_qkv=False`` where there are no joined layers, or no LoRA on them."""
    if targets.own_names or not any(len(row.parts) > 1 for row in targets.keys.rows):
        raise UserError(f"split_qkv=False: {targets.family}'s q, k and v are layers of their own; remove it")
    if config.network_type != "lora":
        raise UserError(f"split_qkv=False: network_type {config.network_type} cannot be trained so; remove it")
    if config.init_lora_weights != "default":
        raise UserError(f"split_qkv=False: init_lora_weights {config.init_lora_weights} begins at layers; remove one")


def _rank_list(option: str, text: str, kinds: tuple[str, ...]) -> dict[str, int]:
    parts = [part.strip() for part in text.removeprefix("[").removesuffix("]").split(",")]
    if len(parts) != len(kinds) or not all(re.fullmatch(_INDEX, part) for part in parts):
        names = ", ".join(kind.removesuffix("_in") for kind in kinds)
        raise UserError(f"{option}={text}: must be {len(kinds)} whole numbers ({names}), 0 to leave one out")
    return dict(zip(kinds, map(int, parts), strict=True))


def _block_ranges(option: str, text: str) -> tuple[range, ...] | None:
    """Parse kohya's block selection: "all", "none" (or nothing), or "0-3,8"."""
    if text == "all":
        return None
    if text in ("none", ""):
        return ()
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(rf"\s*({_INDEX})\s*(?:-\s*({_INDEX})\s*)?", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise UserError(f"{option}={text}: {part.strip()!r} is no index or range; write '0-3,8', 'all' or 'none'")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ranges)


def _tokens(option: str, text: str) -> tuple[int, ...]:
    """Parse numbers of tokens: "49152-49154,7"."""
    tokens = tuple(sorted(set(itertools.chain.from_iterable(_block_ranges(option, text) or ()))))
    if not tokens:
        raise UserError(f"{option}={text}: must be numbers of tokens, 49152-49154; extend_tokenizer.py prints them")
    return tokens


def _patterns(option: str, text: str) -> tuple[str, ...]:
    """Parse one regular expression, or a Python list of quoted ones."""
    found: object = [text]
    if text[:1] in ("[", "'", '"') or text[:2] in ("r'", 'r"'):
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            if text[:1] != "[":
                raise UserError(f"{option}={text}: the quotes are not closed") from None
            found = [text]  # a character class, "[a-z]+\.attn"
        found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(p, str) for p in found) or not found or "" in found:
        raise UserError(f"{option}={text}: must be a regular expression or a list of them, ['a', 'b']")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{option}: {pattern!r} is no regular expression ({error}); escape it or fix it") from None
    return tuple(found)


_PARSERS: Mapping[str, Callable[[str, str], Any]] = {  # of the options that every family has, or every one with text
    "rank_dropout": _probability,
    "module_dropout": _probability,
    **dict.fromkeys(("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"), _ratio),
    "include_patterns": _patterns,
    "exclude_patterns": _patterns,
    "train_t5xxl": _flag,
    "split_qkv": _flag,
    "trainable_token_indices": _tokens,
    "factor": _factor,
    "decompose_both": _flag,
    "full_matrix": _flag,
}
