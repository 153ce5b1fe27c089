"""``sample_model``: samples are made with another model of the same architecture, with the LoRA as it is being trained.

LoRAs are trained on Z-Image, FLUX.2 klein base, Krea 2 Raw and used on their distilled models; or on the distilled
model with a training adapter merged into it (``base_weights``), which is to be left out where pictures are made. What
the samples should show is the LoRA where it will be used.

The transformer that is trained stays in its place, with its LoRA, its hooks and its compiled blocks. For the time of
sampling its frozen weights and those of the other model, read into host memory, change places, one tensor after the
other: nothing more lies on the device than in a training step. Afterwards its own are copied back, however much of the
exchange was done. Weights of swapped blocks change in host memory
(``library.training.memory.block_swap``). Both models must therefore hold their weights in the same formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from library.config.schema import ModelConfig
from library.errors import UserError, undone
from library.models.family import Family
from library.models.family_by_name import model_family, with_transformer
from library.models.hub import find_model
from library.models.weights import stands_for
from library.precision.checkpoint import WeightFiles
from library.training.memory.block_swap import Ring
from library.training.optim.after_update import given_back
from networks.adapters.base import AdapterLinear

_INSIDE = {"base", "_orig_mod"}  # of a module's path: what wraps a layer with a LoRA or a compiled block


def sample_family(path: str, config: ModelConfig, family: Family) -> Family:
    """Return the model in ``path``, a folder, file or name on the hub, beside the other parts of ``config``'s.

    Raises:
        UserError: it is of another architecture than ``family``, or holds its weights in other formats.
    """
    parts = (family.layout.vae, *family.layout.text_encoders)
    root = find_model(path, "sample_model", True, [part.folder for part in parts])
    path_of_base = Path(config.pretrained_model_name_or_path).expanduser()
    left = {part.option: str(path_of_base) for part in parts if root.is_dir() and getattr(config, part.option) is None}
    other = model_family(with_transformer(config.model_copy(update=left), root))
    other.distilled = True
    formats = _formats(family), _formats(other)
    if formats[0].keys() != formats[1].keys():
        name = sorted(formats[0].keys() ^ formats[1].keys())[0]
        raise UserError(
            f"sample_model: {path} and the model that is trained are not of one architecture (one has {name}, the "
            f"other not); give a {family.layout.title} model of the same size"
        )
    for name, (shape, trained_format) in formats[0].items():
        found, other_format = formats[1][name]
        if trained_format != other_format or not (stands_for(found, shape) or stands_for(shape, found)):
            raise UserError(
                f"sample_model: {path} has {name} as {other_format} {list(found)}, the model that is trained has it as "
                f"{trained_format} {list(shape)}; give a model of the same size in the same format"
            )
    return other


def _formats(family: Family) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return parameter -> its shape, and the format that it is quantised in, from the headers."""
    weights = WeightFiles(family.files.transformer)
    stored = {} if weights.quantized is None else weights.quantized.weights
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, pieces in family.layout.key_map(weights, family.files.prefix).items():
        scheme = stored[pieces[0].source].scheme.describe() if pieces[0].source in stored else "not quantised"
        found[name] = weights.shape_of(pieces), scheme
    return found


class SampleModel:
    """The other model of a run."""

    def __init__(self, load: Callable[[], nn.Module], rings: Sequence[Ring] = ()) -> None:
        """``load`` reads its transformer into host memory; ``rings`` hold swapped blocks of the trained one."""
        self._load, self._rings = load, rings

    @contextmanager
    def in_place(self, transformer: nn.Module) -> Iterator[None]:
        """Let ``transformer`` have the other model's frozen weights inside."""
        other = _frozen(self._load())
        trained = _frozen(transformer)
        if differing := sorted(trained.keys() ^ other.keys()):
            raise UserError(f"sample_model: {differing[0]} is in one of both models only; give the same architecture")
        adapters = [layer for layer in transformer.modules() if isinstance(layer, AdapterLinear)]
        measured = [buffer for layer in adapters for buffer in layer.buffers(recurse=False)]
        kept, what = list[tuple[Tensor, Tensor]](), "sample_model: the exchange of the weights"
        with given_back(measured, what), undone(what, lambda: self._write(kept)):
            self._write(((tensor, other.pop(name)) for name, tensor in trained.items()), kept)
            for layer in adapters:
                layer.measure_base()
            yield

    @torch.no_grad()
    def _write(self, pairs: Iterable[tuple[Tensor, Tensor]], kept: list[tuple[Tensor, Tensor]] | None = None) -> None:
        """Give the first tensor of each pair the numbers of the second; its own go into ``kept`` before."""
        with ExitStack() as stack:
            for ring in self._rings:
                stack.enter_context(ring.at_home())
            for tensor, numbers in pairs:
                if kept is not None:
                    kept.append((tensor, tensor.to(numbers.device, copy=True)))
                tensor.copy_(numbers)


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> frozen weight, and what belongs to a quantised one, whatever wraps the layers."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        plain = ".".join(part for part in path.split(".") if part not in _INSIDE)
        tensors: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False)]
        if isinstance(module, AdapterLinear):
            tensors = []
        elif hasattr(module, "in_features"):
            tensors += module.named_buffers(recurse=False)
        found |= {f"{plain}.{name}": tensor for name, tensor in tensors if not tensor.requires_grad}
    return found
