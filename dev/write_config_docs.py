"""Write what follows from the config schema: the JSON schema for editors, the options page and that of kohya's flags.

    python dev/write_config_docs.py            # or make docs

Editors with a TOML language server (VS Code's Even Better TOML, JetBrains) complete and check keys of a file whose
first line is ``#:schema train_lora.schema.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from library.config.family_defaults import FAMILY, KIND
from library.config.kohya.flags import DEFAULTS, FLAGS, NEVER_LEFT_OUT, Flag
from library.config.layout_rules import LAYOUTS, LORA_MATRIX, PRETRAIN_MATRIX, Row
from library.config.markers import MustMatch, OnlyWith, listed
from library.config.model_types import MODEL_TYPES, Tool, kohya_trainers
from library.config.published_models import CARDS, MODEL, Fit, fit, link, published_models
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Fields, Script, fields, section_fields, sections
from library.files import write_text

KOHYA_PAGE = ROOT / "docs/kohya_flags.md"
_KOHYA_TABLES = "## Defaults of unset keys"  # the heading of the first table


def json_schema(script: Script = LORA) -> str:
    """Return the JSON schema: every key allowed at the top level and under its section's heading."""
    properties: dict[str, Any] = {}
    for name, section in sections(script).items():
        own = section_fields(script, section)
        keys = {key: value for key, value in section.model_json_schema()["properties"].items() if key in own}
        for key in keys.values():
            key.pop("title", None)
            if key.get("default") in (FAMILY, KIND):  # no value that a key may have
                del key["default"]
        description = (section.__doc__ or "").strip().split("\n")[0]
        properties[name] = {"type": "object", "description": description, "properties": keys}
        properties[name]["additionalProperties"] = False
        properties |= keys
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": f"Tandem: {script.name}"}
    schema |= {"type": "object", "properties": properties}
    return json.dumps(schema, indent=1) + "\n"


def options_page(script: Script = LORA) -> str:
    """Return the Markdown page of all options, a table a section."""
    lines = [
        f"# Options of {script.name}{' on a language model' if script is LANGUAGE_LORA else ''}",
        "",
        "Every option is a key of the training TOML and a flag of the same name (`--learning_rate 1e-3`); flags win.",
        "Table headings are for the reader: a key may stand under any heading or none. `make docs` writes this page.",
        "Where no default stands, an option is unset. The last column says what an option has no effect without, and ⟳",
        "that a resumed state must have been trained with the same value.",
    ]
    known = fields(script)
    for name, section in sections(script).items():
        lines += ["", f"## {name}", "", (section.__doc__ or "").strip().split("\n")[0], ""]
        lines += ["| key | type | default | what it does | goes with |", "|---|---|---|---|---|"]
        keys = section.model_json_schema()["properties"]
        for key, field in section_fields(script, section).items():
            value = field.get_default()
            default = "required" if field.is_required() else "" if value is None else f"`{json.dumps(value)}`"
            default = value if value in (FAMILY, KIND) else default
            lines.append(
                f"| `{key}` | {_type(keys[key])} | {default} | {field.description} | {_goes_with(key, field, known)} |"
            )
    matrix = PRETRAIN_MATRIX if script is LLM else LORA_MATRIX
    return "\n".join([*lines, *_matrix([row for row in matrix if row.key in known], known)]) + "\n"


def _goes_with(key: str, field: FieldInfo, known: Fields) -> str:
    """Return which of the ``known`` options one has no effect without, and whether a resume must match it."""
    types = [name for name, row in MODEL_TYPES.items() if key in row.keys]
    needs = [f"`model_type` = {listed(tuple(types))}"] if types else []
    markers = (marker for marker in field.metadata if isinstance(marker, OnlyWith))
    needs += [str(one) for one in markers if not all(k in known and known[k][1].is_required() for k in one.needs)]
    return "; ".join(needs) + (" ⟳" if any(isinstance(marker, MustMatch) for marker in field.metadata) else "")


MATRIX_INTRODUCTION = """
## What excludes each other

An option of the first column beside a layout (or choice) of the first row is refused before anything is loaded; the
number says why and what to do, *it* being that layout.
"""


def _matrix(rows: Sequence[Row], known: Collection[str]) -> list[str]:
    """Return the matrix of options and layouts, and the reasons by number below it."""
    layouts = [name for name in LAYOUTS if name.split(" ")[0] in known and any(name in row.why for row in rows)]
    reasons = list(dict.fromkeys(row.why[layout] for row in rows for layout in layouts if layout in row.why))
    lines = [MATRIX_INTRODUCTION, f"| | {' | '.join(f'`{layout}`' for layout in layouts)} |"]
    lines.append("|---|" + "---|" * len(layouts))
    for row in rows:
        cells = (str(reasons.index(row.why[layout]) + 1) if layout in row.why else "" for layout in layouts)
        lines.append(f"| `{row.key}`{' ' * bool(row.words)}{row.words} | {' | '.join(cells)} |")
    return [*lines, "", *(f"{i}. {_in_general(reason)}" for i, reason in enumerate(reasons, 1))]


def _in_general(reason: str) -> str:
    """Return a reason with its options named instead of filled in."""
    return reason.replace("{layout}", "*it*").replace("{", "`").replace("}", "`")


def _type(schema: dict[str, Any]) -> str:
    """Return a short name for a property's type."""
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(part) for part in schema["anyOf"] if part.get("type") != "null"))
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    return {"string": "text", "boolean": "true/false"}.get(schema["type"], schema["type"])


def kohya_page() -> str:
    """Return the Markdown page of every flag of kohya's trainers and its fate; its introduction is written by hand."""
    introduction, _, _ = KOHYA_PAGE.read_text(encoding="utf-8").partition(_KOHYA_TABLES)
    lines = [introduction + _KOHYA_TABLES, "", "| key | sd-scripts | musubi-tuner | Tandem |", "|---|---|---|---|"]
    known = fields()
    for key in dict.fromkeys(key for defaults in DEFAULTS.values() for key in defaults):
        theirs = [DEFAULTS[tool].get(key, "") for tool in DEFAULTS]
        if key in known and any(value not in ("", known[key][1].default) for value in theirs):
            lines.append(f"| `{key}` | {theirs[0]} | {theirs[1]} | {known[key][1].default} |")
    lines += ["", "## Keys that do nothing without another", "", "| key | counts only with |", "|---|---|"]
    for key, (_, field) in known.items():
        needs = [str(marker) for marker in field.metadata if isinstance(marker, OnlyWith)]
        if key in FLAGS and key not in NEVER_LEFT_OUT and needs:
            lines.append(f"| `{key}` | {'; '.join(needs)} |")
    for tool in get_args(Tool):
        scripts = [script for script, its_tool in kohya_trainers().items() if its_tool == tool]
        lines += _flag_table(tool, ", ".join(scripts))
    return "\n".join(lines) + "\n"


def _flag_table(tool: Tool, scripts: str) -> list[str]:
    lines = ["", f"## {tool}: {scripts}", "", "| flag | fate | more |", "|---|---|---|"]
    flags = sorted((flag for flag in FLAGS.values() if tool in flag.tools), key=lambda flag: flag.name)
    return lines + [f"| `{flag.name}` | {' | '.join(_fate(flag))} |" for flag in flags]


def _fate(flag: Flag) -> tuple[str, str]:
    """Return the fate of a flag under today's schema, and the rest in words."""
    known = fields()
    if flag.name in known:
        return "same", flag.why if flag.fate == "same" else ""
    target = next((name for name in flag.to if name in known), None)
    if flag.fate == "renamed" and target:
        return f"renamed `{target}`", flag.why
    if flag.fate == "accepted":
        others = f"; else refused: {flag.instead}" if flag.only else ""
        return "accepted", (f"{', '.join(f'`{v}`' for v in flag.only)}: " if flag.only else "") + flag.why + others
    if flag.fate in ("dataset", "noted"):
        return flag.fate, flag.why
    return "refused", "; ".join(filter(None, (flag.why, flag.instead)))


MODELS_INTRODUCTION = """# Models

A configuration begins with a model: set `pretrained_model_name_or_path` to its name on the Hugging Face hub, which is
then downloaded, or to a single file with its parts beside it. `model_type` follows from the model; of several kinds the
edit model is trained if the dataset has `control_directory`. `make docs` writes this page from
`library/config/models.toml`, which names its sources.

A column for a card names the ready configuration that fits at 1024 x 1024 and batch size 1, samples included, and the
flags beside it; set the model in it. Of a distilled model, train the base and use the LoRA on the distilled one, which
`sample_model` shows. A gated model's licence is accepted on its page; then log in with `hf auth login`.
"""


def models_page() -> str:
    """Return the Markdown page of the published models: configurations by card, and where the files are."""
    heads = ["model", "`model_type`", *(f"{card} GB" for card in CARDS), "download", "licence", "single files"]
    lines = [MODELS_INTRODUCTION, f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in published_models():
        files = (f"[{key.replace(MODEL, 'transformer')}]({link(place)})" for key, place in row.files.items())
        size = f"{row.gigabytes:g} GB" if row.gigabytes else ""
        facts = [size, row.licence + ", gated" * bool(row.gated), ", ".join(files)]
        for kind in row.model_types:
            cells = [_settings(fit(kind, row.size, card)) for card in CARDS]
            if row.train_on:
                adapter = row.adapter.rpartition("/")[0]
                adapter = f', or set `base_weights = ["{adapter}"]` ([the adapter]({link(adapter)}))' if adapter else ""
                cells = [f"distilled: train {row.train_on}{adapter}", *[""] * (len(CARDS) - 1)]
            lines.append(f"| {' | '.join([f'[{row.label}]({link(row.hub)})', f'`{kind}`', *cells, *facts])} |")
    return "\n".join(lines) + "\n"


def _settings(chosen: Fit | None) -> str:
    if chosen is None:
        return "none"
    name, _, flags = chosen.count.partition(" ")
    return f"[{Path(name).stem}](../{name})" + f" `{flags}`" * bool(flags)


def main() -> None:
    """Write the generated files."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    pages = {ROOT / "configs/train_lora.schema.json": json_schema(), ROOT / "docs/options.md": options_page()}
    pages |= {
        ROOT / "configs/llm/train_llm.schema.json": json_schema(LLM),
        ROOT / "docs/llm_options.md": options_page(LLM),
        ROOT / "configs/llm/train_lora.schema.json": json_schema(LANGUAGE_LORA),
        ROOT / "docs/llm_lora_options.md": options_page(LANGUAGE_LORA),
        KOHYA_PAGE: kohya_page(),
        ROOT / "docs/models.md": models_page(),
    }
    for path, text in pages.items():
        write_text(path, text)


if __name__ == "__main__":
    main()
