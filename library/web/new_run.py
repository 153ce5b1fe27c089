"""A new run: a form made from the schema beside the configuration that it writes, what it will take, and the start.

The text is the configuration; the form only shows it. A changed field goes to the server with the text, which comes
back with that one line changed (``library.config.edit``), what its keys are now, and what the trainer would say of it
(:func:`examine`). Nothing is stored before the start, so any number of tabs may be open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from library.config import published_models as hub
from library.config.edit import NAME, edited, lacks, option, read, shown
from library.config.family_defaults import FAMILY, preset_group, presets, settled, tables
from library.config.kinds import hub_instead_of_missing, kind_of
from library.config.kohya.command import paths_read
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from library.config.load import RawConfig, checked, read_keys, toml_path
from library.config.markers import split_pairs
from library.config.model_layouts import INDEXES, pipeline_index
from library.config.model_types import MODEL_FILE_KEYS, MODEL_TYPES
from library.config.optimizer_types import OPTIMIZERS
from library.config.programs.translate import files_read
from library.config.published_models import MODEL
from library.config.rules import is_of_lokr
from library.config.scripts import LLM, LORA, Script, fields, section_fields, sections, synonyms
from library.errors import UserError
from library.files import decoded, find_program, parse_json, read_text, read_toml
from library.models.hub import index_on_hub, takes_parts
from library.training.report.run_folder import (
    cached_by_mtime,
    checkpoints_of,
    defaults_of,
    find_runs,
    free_name,
    is_run,
    mtime,
    output_name,
    script_of,
    settings_of,
    states_of,
    text_of,
)
from library.training.sampling.prompts import read_prompts
from library.web.cards import cards
from library.web.data import datasets, refuse_outside
from library.web.jobs import ROOT, Job
from library.web.loras import weights_in
from library.web.run import run_status
from library.web.site import Form, Routes, Site, goto, tell_changed, url
from library.web.trainable import reason_against

Values = dict[str, Any]  # option -> value
Command = tuple[list[str], dict[str, str]]  # words of a job, and its files
# What a first LoRA needs; all else stands under "All options". Of these a schema has some.
_BASICS = {
    "Model": "model_type pretrained_model_name_or_path ae clip_l t5xxl vae text_encoder tokenizer preset init_from",
    "What it learns from": "dataset_config trigger_word train_data data_dir train_batch_size",
    "Training": "network_type network_dim network_alpha learning_rate optimizer_type max_train_steps max_train_epochs",
    "What is written": "output_dir output_name save_every_n_steps sample_prompts sample_every_n_steps",
    "Memory": "mixed_precision memory gradient_checkpointing fp8_scaled fp8_text_encoder blocks_to_swap",
}
_OWN = ("output_name", "output_dir", "dataset_config")  # of a ready configuration, of no other run
_TITLES = {"memory": "Memory count", "dataset": "Look at a dataset", "suggest": "Suggested settings"}
_NAMED = (".safetensors", ".toml", ".txt", ".json", ".jsonl", ".gguf")  # files that options name
_MOST_TEXT, _MOST_BRACKETS = 2**16, 2000  # of a configuration; nested lists take a hundred times their length to read
_PATHS = ("pretrained_model_name_or_path", *MODEL_FILE_KEYS, "dataset_config")
_MADE = ("output_dir", "cache_directory", "distill_cache", "save_fallback_dir", "logging_dir")  # may not be there yet
_LINE = re.compile(rf"(?:{NAME}:\d+: )?([\w-]+): (.*?)(?:; fill it in)?$")  # what is said of a key
_OF_A_RUN = (*_PATHS, "dataset_args", "output_dir", "output_name")  # which a suggestion leaves as the form has them


def form_of(script: Script[Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return the basics, then the sections with all other options: title, sentence (none of the basics), options."""
    controls = {key: option(key, field) for key, (_, field) in fields(script).items()}
    for key, control in controls.items():
        control["also"] = " ".join(word for word, keys in synonyms().items() if key in keys)
    groups = [(title, "", [controls.pop(k) for k in keys.split() if k in controls]) for title, keys in _BASICS.items()]
    for name, section in sections(script).items():
        rest = [controls[key] for key in section_fields(script, section) if key in controls]
        groups.append((name, (section.__doc__ or "").strip().split("\n")[0], rest))
    return [group for group in groups if group[2]]


def examine(site: Site, text: str, pretrains: bool) -> dict[str, Any]:
    """Return what the form shows of a text: its keys, and all that stands against it."""
    try:
        script, given = read(text, pretrains)
    except UserError as error:
        return {"text": text, "errors": {}, "problems": [{"line": str(error), "changes": {}}], "values": None}
    values, known, errors, problems = given.values, fields(script), dict[str, str](), []
    lines, notes, full = _against(site, script, given, is_new=True)
    typed = values | {key: full[key] for key in ("model_type",) if key in full}
    kind = {key: f"as the model says: {typed[key]}" for key in ("model_type",) if key in typed and key not in values}
    for line in lines:
        key, message = found.groups() if (found := _LINE.match(line)) else ("", line)
        instead = hub_instead_of_missing(values) if key == MODEL else {}
        named = message.partition(", such as ")[2] if key in ("output_dir", "output_name") else ""
        content = named or instead.get(key, "")
        stands = content or (key and (key in values or line.startswith(NAME)))
        problems.append(
            {
                "line": line,
                "key": key,
                "changes": {key: content, **_renamed(content, values), **instead} if stands else {},
                "offers": f"Use {content} of the hub" if instead else f"Take {content}" if content else "Remove",
            }
        )
        errors[key] = f"{errors.get(key, '')}\n{message}".strip()
    return {
        "text": text,
        "training": script.training,
        "problems": problems,
        "errors": errors,
        "notes": notes,
        "values": {key: shown(values[key]) if key in values else "" for key in known},
        "defaults": _of_family(typed, script) | _named(values) | kind,
        "unmet": {key: f"goes with {others}" for key in known if (others := lacks(key, typed, script))},
    }


def _of_family(values: Values, script: Script[Any]) -> dict[str, str]:
    """Return what the options that are the family's to say are for the chosen model, where they are unset."""
    name, found = str(values.get("model_type")), dict[str, Any]()
    known = name if name in tables()["presets"] else "flux"
    group = preset_group(known, values.get("train_on"), values.get("network_type"))
    for section in sections(script).values():
        given: Values = {key: str(values[key]) for key in section_fields(script, section) if key in values}
        found |= settled(section.model_construct(**given), group)
    told = {key: f"{FAMILY}: {shown(value)}" for key, value in found.items()}
    is_full = values.get("network_type") == "lokr" and "full_matrix=True" in (values.get("network_args") or ())
    return told | (dict.fromkeys(("network_dim", "network_alpha"), "full matrices have none") if is_full else {})


def _named(given: Values) -> dict[str, str]:
    """Return the output_name of a run that is given none: its folder's name."""
    name = Path(str(given.get("output_dir", ""))).name
    return {"output_name": name} if name and "output_name" not in given else {}


def _renamed(folder: str, values: Values) -> Values:
    """Return the name of the file for a folder that a number tells from another: it gets the number too."""
    number = re.search(r"-\d+$", folder)
    return {"output_name": f"{values['output_name']}{number[0]}"} if number and values.get("output_name") else {}


def _with_adapter(values: Values, kind: str, arguments: str | None) -> dict[str, str]:
    """Return option -> content that goes with a chosen kind of adapter; what only the former kind takes is removed.

    Args:
        values: before.
        arguments: of a LoKr; None: the family's. What else ``network_args`` have stays.
    """
    likely, given = kind_of(str(values.get(MODEL))).likely, values.get("network_args")
    kept = [str(pair) for pair in given if not is_of_lokr(str(pair))] if isinstance(given, list) else []
    if kind != "lokr":
        layout = {"save_format": ""} if values.get("network_type") in ("lokr", "loha") else {}
        layout |= {"save_format": "comfy"} if kind == "loha" else {}
        return {"network_args": "\n".join(kept), **layout}
    preset = presets(preset_group(str(values.get("model_type", (*likely, "flux")[0])), network_type=kind))
    arguments = arguments or shown(preset["network_args"][0])
    ranks = {"network_dim": "", "network_alpha": ""}  # of which full matrices have none
    return {**ranks, "network_args": "\n".join([str(arguments), *kept]), "save_format": preset["save_format"][0]}


def _against(site: Site, script: Script[Any], given: RawConfig, is_new: bool) -> tuple[list[str], list[str], Values]:
    """Return what stands against running a configuration, a line each; its notes; and its values."""
    notes, values, lines = list[Note](), dict(given.values), list[str]()
    hidden: Values = {}
    for key in (MODEL, "dataset_config"):
        try:
            site.roots.refuse_paths_outside(values.get(key), key)
        except UserError:
            hidden[key] = values[key]
    read_in = replace(given, values=values | dict.fromkeys(hidden, ""))  # nothing outside is looked into
    try:
        config = checked(read_in, script, notes, index_on_hub)
        values = {key: value for section in config.model_dump().values() for key, value in section.items()}
    except UserError as error:
        lines = re.sub(r"set it in the TOML file or with --\w+", "fill it in", str(error)).splitlines()
        if script is LORA and (likely := kind_of(str(read_in.values.get(MODEL, ""))).likely):
            values.setdefault("model_type", likely[0])
    taken = _against_output(site, values | _named(given.values)) if is_new else []
    lines += [*_refused(site, values | hidden, script), *taken]
    if not lines and script is LORA:
        lines += filter(None, [reason_against(config)])
    return lines, [line.replace(f"note: {NAME}:", "line ") for line in summary(notes)], values


def _refused(site: Site, values: Mapping[str, Any], script: Script[Any]) -> list[str]:
    """Return a line for each option that runs a program, or whose path or dataset lies outside the allowed folders."""
    lines = []
    for key, value in values.items():
        path = Path(value) if key in (*_PATHS, "sample_prompts") and isinstance(value, str) and value else None
        try:
            site.roots.refuse_paths_outside(value, key)
            if key in ("caption_command", "trust_class_paths") and value:
                raise UserError("runs a program, which this page never does; start such a run in a terminal")
            if key in _MADE and value:
                site.roots.find(str(value), output=key == "output_dir")
            # "owner/name", of which there is no folder, is a model of the hub
            said = key == MODEL and script is LORA  # as it was checked
            if path and not said and not path.exists() and (path.suffix in _NAMED or path.parent.is_dir()):
                raise UserError(f"no such file or folder: {value}")
            if path and key == "dataset_config" and path.exists():
                tables = read_toml(path, "check dataset_config")[0] if path.is_file() else {}
                given = split_pairs(values.get("dataset_args") or (), "dataset_args")
                refuse_outside(site, path / "*" if path.is_dir() else path, tables, given)
            if key == "sample_prompts" and value and script is LORA:
                prompts = read_prompts([*map(str, value)] if isinstance(value, list) else str(value), 0, 1)
                for image in (image for prompt in prompts for image in prompt.images()):
                    site.roots.find(image)
        except (UserError, OSError, ValueError) as error:
            lines.append(f"{key}: {re.sub(rf'^{key}[:,] ', '', str(error))}")
    return lines


def _refuse_kohyas(site: Site, text: str, name: str, depth: int = 0) -> None:
    """Refuse another trainer's settings that name what is outside, in what files they name too."""
    program = find_program(text)
    named = (
        [("datasets", file) for file in files_read(program, text, Path(name))] if program else paths_read(text, name)
    )
    for key, value in named:
        site.roots.refuse_paths_outside(value, key)
        path = Path(toml_path(str(value)))
        if key == "dataset_config" and path.is_file():
            refuse_outside(site, path, read_toml(path)[0])
        elif key == "config_file" and path.is_file() and depth < 8:
            _refuse_kohyas(site, read_text(site.roots.find(str(path)), most=_MOST_TEXT), path.name, depth + 1)


def _against_output(site: Site, values: Mapping[str, Any]) -> list[str]:
    """Return a line if output_dir is not free for this run, or output_name for its files; it ends with what is."""
    (taken, named), name, line = _taken(site), str(values.get("output_name")), ""
    with suppress(UserError, KeyError):  # what lies elsewhere is said already
        path = site.roots.find(str(values["output_dir"]), output=True)
        if path in site.roots.outputs:
            path /= Path(str(values.get("output_name") or "lora")).name
            line = "it holds all runs; give this one a folder of its own"
        elif path in taken:
            line = "a running or waiting run uses this folder; choose another"
        elif is_run(path) and not (values.get("overwrite") or values.get("resume")):
            line = "it holds another run; set resume or overwrite, or choose another"
        if line:
            return [f"output_dir: {line}, such as {site.roots.show(free_name(path, taken))}"]
        names = {one: run for one, run in named if run != path}
        if name in names:
            free = next(each for n in count(2) if (each := f"{name}-{n}") not in names)
            where = site.roots.show(names[name])
            return [f"output_name: the run in {where} has files of this name; choose another, such as {free}"]
    return []


def _taken(site: Site) -> tuple[list[Path], list[tuple[str, Path]]]:
    """Return the folders of runs that wait or run; and the names of all runs' files, with each one's folder."""
    waiting = {Path(job.output): job.folder for job in site.jobs.all() if job.output and not job.is_over}
    folders = {run: run for place in site.roots.outputs for run in find_runs(place)} | waiting
    return list(waiting), [(output_name(at), run) for run, at in folders.items()]


def ready(site: Site) -> list[tuple[str, str]]:
    """Return the configurations in folders called configs that say what they are for: path and title."""
    found = []
    for path in (path for at in site.roots.folders if at.name == "configs" for path in sorted(at.rglob("*.toml"))):
        with suppress(UserError):  # a link may lead out
            if title := re.match(r"#:schema .*\n# ?(.*)", text_of(site.roots.find(str(path))) or ""):
                found.append((site.roots.show(path), title[1].rstrip(".:")))
    return found


# ---- the models to choose from


@cache
def choices() -> list[tuple[hub.PublishedModel, dict[str, dict[int, dict[str, str]]]]]:
    """Return the models that are trained on, each with ``model_type`` -> card -> option -> what a choice sets."""
    found = []
    for model in (row for row in hub.published_models() if row.adapter or not row.train_on):
        kinds = {kind: dict[int, dict[str, str]]() for kind in model.model_types}
        for kind, card in product(kinds, hub.CARDS):
            if chosen := hub.fit(kind, model.size, card):
                values = read_keys(read_text(ROOT / chosen.config), chosen.config, LORA).values
                values |= hub.changes_for(model, kind, chosen)
                values |= {"model_type": kind if kind != model.model_types[0] else ""}  # as the model says
                given = {key: value for key, value in values.items() if key not in _OWN}
                kinds[kind][card] = {key: "" if value == "" else shown(value) or "" for key, value in given.items()}
        found.append((model, kinds))
    return found


def _picker(site: Site, weights: Mapping[str, list[str]], taken: list[Path]) -> dict[str, Any]:
    """Return what the template shows: models and files, each with what goes with any card; and what no choice keeps."""

    def folder(name: str) -> dict[str, str]:  # that no run has
        path = site.roots.outputs[0] / re.sub(r"\W+", "_", name.lower())
        return {"output_dir": site.roots.show(free_name(path, taken))}

    loras = {Path(path).name: path for path in weights["lora"]}
    models = [
        (m, kinds, folder(m.label) | {"base_weights": loras.get(Path(m.adapter).name, "")}) for m, kinds in choices()
    ]
    files = {path: Path(path).expanduser() for path in weights["model"]}
    families = {path: _family_in(pipeline_index(file) or file) for path, file in files.items()}
    own = [(path, title, folder(Path(path).stem) | {MODEL: path}) for path, title in families.items() if title]
    memory = {key for row in tables()["memory"] for key in row["settings"]}
    return {"models": models, "own": own, "forced": [MODEL, "model_type", *MODEL_FILE_KEYS, *sorted(memory)]}


@cached_by_mtime
def _family_in(file: Path) -> str:
    """Return the family of a model of images, a file or the index of a pipeline; "" if it is none."""
    likely = kind_of(str(file.parent if file.name in INDEXES else file)).likely
    return MODEL_TYPES[likely[0]].title if likely else ""


# ---- requests


def show(site: Site, request: Request, form: Form) -> Response:
    """Show the form over an empty text, or over ``?config=``: a TOML, or the folder of a run."""
    text, found, script, configs, notice, query = "", None, LORA, ready(site), "", request.query_params
    taken = [Path(job.output) for job in site.jobs.all()]
    if dataset := query.get("dataset"):
        path = site.roots.find(dataset)
        text = edited("", "dataset_config", site.roots.show(path), LORA)
        folder = free_name(site.roots.outputs[0] / (path.parent.name if path.stem == "dataset" else path.stem), taken)
        text = edited(text, "output_dir", site.roots.show(folder), LORA)
    if config := query.get("config"):
        found = site.roots.find(config)
        file = found if found.is_file() else site.roots.find(str(found / "config.toml"))
        if not file.is_file() and (job := site.jobs.of_output(found)):  # a run that failed before it wrote one
            file = job.folder / "config.toml"
        text = read_text(file, "choose a configuration that is there")
    pretrains = re.search(r"^[ \t]*(data_dir|preset|init_from)[ \t]*=", text, re.MULTILINE) is not None
    changes = dict[str, str]()
    if found and is_run(file.parent):  # a run's states are its own, as its folder and its files' name are
        changes = {"output_dir": site.roots.show(free_name(file.parent, taken)), "output_name": ""}
        changes |= {"resume": "", "overwrite": ""}
        if "on" in query:
            more, notice = _train_on(site, file.parent, *read(text, pretrains))
            changes |= more
    with suppress(UserError):
        script, _ = read(text, pretrains)
        for key, content in changes.items():
            text = edited(text, key, content, script)
    weights, (tomls, _), (runs, named) = weights_in(site), datasets(site), _taken(site)
    paths = [*weights["model"], *weights["language_model"], *(site.roots.show(path) for path, _ in tomls)]
    return site.page(
        request,
        "new_run.html",
        text=text,
        notice=notice,
        notice_kind="",
        pretrains=pretrains,
        groups=form_of(script),
        training=script.training,
        found=found,
        ready=configs,
        optimizers=list(OPTIMIZERS),
        paths=paths + [path for path, _ in configs],
        datasets=[site.roots.show(path) for path, _ in tomls if "configs" not in path.parts],
        **_picker(site, weights, [*runs, *(site.roots.outputs[0] / name for name, _ in named)]),
    )


def _train_on(site: Site, folder: Path, script: Script[Any], given: RawConfig) -> tuple[dict[str, str], str]:
    """Return what has a new run go on where the run in ``folder`` ended, and says so."""
    by_step = [saved.path for saved in checkpoints_of(folder)]  # a kept copy of an early one is newer than the last
    loras = by_step or sorted(folder.glob("*.safetensors"), key=mtime)
    if states := states_of(folder):
        key = "max_train_epochs" if given.values.get("max_train_epochs") else "max_train_steps"
        steps = 2 * int((defaults_of(script) | given.values)[key])
        resume = site.roots.show(folder / states[0][0])
        said = f"Goes on from the last state of {site.roots.show(folder)}, to twice its length ({key} = {steps})."
        return {"resume": resume, key: str(steps)}, said
    if not loras or "network_weights" not in fields(script):
        raise UserError(f"{site.roots.show(folder)}: has no state or LoRA to go on from; begin a new run instead")
    said = "That run has left no state, so this one begins with its LoRA (network_weights), its optimizer anew."
    return {"network_weights": site.roots.show(loras[-1])}, said


def _given(form: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text, and whether it is for pretraining."""
    text = str(form.get("text", "")).replace("\r\n", "\n")
    if len(text) > _MOST_TEXT or max(text.count("["), text.count("{")) > _MOST_BRACKETS:
        raise UserError("configuration: is too long; copy less of it")
    return text, bool(form.get("pretrains"))


def edit(site: Site, request: Request, form: Form) -> Response:
    """Change the text as the form was changed; return what it says now, and the form if another schema has it."""
    text, pretrains = _given(form)
    changes = parse_json(str(form.get("changes", "{}")), "changes")
    changes = changes if isinstance(changes, dict) else {}
    if (kind := changes.get("network_type")) is not None and "save_format" not in changes:  # the list or its buttons
        script, given = read(text, pretrains)
        changes |= _with_adapter(given.values, kind, changes.get("network_args")) if script is LORA else {}
    for key, content in changes.items():
        text = edited(text, key, str(content), read(text, pretrains)[0])
    answer = examine(site, text, pretrains)
    if not form.get("touched"):  # in an empty form nothing is missing yet
        answer |= {"problems": [], "errors": {}}
    parts = {"said": answer, "against": {"touched": form.get("touched"), **answer}}
    if (training := answer.get("training")) and training != form.get("training"):
        parts["fields"] = {"groups": form_of(read(text, pretrains)[0]), "training": training}
    html = {name: bytes(site.part("new_run.html", name, **values).body).decode() for name, values in parts.items()}
    return JSONResponse(answer | html)


def runnable(site: Site, text: str, pretrains: bool, is_new: bool = False) -> tuple[Script[Any], dict[str, Any]]:
    """Return script and values of a configuration; all that is run comes by here. ``is_new``: with a folder of its own.

    Raises:
        UserError: anything is wrong with it, lies outside the allowed folders, or would run another program.
    """
    script, given = read(text, pretrains)
    lines, _, values = _against(site, script, given, is_new)
    if lines:
        raise UserError(*lines)
    return script, values


def start(site: Site, request: Request, form: Form) -> Response:
    """Put the run into the queue, and go to it."""
    (text, pretrains), processes = _given(form), str(form.get("processes") or 1)
    script, given = read(text, pretrains)
    for key, name in _named(given.values).items():
        text = edited(text, key, name, script)
    script, values = runnable(site, text, pretrains, is_new=True)
    if not re.fullmatch(r"[1-9]\d{0,2}", processes):
        raise UserError(f"processes: {processes[:20]!r} is not a number from 1 to 999; give one process for each GPU")
    output = site.roots.find(values["output_dir"], output=True)
    card = str(form.get("gpu", ""))
    if card and card not in [one.index for one in cards(3600)]:
        raise UserError(f"GPU: there is no {card[:20]!r} now; choose another")
    many = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes != "1" else []
    words, files = [*many, str(ROOT / script.name), "--config_file", "{job}/config.toml"], {"config.toml": text}
    site.jobs.add("train", values["output_name"], words, queued=True, output=str(output), card=card, files=files)
    return goto(url("/run", path=output))


def again(site: Site, request: Request, form: Form) -> Response:
    """Queue a run once more, from one of its states, its newest ("auto") or the first step (""), as it was set."""
    folder, state = site.roots.find(str(form.get("path", "")), output=True), str(form.get("state", "auto"))
    job = site.jobs.of_output(folder)
    run, settings = run_status(site, folder, job), settings_of(folder, job.folder if job else None)
    if run.state == "running":  # perhaps in a terminal; a job that waits is refused by the queue
        raise UserError(f"{run.name}: is running already")
    if not settings:
        raise UserError(f"{run.name}: has no configuration that a run wrote; begin a new run instead")
    source = job.folder if job and not settings_of(folder) else folder  # one that failed early has written none
    text = text_of(source / "config.toml") or ""
    script, _ = runnable(site, text, script_of(settings) is LLM)
    resume = state if state in ("auto", "") else str(site.roots.find(str(folder / state), output=True))
    words = [script.name, "--config_file", "{job}/config.toml", "--output_dir", str(folder), "--resume", resume]
    card = job.card if job else ""
    site.jobs.add("train", run.name, words, queued=True, output=str(folder), card=card, files={"config.toml": text})
    return tell_changed()


def side_job(site: Site, request: Request, form: Form) -> Response:
    """Begin what is done beside the form: count memory, look the data over, suggest, or translate kohya's."""
    kind = str(form.get("job"))
    words, files = {"memory": _memory, "dataset": _dataset, "suggest": _suggestion}.get(kind, _migration)(site, form)
    job = site.jobs.add(kind, _TITLES.get(kind, "Another trainer's settings"), words, files=files)
    return show_job(site, request, form, job)


def _memory(site: Site, form: Form) -> Command:
    text, pretrains = _given(form)
    runnable(site, text, pretrains)
    card = [f"--gpu_memory={form['card']}"] if form.get("card") else []
    words = ["tools/plan_memory.py", "{job}/config.toml", "--save_to={job}/result.json", *card]
    return words, {"config.toml": text}


def _values(site: Site, form: Form, needed: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the form's values; raises a UserError where a ``needed`` one is missing, or one may not be read."""
    values = read(*_given(form))[1].values
    lacking = [f"{key}: is needed for this; fill it in" for key in needed if not values.get(key)]
    if lines := lacking or _refused(site, {key: values.get(key) for key in (*needed, *others)}, LORA):
        raise UserError(*lines)
    return values


def _dataset(site: Site, form: Form) -> Command:
    dataset = _values(site, form, ("dataset_config",))["dataset_config"]
    words, (text, pretrains) = ["tools/check_dataset.py", str(site.roots.find(str(dataset)))], _given(form)
    with suppress(UserError):  # of a model that is not filled in, nothing is known
        runnable(site, text, pretrains)
        return [*words, "--config_file", "{job}/config.toml"], {"config.toml": text}
    return words, {}


def _migration(site: Site, form: Form) -> Command:
    dropped, name, text = form.get("kohya"), "command.txt", str(form.get("command", ""))
    if getattr(dropped, "filename", ""):
        name, text = dropped.filename, decoded(dropped.file.read(4 * _MOST_TEXT), dropped.filename)
    source = "kohya" + re.sub(r"[^.\w]", "", Path(name).suffix)[:5]
    _refuse_kohyas(site, _given({"text": text})[0], source)
    folder = free_name(site.roots.outputs[0] / (re.sub(r"\W", "_", Path(name).stem)[:60] or "kohya"))
    words = ["tools/migrate_config.py", f"{{job}}/{source}", "--save_to", f"{site.roots.show(folder)}/config.toml"]
    return words, {source: text}


def _trigger_of(dataset: Path) -> str:
    """Return the first trigger word that a dataset's TOML sets; "" if none does."""
    tables = read_toml(dataset)[0] if dataset.is_file() else {}
    parts = [part for part in tables.get("datasets", []) if isinstance(part, dict)]
    levels = [tables.get("general", {}), *parts, *(each for part in parts for each in part.get("subsets", []))]
    return next((str(each["trigger_word"]) for each in levels if isinstance(each, dict) and "trigger_word" in each), "")


def _suggestion(site: Site, form: Form) -> Command:
    values = _values(site, form, ("pretrained_model_name_or_path", "dataset_config"), MODEL_FILE_KEYS)
    kind, model = str(form.get("kind")), str(values["pretrained_model_name_or_path"])
    card = form.get("gpu_memory") or ("" if cards(3600) else "cpu")
    given = {"kind": kind, "model": model, "images": values["dataset_config"], "gpu_memory": card}
    given |= {"network_type": form.get("adapter")}
    if kind == "subject" and not form.get("class_word"):
        raise UserError("What it is: is needed for a subject; fill it in, such as person or dog")
    given |= {"class_word": form.get("class_word")} if kind == "subject" else {}
    values.setdefault("trigger_word", _trigger_of(site.roots.find(str(values["dataset_config"]))))
    taken = ("model_type", *["trigger_word"] * (kind != "edit"), *MODEL_FILE_KEYS * takes_parts(Path(model)))
    flags = given | {key: values.get(key) for key in taken}
    words = [f"--{key}={value}" for key, value in flags.items() if value]
    return ["tools/suggest_config.py", "--save_to={job}", *words], {}


def show_job(site: Site, request: Request, form: Form, started: Job | None = None) -> Response:
    """Show how far a job beside the form is, and what it would set in the form."""
    job = started or site.jobs.get(request.query_params.get("id", ""))
    settings = text_of(job.folder / "config.toml") if job.kind == "suggest" else job.log.partition("\nset:\n")[2]
    values = read_keys(settings or "", "settings", LORA).values if job.is_over else {}
    proposed = {key: text for key, value in values.items() if key not in _OF_A_RUN and (text := shown(value))}
    fits = re.search(r"^(fits|does not fit) into ([\d.]+)", job.log, re.MULTILINE)
    opens = job.kind == "migrate" and job.state == "done" and Path(job.words[-1]).parent
    return site.part("new_run.html", "job", job=job, proposed=proposed, fits=fits, opens=opens)


ROUTES: Routes = {
    "/new": show,
    "/new/edit": (None, edit),
    "/new/job": (show_job, side_job),
    "/new/start": (None, start),
    "/run/again": (None, again),
}
