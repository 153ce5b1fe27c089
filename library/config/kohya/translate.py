"""kohya's configurations, read as what they mean.

The keys of a training TOML or command line go in; keys of the schema come out, with a note on every key that
did not pass as it is. Any single key of kohya's is understood anywhere (``--cache_latents`` does no harm in a
Tandem configuration). But a configuration that sets ``network_module`` is one of sd-scripts' or musubi-tuner's,
which cannot start without it, and is read as a whole the way they read it:

- a key that it leaves out has their default, not ours, where training depends on it (``DEFAULTS``);
- a key that has no effect under the chosen settings (``OnlyWith`` in the schema) is left out, where a Tandem
  configuration would be refused;
- an empty text is no text.

What is refused is collected, a line each: which key, where it stands, why it is not taken, what replaces it.
Single flags and values are settled by the tables in ``library.config.kohya.flags``; what a key means that depends on
others by ``library.config.kohya.matters``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from library.config.kohya.flags import DEFAULTS, FLAGS, NEVER_LEFT_OUT, REFUSED_VALUES, SAME_AS, Flag
from library.config.kohya.matters import QWEN_IMAGE, RULES
from library.config.kohya.translation import Known, Note, Translation, choices, is_off
from library.config.markers import OnlyWith, is_nothing
from library.config.model_types import MODEL_TYPES, Tool, kohya_model_type
from library.config.optimizer_types import estimates_step_size


def find_tool(values: Mapping[str, Any]) -> Tool | None:
    """Return whose configuration this is: that of the trainer whose network module it names, or None."""
    module = values.get("network_module")
    if module is None and "dit" not in values:
        return None
    model_type = kohya_model_type(str(module))
    musubi = "dit" in values or (model_type and MODEL_TYPES[model_type].kohya_tool == "musubi-tuner")
    return "musubi-tuner" if musubi else "sd-scripts"


def translate(
    values: Mapping[str, Any], origins: Mapping[str, str], known: Known, tool: Tool | None = None
) -> Translation:
    """Return the configuration in the schema's keys.

    Args:
        values: keys of the schema and of kohya's trainers; from a command line all values are text.
        origins: where each key stands, "run.toml:3: network_dim" or "--network_dim".
        known: the schema.
        tool: whose configuration it is; found out if not given.
    """
    result = Translation(dict(values), dict(origins), tool or find_tool(values))
    module = str(result.values.get("network_module", QWEN_IMAGE))
    if result.tool and (model_type := kohya_model_type(module, result.tool)):
        result.values.setdefault("model_type", model_type)
    for key, value in list(result.values.items()) if result.tool else ():
        if value in ("", None, "None") and key != "optimizer_type":
            result.leave_out(key, "empty, so not set", "accepted")
    for key, same in SAME_AS.items():
        if (value := str(result.values.get(key))) in same:
            result.values[key] = same[value]
            result.note(key, "changed", f"{value} is {same[value]} here")
    for rule in RULES:
        rule(result, known)
    for key in [key for key in result.values if key not in known]:
        _apply_flag(result, FLAGS[key], known)
    _refuse_values(result, known)
    if result.tool:
        _fill_in_defaults(result, known, result.tool)
        drop_inert(result, known, [key for key in result.values if key in FLAGS and key not in NEVER_LEFT_OUT])
        _note_differences(result, known)
    return result


def summary(notes: Sequence[Note]) -> list[str]:
    """Return the notes a person should see when a run starts: all but what is accepted."""
    return [f"note: {note.line()}" for note in notes if note.outcome not in ("same", "accepted")]


def _apply_flag(result: Translation, flag: Flag, known: Known) -> None:
    """Give a key that the schema does not have its fate."""
    value = result.take(flag.name)
    asks_for_nothing = is_off(value, flag.off)
    if flag.fate == "accepted" and (not flag.only or value in flag.only):
        result.note(flag.name, "accepted", flag.why)
    elif flag.fate == "renamed" and (key := next((name for name in flag.to if name in known), None)):
        if key in result.values:
            result.note(flag.name, "left out", f"{key} is set too and counts")
        else:
            result.rename(flag.name, key, value, f"becomes {key}" + (f"; {flag.why}" if flag.why else ""))
    elif asks_for_nothing:
        result.note(flag.name, "accepted", "asks for nothing")
    elif flag.fate == "noted":
        result.note(flag.name, "note", f"has no effect here: {flag.why}")
    elif flag.fate == "dataset":
        result.dataset[flag.name] = value
        text = "describes the images, which nothing names; set dataset_config or train_data_dir"
        result.note(flag.name, "dataset", f"not taken: {text}")
    elif flag.fate == "accepted":
        result.note(flag.name, "refused", f"not taken: {value!r} is not in this version; {flag.instead}")
    else:
        reason = f"{flag.why}; " if flag.why else ""
        result.note(flag.name, "refused", f"not taken: {reason}{flag.instead}")


def _refuse_values(result: Translation, known: Known) -> None:
    for key, refused in REFUSED_VALUES.items():
        if (value := str(result.values.get(key))) in refused and value not in choices(known, key):
            result.take(key)
            result.note(key, "refused", f"not taken: {value!r} is not in this version; {refused[value]}")


def _fill_in_defaults(result: Translation, known: Known, tool: Tool) -> None:
    computed = any(a.replace(" ", "") == "relative_step=True" for a in result.values.get("optimizer_args", []))
    estimated = estimates_step_size(str(result.values.get("optimizer_type", "")))
    refused = {note.key for note in result.notes if note.outcome == "refused"}
    for key, value in DEFAULTS[tool].items():
        if key not in known or key in result.values or key in refused or known[key][1].default == value:
            continue
        if key == "learning_rate" and (computed or estimated):
            continue  # nobody means 2e-6 as the factor of an estimated step
        result.default(key, value, key, f"unset, so {value!r}, the default of {tool}")


def drop_inert(result: Translation, known: Known, keys: Sequence[str]) -> None:
    """Leave out what of ``keys`` has no effect under the other settings."""
    values = {key: field.get_default() for key, (_, field) in known.items()} | result.values
    defaults = {note.key for note in result.notes if note.outcome == "default"}
    for key in [key for key in keys if key in known]:
        markers = (marker for marker in known[key][1].metadata if isinstance(marker, OnlyWith))
        inert = next((marker for marker in markers if marker.unmet(values)), None)
        if inert is None:
            continue
        idle = is_nothing(values[key]) or str(values[key]) == str(known[key][1].get_default())
        lost = inert.overridden or not idle
        result.leave_out(key, f"has no effect {inert.reason(values)}", "left out" if lost else "accepted")
        if key in defaults:
            result.notes[:] = [note for note in result.notes if note.key != key]


def _note_differences(result: Translation, known: Known) -> None:
    """Note what is different and cannot be set."""
    noted = {note.key for note in result.notes}
    if "seed" not in result.values:
        result.note("seed", "note", f"unset, so random in {result.tool} and {known['seed'][1].default} here")
    if result.tool == "sd-scripts":
        if "model_prediction_type" not in noted:
            result.note("model_prediction_type", "note", "unset, so sigma_scaled in sd-scripts; here it is always raw")
        return
    text = "modulation is left out, as musubi-tuner means to and does not; img_mod_dim and txt_mod_dim train it"
    row = MODEL_TYPES.get(str(result.values.get("model_type")))
    if row and row.kohya_module == QWEN_IMAGE:
        result.note("network_args", "note", text)
    if "mixed_precision" not in result.values:
        text = "unset, so that of accelerate launch in musubi-tuner; here it is no"
        result.default("mixed_precision", "no", "mixed_precision", text)
