"""What kind of model a configuration trains: read from the model's headers, its pipeline and its name.

``model_type`` follows from the model, and one that is set must not contradict its files. Headers and JSON are read, no
weight; nothing needs torch. What headers do not tell apart (FLUX.1 dev or Kontext, klein with references or without,
the editions of Qwen-Image) follows from the class of the pipeline, else from the name; of what is left, from whether
the dataset has control images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.kohya.matters import names_key
from library.config.model_layouts import (
    UNKNOWN,
    is_lora,
    pipeline_index,
    pipeline_of,
    recognise_below,
    snapshot_of,
    unsupported,
)
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.published_models import FILE_ENDINGS, MODEL, PublishedModel, find_published, hub_instead
from library.errors import UserError, names_in_short
from library.files import read_json
from library.gguf_header import MAGIC, read_gguf_header

Ask = Callable[[str], Mapping[str, Any]]  # of what is not here: a pipeline's model_index.json
_MOST_HEADER = 100 * 2**20  # bytes, as in safetensors
_FILL_CHANNELS = 384  # of FLUX.1 Fill: an image, a blanked one and a mask, folded two by two


@dataclass(frozen=True)
class Kind:
    """What a model can be.

    Attributes:
        possible: values of ``model_type`` that its headers allow; empty: unknown.
        likely: those that its pipeline or name has.
        is_here: a file or folder that this user may look at.
        arguments: of the transformer's class, as far as they were read.
    """

    possible: tuple[str, ...]
    likely: tuple[str, ...]
    is_here: bool
    arguments: Mapping[str, Any]

    def choose(self, edits: bool) -> str:
        """Return the likeliest with references for ``edits``, else without."""
        return next((n for n in self.likely if (MODEL_TYPES[n].conditioning == "references") == edits), self.likely[0])


def kind_of(model: str, ask: Ask | None = None) -> Kind:
    """Return what a model, a file, a folder or a name on the hub, can be; ``ask`` is called if it is not here."""
    path, known = Path(model).expanduser(), find_published(model)
    arguments, index, is_here = dict[str, Any](), dict[str, Any](), False
    with suppress(OSError):  # who reads it says so
        is_here = path.exists()
    if is_here:
        arguments, index = _arguments(path), _index(path)
    elif ask and not (known and known.hub.lower() == model.lower().rstrip("/")):
        index = dict(ask(model))
    pipeline, names = index.get("_class_name"), known.model_types if known else ()
    if arguments:
        possible = [name for name in IMAGE_MODELS if _allows(arguments, name)]
    else:  # variants of one architecture differ by what their headers tell
        first = [name for name in IMAGE_MODELS if pipeline and MODEL_TYPES[name].pipeline == pipeline] or list(names)
        possible = [name for name in IMAGE_MODELS if first and _looks(name) == _looks(first[0])]
    if arguments.get("zero_cond_t"):
        possible = [name for name in possible if "zero_cond_t" in MODEL_TYPES[name].settings]
    exact = [name for name in possible if MODEL_TYPES[name].pipeline == pipeline or (name in names and not arguments)]
    named = [name for name in possible if any(word in path.name.lower() for word in MODEL_TYPES[name].words)][-1:]
    likely = exact or [name for name in possible if name in names] or named or possible
    if exact and exact[0] != "flux":  # FLUX.1 dev may be trained as Kontext, whose shapes it has
        possible = exact
    return Kind(tuple(possible), tuple(likely), is_here, arguments | {"is_distilled": index.get("is_distilled", False)})


def refuse_other_kind(model: str, given: str | None, ask: Ask | None = None) -> Kind:
    """Return the kind of a model; raise a UserError if it contradicts the ``model_type`` that is ``given``."""
    kind = kind_of(model, ask)
    if given and kind.possible and given not in kind.possible:
        other = kind.choose(MODEL_TYPES[given].conditioning == "references")
        what = f"{MODEL_TYPES[other].title} ({other})"
        raise UserError(f'{model}: is {what}, not {given}; set model_type = "{other}", or leave it out')
    return kind


def likely_type(model: str) -> str:
    """Return the ``model_type`` of a model; of what is unknown the first, whose family then says what it is."""
    with suppress(UserError):
        return next(iter(kind_of(model).likely), IMAGE_MODELS[0])
    return IMAGE_MODELS[0]


def model_type_of(values: Mapping[str, Any], ask: Ask | None = None) -> tuple[str | None, list[str]]:
    """Return the ``model_type`` of a configuration, None if the model is not here, and lines on it for the person.

    Args:
        values: option -> value.
        ask: as of :func:`kind_of`.

    Raises:
        UserError: the model is not known or of another kind than ``model_type``, or cannot be trained.
    """
    model, given = str(values[MODEL]), values.get("model_type")
    kind, lines = refuse_other_kind(model, given, ask), list[str]()
    if not given and not kind.likely:
        refuse_no_model(model)
        if ask is None and not kind.is_here:  # who reads the model says so
            return None, lines
        raise UserError(f"nothing tells what kind of model {model} is; give one of {titles()}, or set model_type")
    edits = names_key(values.get("dataset_config"), "control_directory")
    found = given or kind.choose(edits)
    editing = [name for name in kind.likely if MODEL_TYPES[name].conditioning == "references"]
    if given and edits and editing and given not in editing:
        lines.append(f'{given} takes no control images, which the dataset has; set model_type = "{editing[0]}"')
    if not given:
        why = ", as the dataset has control images" * (edits and MODEL_TYPES[found].conditioning == "references")
        others = " or ".join(name for name in kind.possible if name != found)
        lines.append(f"trained as {found}{why}" + f"; set model_type for {others}" * bool(others))
    return found, [*lines, *_distilled(model, values, kind)]


def hub_instead_of_missing(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to train a model by its name on the hub whose file is not here; {}: it is, or is not known."""
    given = str(values.get(MODEL) or "")
    known = find_published(given)
    return hub_instead(known) if known and known.hub != given and not kind_of(given).is_here else {}


def refuse_lora(given: object, names: Iterable[str], model: str) -> None:
    """Raise a UserError if a file given as a base model is a LoRA; ``names``: its tensors, ``model``: what to give."""
    if is_lora(names):
        remedy = f"give it as network_weights (to a tool: --lora), and {model} here"
        raise UserError(f"{given}: a LoRA, not a base model; {remedy}")


def refuse_no_model(model: str) -> None:
    """Raise a UserError if what is no model of ours is a damaged file, a LoRA, another model or a folder of files."""
    path = Path(model).expanduser()
    if path.is_dir() and (files := sorted(one.name for one in path.iterdir() if one.name.endswith(FILE_ENDINGS))):
        raise UserError(f"{model}: a folder, no diffusers pipeline; give one of its files ({names_in_short(files)})")
    if not path.is_file():
        return
    if not (names := _shapes(path)):
        raise UserError(f"{model}: not a safetensors or GGUF file, or a damaged one; download or convert it again")
    refuse_lora(model, names, "the model that it was trained on")
    other, found = unsupported(names), recognise_below(names)[1]
    if what := f"{other} checkpoint" if other else found.name * (found is not UNKNOWN):
        article = "an" if what[0] in "aeiouE" else "a"
        raise UserError(f"{model}: {article} {what}; give a transformer of one of {titles()}")


def titles(names: Iterable[str] = IMAGE_MODELS) -> str:
    """Return what the families of several values of ``model_type`` are called."""
    return ", ".join(dict.fromkeys(MODEL_TYPES[name].title for name in names))


def _distilled(model: str, values: Mapping[str, Any], kind: Kind) -> Iterator[str]:
    """Yield what to do instead of training on a distilled model, or beside it."""
    known = _published(model, kind)
    if kind.arguments.get("flow_map") or (known and known.has_own_layers and not kind.is_here):
        base = known.train_on if known and known.train_on else "its base"
        raise UserError(f"{model}: distilled, with layers of its own, and cannot be trained; train {base}")
    name = _distilled_name(model, kind)
    teacher = str(values.get("distill_from") or "")
    if name and teacher and not (values.get("distill_effect") or _distilled_name(teacher, kind_of(teacher))):
        yield f"{name}: distilled, which learning the answers of {teacher} undoes; set distill_effect = true"
    if not name or values.get("base_weights") or teacher:
        return
    how = "distilled" if kind.arguments["is_distilled"] or not kind.is_here else "by its name distilled"
    base = f"train {known.train_on}" if known and known.train_on else "train its base"
    if known and known.adapter:
        base = f'set base_weights = ["{known.adapter.rpartition("/")[0]}"], which is downloaded, or {base}'
    adapter = f"or make a training adapter of it: tools/make_training_adapter.py --{MODEL} {model}"
    yield f"{name}: {how}; {base} and use the LoRA on {name}, {adapter}"


def _published(model: str, kind: Kind) -> PublishedModel | None:
    """Return the row of a model, unless it has the name of one that it is not."""
    known = find_published(model)
    return known if known and (not kind.is_here or {*known.model_types} & {*kind.possible}) else None


def _distilled_name(model: str, kind: Kind) -> str:
    """Return how a distilled model is called; "" of others."""
    known = _published(model, kind)
    return known.name if known and known.train_on else Path(model).name * bool(kind.arguments["is_distilled"])


def _looks(name: str) -> tuple[object, ...]:
    """Return what headers tell of a ``model_type``."""
    row = MODEL_TYPES[name]
    return row.transformer, row.conditioning == "fill", row.title == "FLUX.2" and row.takes_guidance


def _allows(arguments: Mapping[str, Any], name: str) -> bool:
    """Return whether a transformer of such ``arguments`` may be of a ``model_type``."""
    is_dev = arguments.get("_class_name") == MODEL_TYPES["flux2_dev"].transformer and bool(arguments["guidance_embeds"])
    return _looks(name) == (arguments.get("_class_name"), arguments.get("in_channels") == _FILL_CHANNELS, is_dev)


def _index(path: Path) -> dict[str, Any]:
    root = pipeline_of(snapshot_of(path))
    return read_json(index) if root and (index := pipeline_index(root)) else {}


def _arguments(path: Path) -> dict[str, Any]:
    """Return the settings of a transformer, or what the header of its file tells of them; empty: none of ours."""
    if path.is_dir():
        root = snapshot_of(path)
        file = next((f for f in (root / "transformer/config.json", root / "config.json") if f.is_file()), None)
        return {"guidance_embeds": False} | read_json(file) if file else {}
    shapes = _shapes(path)
    prefix, row = recognise_below(shapes)
    facts = {label: shapes[prefix + tensor] for label, tensor, _ in row.facts if prefix + tensor in shapes}
    if not row.model_type:
        return {}
    return {
        "_class_name": MODEL_TYPES[row.model_type].transformer,
        "in_channels": (facts.get("width") or [0])[-1],
        "guidance_embeds": "guidance" in facts,
        "flow_map": "distilled" in facts,
        "zero_cond_t": "Edit-2511" in facts,
    }


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return tensor -> shape of a safetensors or GGUF file; what cannot be read is said by who reads it."""
    damaged = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with suppress(OSError, *damaged), path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            header = read_gguf_header(path, file, may_be_cut=True)[0]
        else:
            file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size <= _MOST_HEADER else {}
        return {name: [*entry["shape"]] for name, entry in header.items() if name != "__metadata__"}
    return {}
