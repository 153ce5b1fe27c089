"""What every family does with its transformer's files: fingerprint, fp8 layout, loading. A family says the rest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from torch import nn

from library.errors import UserError
from library.files import weights_fingerprint
from library.models.weights import KeyMap, WeightFiles, load_into
from library.nn.attention import Backend
from library.nn.tensor_split import Parts
from library.precision.checkpoint_layouts import Fp8Layout
from library.precision.loading import Fp8Loading


class LocatedFiles(Protocol):
    """Checked locations: weights of the transformer, a file or a folder, and its constructor's arguments."""

    @property
    def transformer(self) -> Any: ...

    @property
    def transformer_config(self) -> dict[str, Any]: ...

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        ...


class TransformerFiles:
    """Base of the families.

    Attributes:
        transformer_class: diffusers' class.
        masks_padding: whether texts of different lengths in a batch are padded, and their padding masked.
    """

    transformer_class: Any
    masks_padding = False
    _files: LocatedFiles
    _dtype: torch.dtype | None = None  # of the transformer that was loaded last

    def fingerprint(self) -> str:
        """Return a fingerprint of the transformer's weights."""
        return weights_fingerprint(self._files.transformer)

    def fp8_layout(self) -> Fp8Layout | None:
        """Return what the transformer's files hold in fp8, from their headers; None if nothing."""
        return WeightFiles(self._files.transformer).fp8

    def attention_heads(self) -> tuple[int, int]:
        """Return how many heads the transformer's attention has, and their width."""
        parameters = inspect.signature(self.transformer_class.__init__).parameters
        config = {name: each.default for name, each in parameters.items()} | self._files.transformer_config
        if "n_heads" in config:
            return config["n_heads"], config["dim"] // config["n_heads"]
        return config["num_attention_heads"], config["attention_head_dim"]

    def split_plan(self, processes: int) -> dict[str, Parts]:
        """Return how each linear layer of the blocks is split among ``processes``; no weights are read.

        As diffusers' ``_tp_plan`` says; the modulation, which it leaves whole, by outputs, which are gathered.

        Raises:
            UserError: the class has no such plan, or its heads or widths do not divide.
        """
        return split_plan(self.transformer_class, self._files.transformer_config, processes)

    def load_transformer(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: Backend = "auto",
        *,
        fp8: Fp8Loading | None = None,
    ) -> Any:
        """Load the transformer, frozen, in eval mode, with Tandem's hot paths.

        ``fp8`` says what becomes fp8; what the file has in fp8 stays so.

        Raises:
            UserError: tensors are missing, unknown or of the wrong shape.
        """
        weights, config = WeightFiles(self._files.transformer), self._files.transformer_config
        build = self.transformer_class.from_config
        key_map = self._files.key_map(weights)
        transformer = load_into(lambda: build(config), weights, key_map, dtype, device, fp8=fp8)
        assert isinstance(transformer, self.transformer_class)
        self._dtype = dtype
        return self._with_hot_paths(transformer, backend)

    def _with_hot_paths(self, transformer: Any, backend: Backend) -> Any:
        """Return ``transformer`` with the family's fast layers."""
        raise NotImplementedError


def split_plan(kind: Any, config: Mapping[str, Any], processes: int) -> dict[str, Parts]:
    """Return :meth:`TransformerFiles.split_plan` of diffusers' class ``kind`` with ``config``; raises as that."""
    if not kind._tp_plan:
        raise UserError(f"tp: diffusers says of no layer of {kind.__name__} how it is split; set tp = 1 and shard")
    with torch.device("meta"):
        empty = kind.from_config(config)
    heads = empty.config.num_attention_heads
    if heads % processes:
        raise UserError(f"tp: {heads} heads cannot be dealt out to {processes} processes; set a divisor")
    try:
        found = resolve_tp_shard_specs(empty, kind._tp_plan, processes)
    except ValueError as error:
        raise UserError(f"tp: {error}; set a divisor") from None
    weights = {name: spec for name, spec in found.items() if name.endswith(".weight")}
    plan = {n.removesuffix(".weight"): Parts(spec.dim, tuple(spec.block_sizes)) for n, spec in weights.items()}
    blocks = {name.split(".")[0] for name in plan}
    for name, layer in empty.named_modules():
        # What is left is the modulation: large weights, one row of numbers each for the whole picture.
        is_left = isinstance(layer, nn.Linear) and name.split(".")[0] in blocks and name not in plan
        if is_left and layer.out_features % processes == 0:
            plan[name] = Parts(0, (layer.out_features,), gathered=True)
    return plan
