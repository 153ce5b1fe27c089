"""What every family does with its transformer's files: fingerprint, fp8 layout, loading. A family says the rest."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from library.files import weights_fingerprint
from library.models.weights import KeyMap, WeightFiles, load_into
from library.nn.attention import Backend
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
    """

    transformer_class: Any
    _files: LocatedFiles
    _dtype: torch.dtype | None = None  # of the transformer that was loaded last

    def fingerprint(self) -> str:
        """Return a fingerprint of the transformer's weights."""
        return weights_fingerprint(self._files.transformer)

    def fp8_layout(self) -> Fp8Layout | None:
        """Return what the transformer's files hold in fp8, from their headers; None if nothing."""
        return WeightFiles(self._files.transformer).fp8

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
