"""lm-evaluation-harness's tasks on our models: the three questions it asks of a language model.

``loglikelihood`` and ``loglikelihood_rolling`` go to ``library.llm.evaluation``, ``generate_until`` to the generation
loop. Texts are tokenised as the harness does for transformers' models: the token that begins a text comes first where
the tokenizer has one of its own (Llama's), and none for GPT-2's. The harness is an extra (``requirements/eval.txt``);
this module is imported only where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from library.errors import UserError, did_you_mean, reason_of
from library.llm.evaluation import Span, continuation_span, first_token, score_spans
from library.llm.generation import SamplingSettings, stream_tokens
from library.llm.tokenizers import Tokenizer
from library.models.llm.model import TransformerLM

Counting = Callable[[str, int], Callable[[int], None]]
_NEW_TOKENS = 256  # where a task does not say; the harness's own default
_KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


class HarnessModel(LM):
    """A language model as the harness sees one."""

    def __init__(
        self,
        model: TransformerLM,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        counting: Counting,
        seed: int = 0,
    ) -> None:
        """Hold what answers requests.

        Args:
            model: in eval mode.
            tokenizer: its own.
            context: tokens it reads at most.
            batch_size: texts in a forward pass.
            counting: start(description, total) -> advance, for progress.
            seed: of sampled answers.
        """
        super().__init__()
        self.model, self.words = model, tokenizer
        self.context, self.batch_size, self.counting, self.seed = context, batch_size, counting, seed

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log probability of each continuation, and whether greedy decoding would write it."""
        pairs = [request.args for request in requests]
        spans = [continuation_span(self.words, context, text, self.context) for context, text in pairs]
        scores = self._scores("likelihoods", spans)
        return [(score.log_probability, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each whole text, in the harness's windows."""
        spans: list[Span] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            (text,) = request.args
            rolling = utils.get_rolling_token_windows(
                token_list=self.words.encode(text),
                prefix_token=first_token(self.words),
                max_seq_len=self.context,
                context_len=1,
            )
            for given, wanted in rolling:
                spans.append(Span([*given, wanted[-1]], len(wanted)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._scores("rolling likelihoods", spans), strict=True):
            totals[owner] += score.log_probability
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to the first of the task's stop texts."""
        advance = self.counting("texts", len(requests))
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        texts = [""] * len(requests)
        for places in groups.values():
            settings, until = self._settings(requests[places[0]].args[1])
            places.sort(key=lambda i: len(requests[i].args[0]))
            for start in range(0, len(places), self.batch_size):
                batch = places[start : start + self.batch_size]
                written = self._write([requests[i].args[0] for i in batch], settings, until)
                for i, text in zip(batch, written, strict=True):
                    texts[i] = text
                advance(len(batch))
        return texts

    def _scores(self, what: str, spans: Sequence[Span]) -> list[Any]:
        advance = self.counting(what, len(spans))
        return list(score_spans(self.model, spans, self.batch_size, lambda batch: advance(len(batch))))

    def _settings(self, given: dict[str, Any]) -> tuple[SamplingSettings, list[str]]:
        for key in given:
            if key not in _KNOWN:
                raise UserError(f"--tasks: generation setting {key!r} is not supported, only {', '.join(_KNOWN)}")
        until = given.get("until") or []
        sampled = bool(given.get("do_sample", False)) and given.get("temperature", 1.0) > 0
        filters = {key: given[key] for key in ("top_k", "top_p") if key in given} if sampled else {}
        settings = SamplingSettings(
            max_new_tokens=int(given.get("max_gen_toks", _NEW_TOKENS)),
            temperature=float(given.get("temperature", 1.0)) if sampled else 0.0,
            seed=self.seed,
            stop_tokens=self.words.stop_tokens,
            **filters,
        )
        if settings.max_new_tokens >= self.context:
            raise UserError(
                f"--context: {self.context} leaves no room for {settings.max_new_tokens} new tokens; raise it"
            )
        return settings, [until] if isinstance(until, str) else list(until)

    def _write(self, contexts: Sequence[str], settings: SamplingSettings, until: Sequence[str]) -> list[str]:
        room = self.context - settings.max_new_tokens
        prompts = [[*self.words.begins, *self.words.encode(context)][-room:] for context in contexts]
        prompts = [prompt or [first_token(self.words)] for prompt in prompts]
        rows: list[list[int]] = [[] for _ in prompts]
        texts, done = [""] * len(prompts), [False] * len(prompts)
        for new in stream_tokens(self.model, prompts, settings):
            for i, token in enumerate(new):
                if token is None or done[i]:
                    continue
                rows[i].append(token)
                texts[i] = self.words.decode(rows[i], skip_special=True)
                done[i] = any(stop in texts[i] for stop in until)
            if all(done):
                break
        for stop in until:
            texts = [text.split(stop)[0] for text in texts]
        return texts


def find_tasks(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the harness's index of tasks, having seen that these exist and that their data can be had.

    Args:
        names: of the harness's tasks, groups or tags.
        include_path: folder with further tasks in the harness's YAML.

    Raises:
        UserError: a task does not exist, or its data cannot be had.
    """
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in names:
        if name not in manager.all_tasks:
            nearest = did_you_mean(name, manager.all_tasks)
            raise UserError(f"--tasks: no task {name!r}{nearest}; lm_eval ls tasks lists all")
    try:
        manager.load(list(names))
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"--tasks: the data of {', '.join(names)} cannot be had: {reason_of(error)}") from None
    return manager


def run_tasks(
    model: HarnessModel, manager: TaskManager, names: Sequence[str], num_fewshot: int | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """Return the results of each task (and group): metric -> value, with the task's version and number of examples.

    Args:
        model: that is asked.
        manager: of :func:`find_tasks`.
        names: of tasks, groups or tags.
        num_fewshot: examples before each question; the tasks' own number if None.
        limit: questions of each task.
    """
    found = simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        random_seed=model.seed,
        numpy_random_seed=model.seed,
        torch_random_seed=model.seed,
        fewshot_random_seed=model.seed,
    )
    results = {}
    for name, values in {**found["results"], **found.get("groups", {})}.items():
        about = {"version": found["versions"].get(name), "num_fewshot": found["n-shot"].get(name)}
        results[name] = {key: value for key, value in {**values, **about}.items() if isinstance(value, int | float)}
    return results
