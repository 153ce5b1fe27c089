"""A model by its name on the Hugging Face hub: ``black-forest-labs/FLUX.1-dev`` wherever a path is taken.

A path that exists is that path. Else a name of the form ``owner/name`` is looked up on the hub, as far as it does not
look like a path with a typing error. Downloading, resuming, the cache (``HF_HOME``), the token (``HF_TOKEN``, ``hf auth
login``), mirrors (``HF_ENDPOINT``) and ``HF_HUB_OFFLINE`` are ``huggingface_hub``'s, and so is what happens without a
network: the copy in the cache is used if it is complete. Only the files that are read here are fetched: of a pipeline
the safetensors, settings and tokenizers of its parts, not the copy of the transformer that publishers put beside them.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from library.config.model_layouts import INDEXES, pipeline_index, pipeline_of, snapshot_of
from library.config.published_models import MODEL, download_instead, published_models
from library.errors import UserError, counted, names_in_short, nearest_of, reason_of
from library.files import broken_link, read_json

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".json", ".toml", ".index")
_READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")  # what is read of a folder
_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # of a language model without safetensors
_UNREAD = ("pe", "pe_tokenizer")  # parts that no family uses: ERNIE-Image's prompt enhancer, 7 GB
_SMALL_PART = "scheduler"  # of every pipeline: what is downloaded to read its index
_USUAL_LORAS = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")  # PEFT's, diffusers'
_COPIES = ("*.fp16.*", "*.fp16-*", "*.bf16.*", "*.bf16-*", "*.non_ema*")  # in another precision


def takes_parts(path: Path) -> bool:
    """Return whether the model in ``path`` is a transformer alone, beside which options name the other parts."""
    return path.exists() and pipeline_of(snapshot_of(path)) is None


def find_model(
    given: str | Path,
    option: str,
    is_pipeline: bool | None = None,
    without: Collection[str] = (),
    part: str = "",
) -> Path:
    """Return the file or folder of a model; what is on the hub is downloaded into its cache first.

    Args:
        given: a path, or a name on the hub.
        option: the key or flag that it was given as, for messages.
        is_pipeline: an image model's; False: a language model; None: either.
        without: folders of a pipeline that are not needed.
        part: the only folder of a pipeline that is needed.

    Raises:
        UserError: neither is there; the hub wants a licence accepted; the disk is too full; nothing that can be read.
    """
    path = Path(given).expanduser()
    if given and path.exists():
        return snapshot_of(path, option)
    name = Path(given).as_posix()
    is_name = _HUB_NAME.fullmatch(name) is not None and not name.endswith(_FILE_ENDINGS)
    if link := broken_link(path):
        raise UserError(f"{option} {str(given)!r} does not exist{link}; correct the path")
    instead = download_instead(name, option)
    if given and (meant := _misspelt(path)) is not None:
        fetch = (
            f" For the model of that name on the hub: hf download {name} --local-dir {name}"
            if is_name and Path(name.split("/")[0]).exists()
            else ""
        )
        or_else = f" {instead[2].upper()}{instead[3:]}" if instead else ""
        raise UserError(f"{option} {str(given)!r} does not exist; did you mean {str(meant)!r}?{fetch}{or_else}")
    if not is_name:
        raise UserError(
            f"{option} {str(given)!r} does not exist; give a local file or folder, or a name on the Hugging Face hub, "
            f"owner/name{instead}"
        )
    return _from_hub(name, option, is_pipeline, frozenset(without), part)


def find_lora(given: str | Path, option: str) -> Path:
    """Return the file of a LoRA; what is named as on the hub, ``owner/name`` or ``owner/name/file``, is downloaded.

    Any other path that does not exist is returned as it is: who reads it says so.

    Raises:
        UserError: as :func:`find_model`; the repository has several LoRAs, or none.
    """
    path, (owner, *rest) = Path(given).expanduser(), Path(given).as_posix().split("/")
    adapters = {Path(row.adapter).name: str(Path(row.adapter).parent) for row in published_models() if row.adapter}
    if (adapter := adapters.get(path.name)) and not path.exists() and Path(given).parent.as_posix() != adapter:
        raise UserError(f"{option} {str(given)!r} does not exist; correct it, or give {adapter}, which is downloaded")
    name, file = "/".join((owner, *rest[:1])), "/".join(rest[1:])
    is_name = _HUB_NAME.fullmatch(name) and not name.endswith(_FILE_ENDINGS) and not (file and Path(owner).exists())
    if path.is_dir() and not (path / _USUAL_LORAS[0]).is_file():
        inside = names_in_short(sorted(file.name for file in path.glob("*.safetensors"))) or "it holds none"
        raise UserError(f"{option}: {path} is a folder without {_USUAL_LORAS[0]}; give a LoRA's file ({inside})")
    if path.exists() or not is_name or _misspelt(path):
        return path
    return _lora_from_hub(name, file, option)


def index_on_hub(name: str) -> dict[str, Any]:
    """Return the ``model_index.json`` of a pipeline on the hub; raises what :func:`find_model` does."""
    root = find_model(name, MODEL, True, part=_SMALL_PART)
    return read_json(index) if (index := pipeline_index(root)) else {}


def _misspelt(path: Path) -> Path | None:
    """Return the existing path that differs from ``path`` in the spelling of one or more of its parts, if there is one.

    Parts are looked for one after the other; a name on the hub has an owner, which is seldom like a folder here.
    """
    found = Path(path.anchor)
    for part in path.parts[1:] if path.anchor else path.parts:
        if (found / part).exists():
            found /= part
            continue
        try:
            names = [entry.name for entry in (found if found.parts else Path.cwd()).iterdir()]
        except OSError:
            return None
        nearest = nearest_of(part, names, 0.75)
        if nearest is None:
            return None
        found /= nearest
    return found


@functools.cache
def _from_hub(name: str, option: str, is_pipeline: bool | None, without: frozenset[str], part: str) -> Path:
    """Return the folder in the hub's cache that holds all that is read of model ``name``."""
    import huggingface_hub as hub

    with _said_plainly(name, option, _command(name, is_pipeline)):
        info = _listed(name)
        if info is None:
            return _cached(name, is_pipeline, without, part)
        files = [sibling.rfilename for sibling in info.siblings or []]
        if index := next((each for each in INDEXES if each in files), None):
            allowed = _pipeline_patterns(Path(hub.hf_hub_download(name, index, revision=info.sha)), without, part)
        elif part == _SMALL_PART:
            raise UserError(f"{option}: {name} has no {INDEXES[0]}, so it is no diffusers pipeline; give one")
        else:
            allowed = _folder_patterns(name, files, option, is_pipeline)
        return _download(name, allowed, option, _spare(files))


@functools.cache
def _lora_from_hub(name: str, file: str, option: str) -> Path:
    """Return the LoRA ``file`` in the hub's cache, by default the only one of repository ``name``, or the usual one."""
    with _said_plainly(name, option, f"hf download {name} {file}".rstrip()):
        if info := _listed(name):
            files = [sibling.rfilename for sibling in info.siblings or []]
        else:
            root = _snapshot(name, ("*/*",), local_files_only=True)
            files = [path.relative_to(root).as_posix() for path in root.rglob("*")]
        loras = sorted(each for each in files if each.endswith(".safetensors"))
        usual = {*_USUAL_LORAS, *(row.adapter.removeprefix(f"{name}/") for row in published_models())}
        chosen = [each for each in loras if each == file] if file else loras
        chosen = chosen if len(chosen) == 1 else [each for each in chosen if each in usual]
        if len(chosen) != 1:
            remedy = f"give one of {', '.join(f'{name}/{each}' for each in loras[:4])}" if loras else "give a LoRA"
            lacks = f"no {file}" if file else counted(len(loras), "safetensors file")
            raise UserError(f"{option}: {name} has {lacks}; {remedy}")
        return (_download(name, (*chosen, "adapter_config.json"), option, ()) if info else root) / chosen[0]


def _listed(name: str) -> Any:
    """Return what the hub knows of a repository, None without a network."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        return hub.HfApi().model_info(name)
    except errors.HfHubHTTPError:
        raise
    except (errors.HTTPError, errors.OfflineModeIsEnabled):
        return None


@contextmanager
def _said_plainly(name: str, option: str, command: str) -> Iterator[None]:
    """Make one line of what the hub raises; ``command`` fetches ``name`` elsewhere."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{option}: {name} is gated; accept its licence at {hub.constants.ENDPOINT}/{name}, then log in with "
            "`hf auth login` (or set HF_TOKEN)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{option}: {name} is neither a path here nor a model on the hub; check the spelling, or log in with "
            "`hf auth login` if it is private"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise UserError(
            f"{option}: {name} does not exist here, and is not (completely) in the cache; without a network, "
            f"fetch it where there is one: {command}"
        ) from None
    except (errors.HTTPError, errors.XetDownloadError, ConnectionError, TimeoutError) as error:
        raise UserError(
            f"{option}: {name}: the hub failed ({reason_of(error)}); start again, it goes on where it stopped"
        ) from None


def _command(name: str, is_pipeline: bool | None) -> str:
    """Return the command that fetches what is read of a model, and little more."""
    if is_pipeline is None:
        return f"hf download {name}"
    return f"hf download {name} " + (f'--include "*/*" --include "*{INDEXES[0]}"' if is_pipeline else '--exclude "*/*"')


def _spare(files: Collection[str]) -> tuple[str, ...]:
    """Return which of a repository's ``files`` are copies of weights that lie beside them in full precision."""
    copies = [file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in _COPIES)]
    whole = {Path(file).parent for file in {*files} - {*copies} if file.endswith(".safetensors")}
    return tuple(file for file in copies if Path(file).parent in whole or file.endswith(".bin"))


def _pipeline_patterns(index: Path, without: Collection[str], part: str = "") -> tuple[str, ...]:
    """Return what is read of a pipeline, of whose parts ``index`` tells, but for the parts ``without``."""
    if part:
        return (index.name, *(f"{part}/{pattern}" for pattern in _READ))
    parts = json.loads(index.read_text(encoding="utf-8"))
    # A modular pipeline's parts may be named without their classes.
    named = [k for k, v in parts.items() if isinstance(v, list) and (None not in v or isinstance(v[-1], dict))]
    read = [part for part in named if part not in (*without, *_UNREAD)]
    return (index.name, *(f"{part}/{pattern}" for part in read for pattern in _READ))


def _folder_patterns(name: str, files: Collection[str], option: str, is_pipeline: bool | None) -> tuple[str, ...]:
    """Return what is read of a language model, whose repository holds ``files``."""
    own = [file for file in files if "/" not in file]
    for weights, patterns in (("*.safetensors", _READ), ("pytorch_model*.bin", (*_READ, *_PICKLES))):
        if fnmatch.filter(own, weights):
            return patterns
    remedy = "give the repository of a diffusers pipeline or of a transformers model"
    if blocks := fnmatch.filter(sorted(files), "*.gguf"):
        remedy = f"fetch one of its GGUF files and give its path (hf download {name} {blocks[0]} --local-dir .)"
    raise UserError(
        f"{option}: {name} has no model in safetensors (it has {', '.join(sorted(files)[:4])}, ...); {remedy}"
    )


def _cached(name: str, is_pipeline: bool | None, without: Collection[str], part: str) -> Path:
    """Return the copy in the cache if it is complete; raise LocalEntryNotFoundError if not."""
    import huggingface_hub as hub

    cached = (hub.try_to_load_from_cache(name, each) for each in INDEXES)
    if index := next((each for each in cached if isinstance(each, str)), None):
        return _snapshot(name, _pipeline_patterns(Path(index), without, part), local_files_only=True)
    if is_pipeline:
        raise hub.errors.LocalEntryNotFoundError(name)
    return _snapshot(name, _READ, local_files_only=True)


def _download(name: str, allowed: tuple[str, ...], option: str, spare: Sequence[str]) -> Path:
    """Fetch what is missing, if the disk has room for it; of several processes the first of a machine shows how far."""
    from huggingface_hub.constants import HF_HUB_CACHE

    with _without_bars():
        missing = [file for file in _snapshot(name, allowed, spare, dry_run=True) if file.will_download]
    size, folder = sum(file.file_size or 0 for file in missing), Path(HF_HUB_CACHE).absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < size:
        raise UserError(
            f"{option}: {name}: {_in_gb(size)} are to be downloaded to {folder}, where {_in_gb(free)} are free; free "
            "space, or set HF_HOME to a folder on another disk"
        )
    shows = bool(missing) and os.environ.get("LOCAL_RANK", "0") == "0"
    if shows:
        print(
            f"downloading {name} to {folder}: {counted(len(missing), 'file')}, {_in_gb(size)}",
            file=sys.stderr,
            flush=True,
        )
    with nullcontext() if shows else _without_bars():
        return _snapshot(name, allowed, spare)


@contextmanager
def _without_bars() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_there = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_there:
            enable_progress_bars()


def _snapshot(name: str, allowed: tuple[str, ...], spare: Sequence[str] = _COPIES, **how: Any) -> Any:
    import huggingface_hub as hub

    of_a_folder = () if any(index in allowed for index in INDEXES) or "/" in allowed[0] else ("*/*",)
    found = hub.snapshot_download(name, allow_patterns=list(allowed), ignore_patterns=[*spare, *of_a_folder], **how)
    return Path(found) if isinstance(found, str) else found


def _in_gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
