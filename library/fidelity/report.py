"""From a request to all that is measured: the reference, the deployment, the layers, every cause alone and left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from library.console import Console
from library.errors import counted
from library.fidelity.calibration import Calibration, CalibrationOptions
from library.fidelity.comparison import Comparison, compare_models
from library.fidelity.deployed_parts import captions_of
from library.fidelity.deployed_parts import words as words_of_part
from library.fidelity.differences import Differences, compare
from library.fidelity.findings import REMEDIES, WORTH_MENDING, Finding, as_sentence
from library.fidelity.fixes import Fix, recommend, recommendation
from library.fidelity.remedies import Remedy, costly_remedies, free_remedies, in_order, of_findings
from library.fidelity.runs import EvalSet, Outcome, prepare_eval_set, run_variant
from library.fidelity.server_image import ServerResult
from library.fidelity.server_verdict import advice, findings, headline, is_alarm, remedies, sentences
from library.fidelity.servers import Merging
from library.fidelity.serving import CONDITIONING, REFERENCE, Models, Variant
from library.fidelity.verdict import Attribution, Verdict, is_worse, judge
from networks.files.weights import AddedWeights

_FINE = 0.01  # share of an image's size that is lost without anybody seeing it
_FLAGS = {  # where to look in a server: cause -> the flag that says what it does
    "picture and mask": {name: f"--{name}" for name in (*CONDITIONING, "paste")},
    "the sampler": {"guidance": "--deploy_guidance", "shift": "--deploy_shift", "timestep": "--timestep"},
    "text encoders and VAE": {"text": "--deploy_text_dtype", "vae": "--deploy_vae_dtype"},
    "the LoRA": {"merge": "--deploy_lora", "strength": "--deploy_strength", "lora_without": "--deploy_lora_without"},
    "products": {"activations": "--activations", "attention": "--attention"},
}


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        title: what was compared. variant: the deployment that is judged.
        settings: name -> value, for the reader and the JSON.
        full: the deployment. attributions: its causes. comparison: of all tensors.
        merges: the ways in which the server merges, where there are several or one that was looked for.
        remedies: what to do, by the share of the error that it takes off.
        reference, deployed: their outcomes, for the images.
        same: cause -> a line about a deployed part that does here what the reference's does; "" of the same files.
        server: what pictures show that the server painted; None without any.
        fixes: that were tried.
    """

    title: str
    settings: Mapping[str, str]
    verdict: Verdict
    full: Differences
    attributions: Sequence[Attribution]
    comparison: Comparison
    reference: Outcome
    deployed: Outcome
    eval_set: EvalSet
    variant: Variant = REFERENCE
    merges: Sequence[MergeRow] = ()
    remedies: Sequence[Remedy] = ()
    same: Mapping[str, str] = field(default_factory=dict)
    server: ServerResult | None = None
    fixes: Sequence[Fix] = ()

    @property
    def best(self) -> Fix | None:
        """The fix to use, if any is better than nothing."""
        return recommend(self.fixes, self.full)

    @property
    def best_remedy(self) -> Remedy | None:
        """What mends the main cause; of rounding alone, what takes off most of the error."""
        main, known = self.verdict.main.cause, [each for each in self.remedies if not math.isnan(each.takes_off.value)]
        only_rounding = main in self.verdict.normal
        return next((each for each in known if only_rounding or each.cause == main), None)

    @property
    def alarm(self) -> bool:
        """Whether there is anything to mend, in the deployment as described or in what the server painted."""
        return self.verdict.alarm or (self.server is not None and is_alarm(self.server))

    @property
    def headline(self) -> str:
        """What to look at first: what the server painted, where that is known."""
        return headline(self.server) if self.server else self.verdict.headline

    @property
    def in_short(self) -> str:
        """What to do about it."""
        return advice(self.server) if self.server else self.described

    @property
    def painted(self) -> tuple[Finding, ...]:
        """What the server's pictures show."""
        return findings(self.server) if self.server else ()

    @property
    def described(self) -> str:
        """Whether anything has to be done about the deployment as described, and how far off it is."""
        what, off = ("Pictures", self.full.image) if self.deployed.images else ("Single steps", self.full.velocity)
        judgement = "Nothing is broken: that is the price of rounding."
        if self.verdict.alarm:
            judgement = "Act on this: rounding alone costs less."
        elif self.verdict.uncertain:
            judgement = "Rounding alone may cost less; so few images cannot tell."
        elif self.alarm:
            judgement = "What the server painted has another cause, which the description lacks."
        elif off < _FINE:
            judgement = "This is fine: nothing has to be done."
        return f"{what} differ by {off:.2%} from what the original model makes with this LoRA. {judgement}"

    def sections(self) -> dict[str, list[str]]:
        """Return the verdict for someone who has lost a month over it: heading -> sentences, where there are any."""
        verdict, main = self.verdict, self.verdict.main
        first = {main.cause}
        if not (verdict.alarm or verdict.uncertain):  # by rounding alone: each kind of it
            first |= {each.cause for each in verdict.findings if each.size == "real"}
        alike = [each for each in verdict.findings if each.cause in first]
        others = [each for each in verdict.findings if each.cause not in first]
        hidden = [each for each in others if each in verdict.hidden]
        others = [each for each in others if each not in hidden]
        unsure = [each for each in others if each in verdict.uncertain]
        small = [each for each in others if not each.exact and each not in unsure and each.share < WORTH_MENDING]
        changed, painted = {each.cause for each in self.attributions}, {each.cause for each in self.painted}
        said = bool(painted) and (main.cause in painted or not verdict.alarm)  # by the server's own remedies
        nothing = "" if verdict.alarm else "Nothing has to be mended. To come nearer to the original: "
        best = self.best_remedy
        merge_is_small = "merge" in verdict.shares and verdict.shares["merge"].value < WORTH_MENDING
        changed |= self.same.keys() | (self.server.looked_at if self.server else set())
        changed |= first | {each.cause for each in verdict.findings}  # tensors show a strength, too
        found = {
            "What the server painted": sentences(self.server) if self.server else [],
            "The deployment as you described it": [verdict.headline, self.described] if self.server else [],
            "Shares of the error": ["they are of its square: what takes off 75% of it halves the difference"],
            "How we know": [each.claim() for each in alike],
            "What to do first": [] if said else [nothing + (best.words if best else REMEDIES[main.cause])],
            "Also mend": [each.sentence() for each in hidden],
            "The border": verdict.on_the_border(self.server is not None),
            "Recommended of the fixes": [recommendation(self.best, self.full)] if self.fixes else [],
            "What else helps": [each.words for each in self.remedies if not (each.cost or each.cause or each is best)],
            "How the server merges": [] if merge_is_small else merge_sentences(self.merges),
            "What else was found": [each.sentence() for each in others if each not in (*small, *unsure)],
            "Too few images to tell": [f"{each.claim()}; {verdict.images_wanted(each)} would" for each in unsure],
            "Unexplained": [verdict.unexplained()],
            "Ruled out as the main cause": [each.claim() for each in small],
            "Other files": [line for line in self.same.values() if line],
            "Not looked at": self._not_looked_at(changed),
            "How far off": [verdict.sizes(self.full)],
        }
        return {heading: [*map(as_sentence, filter(None, lines))] for heading, lines in found.items() if any(lines)}

    def _not_looked_at(self, looked_at: set[str]) -> list[str]:
        """Return with which flags to say what the server does otherwise, a line for each place to look at in it."""
        places = {
            place: {cause: flag for cause, flag in flags.items() if cause not in looked_at}
            for place, flags in _FLAGS.items()
            if place != "picture and mask" or self.eval_set.kind != "none"
        }
        lines = [
            f"{place}: {', '.join(flags).replace('_', ' ')} ({', '.join(flags.values())})"
            for place, flags in places.items()
            if flags
        ]
        picture = "" if self.server else ", or give a picture that it painted (--server_image)"
        unsaid = f"the report takes these to be as in training; say what your server does otherwise{picture}"
        return [unsaid, *lines] if lines else []

    def lines(self) -> list[str]:
        """Return the same for a terminal, a line a sentence."""
        lines = [self.headline, self.in_short]
        for heading, (first, *others) in self.sections().items():
            lines += [f"{heading}: {first}", *(f"  {sentence}" for sentence in others)]
        return lines


@dataclass(frozen=True)
class MergeRow:
    """One way in which the server merges: the deployment so, and whether it is the one that is judged."""

    merging: Merging
    differences: Differences
    judged: bool


def merge_sentences(rows: Sequence[MergeRow]) -> list[str]:
    """Return what the server's ways to merge make of the error, and what decides between them."""
    if len(rows) < 2:
        return []
    if len({row.differences.error for row in rows}) == 1:
        return [
            "The server's merges are alike here: products are made in the file's own format, so that it always has the "
            "LoRA rounded in."
        ]
    sizes = ", ".join(f"{row.differences.velocity:.2%} ({row.merging.when})" for row in rows)
    return [
        f"The server merges in several ways. One step of the model is off by {sizes}. Free memory decides which layer "
        "gets which; the worst is judged."
    ]


def measure(
    models: Models,
    ways: Sequence[tuple[Variant, Merging | None]],
    calibration: Calibration,
    console: Console,
    *,
    steps: int,
    reference_loras: Mapping[str, dict[str, AddedWeights]] | None = None,
) -> Report:
    """Return the report.

    Args:
        models: of the deployment.
        ways: the deployment, once for each way in which the server merges; the worst is judged.
        calibration: what it is measured on.
        console: for progress.
        steps: of the sampling runs; 0 for none.
        reference_loras: those beside the reference, where what is served was refitted; None: the same.

    Raises:
        UserError: anything wrong with models, or flags that need what the dataset does not have.
    """
    eval_set = prepare_eval_set(models, calibration, ways[0][0], steps)
    original = models if reference_loras is None else replace(models, loras=dict(reference_loras))
    reference = run_variant(original, REFERENCE, eval_set, console, "reference")
    decode = models.image_encoder(REFERENCE).decode

    def run(changed: Variant, title: str) -> tuple[Outcome, Differences]:
        outcome = run_variant(models, changed, eval_set, console, title)
        return outcome, compare(reference, outcome, eval_set, decode)

    runs: dict[Any, tuple[Variant, Outcome, Differences]] = {}
    for each, _ in ways:
        key = models.runs_as(each)
        if key not in runs:
            runs[key] = each, *run(each, f"deployment, {each.merge}" if len(ways) > 1 else "deployment")
    variant, deployed, full = max(runs.values(), key=lambda found: found[2].error)
    judged = models.runs_as(variant)
    keys = [(models.runs_as(each), way) for each, way in ways]
    rows = [MergeRow(way, runs[key][2], key == judged) for key, way in keys if way is not None]
    comparison = compare_models(models, variant, calibration, console)
    causes = variant.changes()
    alone = {cause: full if variant.only(cause) == variant else run(variant.only(cause), cause)[1] for cause in causes}
    puzzling = is_worse(full) and not any(map(is_worse, alone.values()))
    left_out = causes if puzzling else [cause for cause in ("merge", "activations") if cause in causes]
    left_out = left_out if len(causes) > 1 else []
    without = {cause: run(variant.without(cause), f"without {cause}")[1] for cause in left_out}
    words = {cause: words_of_part(models, variant, cause, captions_of(calibration)) for cause in causes}
    attributions = [Attribution(cause, words[cause], alone[cause], without.get(cause)) for cause in causes]
    verdict = judge(variant, full, attributions, comparison)
    return Report(
        title=f"{Path(models.config.pretrained_model_name_or_path).name}, served as {models.deployed.name}",
        variant=variant,
        settings=_settings(models, variant, causes, calibration.plan.options, steps),
        verdict=verdict,
        full=full,
        attributions=attributions,
        merges=rows,
        comparison=comparison,
        reference=reference,
        deployed=deployed,
        eval_set=eval_set,
    )


def with_remedies(
    report: Report, models: Models, options: CalibrationOptions, loras: Sequence[Path], words: Sequence[str]
) -> Report:
    """Return the report with what to do, by what it takes off the error.

    ``loras``: the LoRAs' files. ``words``: of the report's own command; some remedies are that report once more.
    """
    without, verdict = {each.cause: each.without for each in report.attributions if each.without}, report.verdict
    free = free_remedies(models, report.variant, report.full, without, report.comparison, loras, verdict)
    costly = costly_remedies(models, report.variant, verdict.rounding, options, loras, words)
    return replace(report, remedies=in_order([*of_findings(verdict), *free, *costly], verdict.main.cause))


def with_server(report: Report, server: ServerResult) -> Report:
    """Return the report with what pictures show that the server painted, and what to change in it first."""
    return replace(report, server=server, remedies=[*remedies(server), *report.remedies])


def _settings(
    models: Models, variant: Variant, causes: Mapping[str, Any], options: CalibrationOptions, steps: int
) -> dict[str, str]:
    """Return what was compared, in words."""
    changes = [models.words(name, value) for name, value in causes.items()]
    return {
        "reference": f"{models.family.name}, fingerprint {models.family.fingerprint()}",
        "deployment": models.deployed.describe(),
        "server": models.describe_server(variant),
        "by itself": models.server.gives.words(),
        "causes": ", ".join(changes),
        "LoRA": f"{counted(len(models.transformer_lora), 'layer')} of the transformer",
        "eval_set": f"{counted(options.images, 'image')}, sigmas {', '.join(f'{s:g}' for s in options.sigmas)}, "
        f"{counted(steps, 'sampling step')}, guidance {options.guidance_scale:g}, seed {options.seed}",
        "products": str(models.dtype).removeprefix("torch."),
    }
