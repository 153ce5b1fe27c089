"""What the pictures that a server painted say, in words: the report's first sentence, its findings and remedies."""

from __future__ import annotations

import math

from library.errors import counted
from library.fidelity.border import RING
from library.fidelity.findings import REMEDIES, Finding, as_sentence
from library.fidelity.remedies import Remedy
from library.fidelity.server_habits import Habit, colour, files_of, words_of
from library.fidelity.server_image import BLOCK, SURELY, ServerResult


def is_alarm(server: ServerResult) -> bool:
    """Return whether the server paints another picture than it should, beyond what its description explains."""
    return server.state in ("explained", "tie", "unexplained")


def headline(server: ServerResult) -> str:
    """Return what the pictures say first: how far off, what explains it."""
    count, best = len(server.names), server.nearest
    picture, verb = ("picture", "is") if count == 1 else (f"{count} pictures", "are")
    off = f"The server's {picture} {verb} {server.reference.distance:.1f} of 255 steps from the reference"
    if server.state == "same":
        little = "too little to see" if server.reference.is_unseen else "no more than bf16 somewhere makes"
        saving = f"no more than saving {'as JPEG ' * (server.reference.floor > 0.5)}makes"
        why = saving if server.reference.is_near else little
        return f"{off}, {why}: the server paints what the reference paints."
    if server.state == "unexplained":
        return f"{off}; nothing that was tried explains it."
    if server.state == "tie":
        names = ", or ".join(each.words for each in (best, *server.rivals))
        return f"{off}; these explain it equally well: {names}."
    words = " and ".join(_words(server, habit) for habit in best.habits)
    return f"{off}: {words} explain{'s' * (len(best.habits) == 1)} {best.explained:.0%} of it."


def sentences(server: ServerResult) -> list[str]:
    """Return what speaks for it: along the mask's border and elsewhere, what else was tried."""
    best, found = server.nearest, []
    if not math.isnan(server.along):
        times = f", {server.along / server.elsewhere:.1f} times as much" if server.elsewhere else ""
        along = f"Within {RING} pixels of the mask's border they are {server.along:.1f} of 255 steps apart"
        found.append(f"{along}, elsewhere {server.elsewhere:.1f}{times}")
    if server.state == "same":
        return found
    among = f"Of {counted(len(server.descriptions), 'description')} the nearest, {best.words}, explains"
    if server.state == "unexplained":
        chance = f"wrong ones come nearer, too, so that less than {SURELY:.0%} counts for nothing"
        likely = best.explained > 0.5
        part = ["If the server does that, undo it, paint again and give that picture: it may be a part"] * likely
        return [*found, f"{among} {max(0.0, best.explained):.0%}; {chance}", *part]
    other = next((each for each in server.descriptions[1:] if {*each.changes} != {*best.changes}), None)
    second = f"; the next, {other.words}, {max(0.0, other.explained):.0%}" if other else ""
    doubt = f" [{best.low:.1%} to {best.high:.1%}, over blocks of {BLOCK} pixels]"
    left = "nothing that could be told apart" if best.is_near else f"{server.unexplained:.1%}"
    return [*found, f"{among} {best.explained:.1%}{doubt}{second}; unexplained: {left}"]


def advice(server: ServerResult) -> str:
    """Return what to do about the pictures."""
    if server.state == "same":
        return "Nothing has to be changed in the server."
    if server.state == "declared":
        return "The server does what you described, and nothing else that could be told apart."
    if server.state == "explained":
        return "Change in the server: " + " ".join(as_sentence(change) for _, _, change, _ in _named(server))
    if server.state == "tie":
        return "Change one of them in the server, paint again, and give that picture (--server_image)."
    return as_sentence(REMEDIES["server"])


def findings(server: ServerResult) -> tuple[Finding, ...]:
    """Return a finding for each habit that the pictures show; empty where they alarm nobody."""
    if not is_alarm(server):
        return ()
    said = " ".join([headline(server), *map(as_sentence, sentences(server))])
    if server.state != "explained":
        return (Finding("server", 1.0, (), said),)
    return tuple(Finding(cause, part, (), f"{words}. {said}") for cause, words, _, part in _named(server))


def remedies(server: ServerResult) -> list[Remedy]:
    """Return what to change in the server, what takes off most first."""
    if server.state != "explained":
        return []
    return [
        Remedy(as_sentence(f"In the server: {change}; it takes off {part:.0%} of what its pictures are off"))
        for _, _, change, part in _named(server)
    ]


def _named(server: ServerResult) -> list[tuple[str, str, str, float]]:
    """Return cause, words, what to change and share of each habit but the files' own precision, the largest first."""
    found = []
    for habit, part in zip(server.nearest.habits, server.parts, strict=True):
        cause, words = next(iter(habit)), _words(server, habit)
        change = f"{words}; {REMEDIES[cause]}"
        if cause == "blank":
            usual = "the colour of training" if server.trained is None else f"{colour(server.trained)}, as in training"
            change = f"{words}; blank it with {usual}, or train again with inpaint_blank {colour(habit[cause])!r}"
        if not habit.items() <= files_of(server.declared).items():
            found.append((cause, words, change, part))
    return sorted(found, key=lambda each: -each[3])


def _words(server: ServerResult, habit: Habit) -> str:
    """Return a habit in words; of a blank, what training had instead."""
    trained = server.trained if "blank" in habit else None
    return words_of(habit) + (f" instead of {colour(trained)}" if trained is not None else "")
