"""One changed option of a TOML text, by what a person typed for it: all other lines stay as they are.

A form has a control for each option (``library.web.new_run``): :func:`option` says of which kind, :func:`shown` what
it holds for a value, :func:`edited` returns the text with the value that its content means, :func:`lacks` says without
what the option has no effect. tomlkit, which keeps comments and order, is needed here alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_origin

import tomlkit
from pydantic.fields import FieldInfo

from library.config.load import RawConfig, read_keys
from library.config.markers import OnlyWith, listed, words_of
from library.config.model_types import LANGUAGE_MODELS, MODEL_FILE_KEYS, MODEL_TYPES
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields
from library.errors import UserError
from library.files import toml_string

NAME = "configuration"  # what messages call the text
_FILES = (".txt", ".toml", ".json")  # where an option takes a list or a file of it, a line that ends so is the file

_PLAIN = {  # what people call those that a first LoRA needs
    "pretrained_model_name_or_path": "Base model",
    "model_type": "Kind of model",
    "dataset_config": "Dataset",
    "network_type": "Adapter",
    "network_dim": "Rank",
    "learning_rate": "Learning rate",
    "max_train_steps": "Steps",
    "optimizer_type": "Optimizer",
    "output_name": "Name",
    "output_dir": "Where it is written",
    "sample_prompts": "Sample prompts",
}


def kinds_of(field: FieldInfo) -> set[str]:
    """Return which of bool, int, float and list an option's values may be, and None where it may be unset."""
    return set(re.findall(r"\b(?:bool|int|float|list|None|NoneType)\b", str(field.annotation)))


def option(key: str, field: FieldInfo) -> dict[str, Any]:
    """Return what a form shows of an option: name, help, default, the words it takes, and its kind of control.

    A kind is checkbox, switch (of three states), select, list, number, path or text; it follows from the type.
    """
    types, words, about = kinds_of(field), words_of(field.annotation), field.description or ""
    is_path = key in MODEL_FILE_KEYS or (re.search(r"\b(folder|file|TOML)\b", about) and key != "output_name")
    kind = "path" if is_path else "number" if types & {"int", "float"} else "text"
    if "list" in types or "bool" in types:
        kind = "list" if "list" in types else "select" if words else "switch" if len(types) > 1 else "checkbox"
        words = (*words, "true", "false") if words else words
    elif words:
        kind, words = "select", tuple(MODEL_TYPES) if key == "model_type" else words  # the schema follows from it
    default = "required" if field.is_required() else shown(field.get_default()) or ""
    words = words or ("true", "false")
    return {"key": key, "called": _PLAIN.get(key), "kind": kind, "about": about, "default": default, "words": words}


def read(text: str, pretrains: bool) -> tuple[Script[Any], RawConfig]:
    """Return the script that a text is for, and its keys; raises a UserError if it is no TOML."""
    script: Script[Any] = LLM if pretrains else LORA
    if not pretrains and read_keys(text, NAME, LORA).values.get("model_type") in LANGUAGE_MODELS:
        script = LANGUAGE_LORA
    return script, read_keys(text, NAME, script)


def lacks(key: str, given: Mapping[str, Any], script: Script[Any]) -> str:
    """Return the options, as they must be, without which ``key`` has no effect and which are not ``given`` so."""
    known = fields(script)
    markers = [one for one in known[key][1].metadata if isinstance(one, OnlyWith)]
    needed = {k: known[k][1] for one in markers for k in one.needs if k in known}
    values = {k: None if f.is_required() else f.get_default() for k, f in needed.items()} | dict(given)
    types = tuple(name for name, row in MODEL_TYPES.items() if key in row.keys)
    if types and given.get("model_type", types[0]) not in types:
        return f"model_type = {listed(types)}"
    return ", ".join(str(one) for one in markers if one.unmet(values)).replace("`", "")


def edited(text: str, key: str, content: str, script: Script[Any]) -> str:
    """Return the text with one key set to what its control holds; comments, order and all other lines stay.

    Raises:
        UserError: the text is no TOML, or has the key in a way that cannot be changed without touching others.
    """
    section, field = fields(script).get(key, ("", None))
    value, kept = _value(content, field) if field else None, read_keys(text, NAME, script).values
    # a learning rate counts even where it is the default: without it optimizers that find their own take 1.0
    if field and value is not None and not field.is_required() and key != "learning_rate":
        read, default = value.unwrap(), field.get_default()
        value = None if read == default and isinstance(read, bool) is isinstance(default, bool) else value
    changed, now = text, dict[str, Any]()
    with suppress(Exception):  # a heading that is a value ...: refused below
        document = tomlkit.parse(text)
        _put(document, section, key, value)
        changed = tomlkit.dumps(document)
        now = read_keys(changed, NAME, script).values
    kept.pop(key, None)
    if (now.pop(key, None) is None) is not (value is None) or now != kept:
        raise UserError(f"{key}: stands in the text in a way that the form cannot change; change it there")
    return changed


def shown(value: Any) -> str | None:
    """Return a value as its control shows it; None if none can: a text or an item of several lines, or a table."""
    if isinstance(value, list):
        items = [shown(item) for item in value]
        fit = all(item and item.strip() == item and "\n" not in item for item in items)
        return ("\n".join(map(str, items)) or "[]") if fit else None
    if isinstance(value, dict) or "\n" in str(value):
        return None
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "" if value is None else text or '""'


def _value(text: str, field: FieldInfo) -> Any:
    """Return a control's content as a value of TOML; None where it is empty."""
    types, lines = kinds_of(field), [line.strip() for line in text.split("\n") if line.strip()]

    def scalar(line: str) -> Any:  # what fits no number is a text, which the trainer refuses in its own words
        with suppress(ValueError):
            value = tomlkit.value(line)
            if isinstance(value.unwrap(), bool | int | float) and types & {"bool", "int", "float"}:
                return value
        return tomlkit.value('""' if line == '""' else toml_string(line))

    is_file = get_origin(field.annotation) is not list and len(lines) == 1 and lines[0].lower().endswith(_FILES)
    if not lines or "list" not in types or is_file:
        return scalar(lines[0]) if lines else None
    items = [scalar(f"{line}.0" if line.isdecimal() and "float" in types else line) for line in lines if line != "[]"]
    written = [item.as_string() for item in items]
    is_long = sum(map(len, written)) > 100
    return tomlkit.value("[\n  " + ",\n  ".join(written) + ",\n]" if is_long else f"[{', '.join(written)}]")


def _put(document: tomlkit.TOMLDocument, section: str, key: str, value: Any) -> None:
    """Set a key where it stands, else at the end of its section; None removes it."""
    tables: list[Any] = [document, *(table for table in document.values() if isinstance(table, dict))]
    table = next((table for table in tables if key in table), None)
    if table is not None and value is None:
        table.remove(key)
    elif table is not None:
        table[key] = value
    elif value is not None:
        table = document.setdefault(section, tomlkit.table())
        body = table.value.body
        end = 1 + max((at for at, (name, _) in enumerate(body) if name), default=-1)
        following, body[end:] = body[end:], []  # comments at the end of a section are said of the next
        table[key] = value
        body.extend(following)
