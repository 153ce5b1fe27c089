"""What a run resumes from: one format of states for all trainings, whatever layout the processes have.

    weights.safetensors      what is trained, in the dtype that it is trained in, in full
    optimizer.json           and optimizer.safetensors, schedule.json, scaler.json, average.json: state dicts
    inputs.json              and inputs.safetensors: what the run follows from
    position.json            the ``Position``, the base model's fingerprint, the settings that must be the same
    checksums.json           of all of these; nothing is used that does not fit them

Random numbers need no saving, they are functions of seed, step and sample. The optimizer's state carries its learning
rate and arguments. Rates are put in their place by the schedule (``optim.schedules``); of the rest a resumed run would
silently ignore new ones: options marked ``MustMatch`` in the schema are compared, and a run that changed one is
refused. ``inputs`` is what the run follows from besides (``training.run_inputs``): what has changed of it is printed. A
folder is written under a temporary name and renamed when complete.

A state dict is a tree of dicts, lists, tuples, numbers, strings and tensors. It is written without pickle, as JSON in
which every tensor is a reference into the safetensors file beside it; tuples and integer keys are marked, so that
reading gives back exactly what was written.

``resume = "auto"`` goes on from the newest complete state in the output folder. A process may have been killed at any
moment, so the folder is put in order first: half-written files and folders go, and what was being replaced is put back
(``library.files``). A state counts if every file in it is as it was written; one that is not is named and passed over.
The newest is the one saved last, by the time written in it. States in the fallback folder count too, if they are of
this run: they were written there because the output folder could not be. If there are states and none is whole, the run
does not begin: it would write over what can perhaps be rescued.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from library.checksums import MANIFEST, checksum, find_change, write_manifest
from library.config.run_schema import SavingConfig
from library.config.schema import LASTING_PARTS
from library.errors import UserError
from library.files import atomic_folder, clear_leftovers, read_own, write_text
from library.safetensors_io import write_safetensors
from library.training.checkpoint.saving import fallback_folder

WEIGHTS, POSITION, INPUTS = "weights.safetensors", "position.json", "inputs"
AUTO = "auto"
TOKENIZER, EARLIER = "tokenizer", "tokenizer of earlier versions"  # settings of pretraining's states: fingerprints
_OF_ANOTHER_VERSION = (
    "is incomplete or of another version of Tandem ({}); resume it with the version that wrote it, or start a new run "
    "from its LoRA or model (network_weights, init_from)"
)


@dataclass
class Position:
    """How far a run is."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # epochs begun before this one
    batches: int = 0  # batches of this epoch done, over all processes; of pretraining windows
    loss_ema: float = 0.0
    val_loss_before: float | None = None
    best_val_loss: float | None = None
    validations_since_best: int = 0
    updates_dropped: int = 0  # steps that were not finite and were skipped with their batches
    nonfinite_in_row: int = 0  # those since the last that was finite
    validated_at: int | None = None  # the step of the last validation that was compared with the best
    epoch_batches: int | None = None  # of the run that wrote it

    def in_epoch_of(self, batches: int) -> Position:
        """Return the same share of an epoch of ``batches``, where images, batch sizes or texts have changed."""
        if self.epoch_batches in (None, batches):
            return replace(self, epoch_batches=batches)
        return replace(self, batches=self.batches * batches // self.epoch_batches, epoch_batches=batches)


class Stateful(Protocol):
    """What optimizers, schedules and loss scalers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def save_training_state(
    folder: Path,
    weights: Mapping[str, Tensor],
    states: Mapping[str, Any],
    position: Position,
    base: str,
    settings: Mapping[str, Any] | None = None,
    home: Path | None = None,
) -> None:
    """Write a state folder in one step, replacing an older one of the same name.

    Args:
        folder: where.
        weights: the trained parameters by name.
        states: state dicts of optimizer, schedule, scaler by name.
        position: how far the run is.
        base: the base model's fingerprint, checked when resuming.
        settings: of ``resume_keys``, checked when resuming.
        home: the run's output folder, by which it knows its state again in the fallback folder.

    Raises:
        WriteError: the disk is full or cannot be written to; the older state is as it was.
        UserError: a part's state holds something that cannot be written.
    """
    about = asdict(position) | {"base": base, "settings": dict(settings or {}), "saved": time.time()}
    about["home"] = _home(home or folder.parent)
    with atomic_folder(folder) as temporary:
        write_safetensors(temporary / WEIGHTS, weights)
        for name, state in states.items():
            write_state(temporary / name, state)
        write_text(temporary / POSITION, json.dumps(about))
        write_manifest(temporary)


def _home(folder: Path) -> str:
    """Return what stands for a run's output folder: its path is nobody else's business where states are uploaded."""
    return hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def read_position(folder: str | Path, settings: Mapping[str, Any], base: str | None = None) -> Position:
    """Return the position of a saved state; the weights are not read.

    Raises:
        UserError: ``folder`` is not a state, a damaged one, of another version, of other ``settings`` (those of
            ``resume_keys``), or of another ``base`` than the one with this fingerprint.
    """
    folder = Path(folder)
    check_whole(folder, [POSITION])
    saved = json.loads((folder / POSITION).read_text(encoding="utf-8"))
    try:
        saved_base, saved_settings = saved.pop("base"), saved.pop("settings")
        del saved["saved"], saved["home"]
        if saved.pop("skipped_samples", None):  # of on_nan = "rollback", which left out images and no batches
            saved["updates_dropped"] = 0
        position = Position(**saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"resume: {folder} {_OF_ANOTHER_VERSION.format(f'{POSITION} does not fit: {error}')}") from None
    saved_settings |= {key: part(saved_settings[key]) for key, part in LASTING_PARTS.items() if key in saved_settings}
    if saved_settings.get(TOKENIZER) == settings.get(EARLIER, ""):
        saved_settings[TOKENIZER] = settings[TOKENIZER]
    differing = sorted(key for key, value in settings.items() if saved_settings.get(key, value) != value)
    if TOKENIZER in differing:
        raise UserError(
            f"resume: {folder} was trained with another tokenizer than that of data_dir; prepare the corpus with its "
            "own (tools/prepare_text.py --tokenizer, with the folder of the model that the run saved)"
        )
    pairs = {key: (json.dumps(saved_settings[key]), json.dumps(settings[key])) for key in differing}
    if changed := [f"{key} = {before}, now it is {after}" for key, (before, after) in pairs.items()]:
        raise UserError(
            f"resume: {folder} was trained with {', with '.join(changed)}; a state goes on with its own: set that "
            "again, or start a new run from its weights (network_weights, init_from)"
        )
    if base is not None and saved_base != base:
        raise UserError(f"resume: {folder} was trained on another base model; set the one it was trained on")
    return position


def start_position(resume: str | None, batches: int) -> Position:
    """Return where the state to ``resume`` is, the very beginning without one, in epochs of ``batches``."""
    return (read_position(resume, {}) if resume else Position()).in_epoch_of(batches)


def _find_lacking(folder: Path) -> str | None:
    """Return in words, with the remedy, which file of every state ``folder`` lacks; None if it has them."""
    try:
        if not folder.is_dir():
            return f"{folder} is not a training state (no such folder); give a folder that save_state wrote"
        if not (folder / POSITION).is_file():
            why = f"it has no {POSITION}"
            return f"{folder} is not a training state of Tandem ({why}); give a folder that save_state wrote"
        absent = next((name for name in (WEIGHTS, MANIFEST) if not (folder / name).is_file()), None)
    except OSError as error:  # a folder that may not be looked into
        return f"{folder} cannot be read ({error.strerror}); check its permissions"
    return f"{folder} {_OF_ANOTHER_VERSION.format(f'it has no {absent}')}" if absent else None


def refuse_finished(folder: str | Path, position: Position, total_steps: int, finished_too: bool = False) -> None:
    """Refuse a state with nothing left to train.

    Raises:
        UserError: it is from behind the end of the run, or, unless ``finished_too``, at it.
    """
    if position.step > total_steps or (position.step == total_steps and not finished_too):
        raise UserError(
            f"resume: {folder} is at step {position.step} and the run ends at {total_steps}; "
            "raise max_train_steps or max_train_epochs"
        )


def load_training_state(
    folder: str | Path,
    shapes: Mapping[str, torch.Size],
    scatter: Callable[[Mapping[str, Tensor]], None],
    parts: Mapping[str, Stateful],
    base: str,
    settings: Mapping[str, Any] | None = None,
) -> Position:
    """Put a saved state back; return the position to go on from.

    Args:
        folder: the state, of which :func:`resolve_resume` has seen that it is whole.
        shapes: of the trained weights, in full.
        scatter: puts full weights, of which this process may have a part, into the model.
        parts: optimizer, schedule, scaler, average by name; they take their full state.
        base, settings: of this run, that the state must have been trained with.

    Raises:
        UserError: ``folder`` is no state, belongs to another base model, was trained with other ``settings``, or holds
            other weights than the run trains.
    """
    folder = Path(folder)
    position = read_position(folder, settings or {}, base)
    weights = load_file(folder / WEIGHTS)
    differing = [n for n in weights.keys() | shapes.keys() if n not in weights or weights[n].shape != shapes.get(n)]
    if differing:
        raise UserError(
            f"resume: {folder}: its weights are not those of this run ({len(differing)} tensors differ, first "
            f"{min(differing)}); use the settings it was trained with"
        )
    with torch.no_grad():
        scatter(weights)
    for name, part in parts.items():
        if name in ("scaler", "preconditioner") and not has_part(folder, name):  # fp16, or measured, from now on
            continue
        state = read_state(folder / name)
        try:
            part.load_state_dict(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(
                f"resume: {folder}: the saved {name} does not fit this run's ({error}); use the settings it was "
                "trained with"
            ) from error
    return position


def has_part(folder: str | Path, name: str) -> bool:
    """Return whether a state has the part ``name``."""
    return (Path(folder) / f"{name}.json").exists()


def resolve_resume(resume: str | None, saving: SavingConfig, say: Callable[[str], None]) -> str | None:
    """Tidy the output folder, and return the state to ``resume``: the newest where that is "auto".

    The state is read in full here, before any model and by the main process alone, to see that it is whole.

    Args:
        resume: as the configuration has it.
        saving: of the run.
        say: prints a line.

    Raises:
        UserError: the state is damaged; of "auto", there are states and all of them are.
    """
    folder, name = Path(saving.output_dir), saving.output_name
    fallback = fallback_folder(saving.save_fallback_dir, name)
    tidy([folder, folder / "samples", fallback], say)
    if resume != AUTO:
        if resume is not None:
            check_whole(Path(resume))
        return resume
    state = newest_state(folder, name, say, fallback)
    if not saving.save_state:
        say(
            "note: without save_state only a run that is asked to stop, or that fails, leaves a state for resume = auto"
        )
    say(f"resume: going on from {state}" if state else f"resume: no state of {name} in {folder}; from scratch")
    return None if state is None else str(state)


def tidy(folders: Iterable[Path], say: Callable[[str], None]) -> None:
    """Remove what killed processes left half-written in ``folders``; put back what they were replacing."""
    for folder in folders:
        for restored in clear_leftovers(folder):
            say(f"{restored}: put back; the run that was replacing it did not get to the end")


def newest_state(
    folder: Path, name: str, say: Callable[[str], None] = lambda _: None, fallback: Path | None = None
) -> Path | None:
    """Return the state of the run ``name`` in ``folder`` that was saved last and is whole; None if there is none.

    Args:
        folder: the run's output folder.
        name: its output name.
        say: is told which states are passed over; those older than the one that is taken are not read.
        fallback: where states may lie, too, that ``folder`` did not take; those of other folders are not looked at.

    Raises:
        UserError: there are states, and all of them are damaged.
    """
    damaged: list[Path] = []
    for state in _states(folder, name, fallback):
        damage = find_damage(state)
        if damage is None:
            return state
        say(f"resume: {damage}; passed over")
        damaged.append(state)
    if damaged:
        which = f"{damaged[0]} and {len(damaged) - 1} others are" if len(damaged) > 1 else f"{damaged[0]} is"
        raise UserError(
            f"resume: {which} damaged and there is no other state of {name}; nothing was changed: put a copy back, "
            "move it away to begin anew, or start from a LoRA or model that was saved (network_weights, init_from)"
        )
    return None


def _states(folder: Path, name: str, fallback: Path | None) -> list[Path]:
    """Return the states of the run ``name``, the newest first; arguments as of :func:`newest_state`."""
    pattern = re.compile(re.escape(name) + r"(-step\d{8}|-\d{6})?-state")
    found: list[tuple[float, str, Path]] = []
    places = [folder] if fallback is None or fallback.resolve() == folder.resolve() else [folder, fallback]
    for state in (state for place in places for state in sorted(place.glob("*-state"))):
        if not pattern.fullmatch(state.name) or (state.parent != folder and not _is_of(state, folder)):
            continue
        saved = math.inf  # where it does not say, it is looked at first
        if find_damage(state, [POSITION]) is None:
            saved = json.loads((state / POSITION).read_text(encoding="utf-8"))["saved"]
        found.append((saved, state.name, state))
    return [state for _, _, state in sorted(found, reverse=True)]


def settings_of_state(resume: str | None, saving: SavingConfig) -> dict[str, Any] | None:
    """Return the settings that the state to ``resume`` was trained with, None if there is none or it is damaged."""
    fallback = fallback_folder(saving.save_fallback_dir, saving.output_name)
    found = _states(Path(saving.output_dir), saving.output_name, fallback) if resume == AUTO else [Path(resume or "")]
    if resume is None or not found or find_damage(found[0], [POSITION]) is not None:
        return None  # whoever resumes says what is wrong
    return json.loads((found[0] / POSITION).read_text(encoding="utf-8"))["settings"]


def _is_of(state: Path, folder: Path) -> bool:
    """Whether a state in a fallback folder is of a run that writes into ``folder``."""
    try:
        return bool(json.loads(read_own(state / POSITION))["home"] == _home(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_inputs(folder: str | Path) -> dict[str, Any] | None:
    """Return what the run followed from that saved a state; None of one of an earlier version, which kept it not."""
    return read_state(Path(folder) / INPUTS) if (Path(folder) / f"{INPUTS}.json").is_file() else None


def find_damage(state: Path, files: Collection[str] | None = None) -> str | None:
    """Return in words what is missing or damaged in a state folder, of ``files`` or of all; None if it is whole."""
    return _find_lacking(state) or find_change(state, files)


def check_whole(state: Path, files: Collection[str] | None = None) -> None:
    """Raise a UserError where :func:`find_damage` finds something."""
    if lacking := _find_lacking(state):
        raise UserError(f"resume: {lacking}")
    if change := find_change(state, files):
        raise UserError(f"resume: {change}; resume from another state, or with --resume auto, which passes it over")


def describe_state(resume: str | None) -> str:
    """Return in words what is resumed, of a state its step and a checksum of all of it: the same for every copy.

    Raises:
        UserError: it is no state, or not one whose position can be read.
    """
    if resume is None or resume == AUTO:
        return resume or "nothing"
    return f"at step {read_position(resume, {}).step} (checksum {checksum(Path(resume) / MANIFEST)})"


@dataclass(frozen=True)
class OutputNames:
    """File names in kohya's pattern: ``name-step00000100``, ``name-000002`` for epochs, ``name`` at the end."""

    folder: Path
    name: str
    suffix: str = ".safetensors"  # of LoRAs; a language model's are folders without one

    def stem(self, step: int | None = None, epoch: int | None = None) -> str:
        """Return the name without suffix for a step, an epoch, or the end of training."""
        if step is not None:
            return f"{self.name}-step{step:08d}"
        return f"{self.name}-{epoch:06d}" if epoch is not None else self.name

    def weights(self, stem: str) -> Path:
        """Return the path of what is saved to be used: a LoRA, a model."""
        return self.folder / f"{stem}{self.suffix}"

    def state(self, stem: str) -> Path:
        """Return the path of a state folder."""
        return self.folder / f"{stem}-state"


_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def write_state(stem: Path, tree: Any) -> None:
    """Write ``tree`` as ``<stem>.json`` and ``<stem>.safetensors``.

    Raises:
        UserError: the tree holds something that is neither JSON nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(tree, tensors, stem.name))
    if tensors:  # the format has no empty file
        write_safetensors(stem.with_suffix(".safetensors"), tensors)
    write_text(stem.with_suffix(".json"), text)


def read_state(stem: Path) -> Any:
    """Return the tree written under ``stem``, tensors on the CPU.

    Raises:
        UserError: a file is missing or damaged.
    """
    try:
        data = stem.with_suffix(".safetensors")
        # copied: the file is mapped, and Windows replaces none that is
        tensors = {name: tensor.clone() for name, tensor in load_file(data).items()} if data.exists() else {}
        return _decode(json.loads(stem.with_suffix(".json").read_text(encoding="utf-8")), tensors)
    except Exception as error:
        raise UserError(f"{stem}.json: the saved state cannot be read ({error}); resume from another one") from error


def _encode(node: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if isinstance(node, torch.Tensor):
        name = f"t{len(tensors)}"
        # A tensor may be a view of a larger one or share memory with another; a copy may not.
        tensors[name] = node.detach().cpu().clone()
        return {_TENSOR: name}
    if isinstance(node, dict):
        return {_PAIRS: [[key, _encode(value, tensors, f"{where}.{key}")] for key, value in node.items()]}
    if isinstance(node, tuple):
        return {_TUPLE: [_encode(value, tensors, where) for value in node]}
    if isinstance(node, list):
        return [_encode(value, tensors, where) for value in node]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise UserError(f"{where}: a {type(node).__name__} in the optimizer's state cannot be saved; use another optimizer")


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_decode(value, tensors) for value in node]
    if not isinstance(node, dict):
        return node
    if _TENSOR in node:
        return tensors[node[_TENSOR]]
    if _TUPLE in node:
        return tuple(_decode(value, tensors) for value in node[_TUPLE])
    return {key: _decode(value, tensors) for key, value in node[_PAIRS]}
