"""What the pictures that a server painted say, in words: the report's first sentence, its findings and remedies."""

from __future__ import annotations

import math

from library.errors import counted
from library.fidelity.findings import CAUSES, REMEDIES, Finding, as_sentence
from library.fidelity.remedies import Remedy
from library.fidelity.server_habits import colour, words_of
from library.fidelity.server_image import ServerResult


def is_alarm(server: ServerResult) -> bool:
    """Return whether the server paints another picture than it should, beyond what its description explains."""
    return server.state in ("explained", "tie", "unexplained")


def headline(server: ServerResult) -> str:
    """Return what the pictures say first: how far off, what explains it."""
    picture = "the server's picture" if len(server.names) == 1 else f"the server's {len(server.names)} pictures"
    verb, best = "is" if len(server.names) == 1 else "are", server.nearest
    off = f"{picture[0].upper()}{picture[1:]} {verb} {server.reference.distance:.1f} of 255 steps from the reference"
    if server.state == "same":
        seen = "no more than saving it makes" if server.reference.distance <= 1.5 * server.floor else "too little to see"
        return f"The server paints what the reference paints: {picture} {verb} {server.reference.distance:.1f} of 255 steps from it, {seen}."
    share = f"{best.explained:.0%} of the difference"
    if server.state == "unexplained":
        return f"{off}, and nothing that was tried explains it."
    if server.state == "tie":
        names = "; or ".join(each.words for each in (best, *server.rivals))
        return f"{off}. It cannot be told what explains it ({share}): {names}."
    if server.state == "declared":
        return f"{off}, as the deployment is described: {best.words} explains {share}."
    return f"{off}: {best.words} explain{'s' * (len(best.habits) == 1)} {share}."


def sentences(server: ServerResult) -> list[str]:
    """Return what speaks for it: the runner-up, the interval, the mask's border."""
    found = []
    best, others = server.nearest, server.descriptions[1:]
    if server.state == "unexplained":
        found.append(
            f"Of {counted(len(server.descriptions), 'description')} the nearest ({best.words}) explains "
            f"{max(0.0, best.explained):.0%}; a wrong one can come as near by chance, less than 90 % name nothing"
        )
    elif best.habits and server.state != "same":
        other = next((each for each in others if {*each.changes} != {*best.changes}), None)
        second = f"; the next, {other.words}, {max(0.0, other.explained):.0%}" if other else ""
        doubt = "" if math.isnan(best.low) else f" [{best.low:.1%} to {best.high:.1%} over blocks of 16 pixels]"
        near = "nothing that could be told apart" if best.distance <= 1.5 * server.floor else f"{server.unexplained:.1%}"
        found.append(f"{best.words}: {best.explained:.1%}{doubt}{second}; unexplained: {near}")
    if not math.isnan(server.along) and server.state != "same":
        times = f", {server.along / server.elsewhere:.1f} times as much" if server.elsewhere > 0 else ""
        found.append(
            f"Along the mask's border (8 pixels) it is {server.along:.1f} of 255 steps off, elsewhere "
            f"{server.elsewhere:.1f}{times}"
        )
    return found


def advice(server: ServerResult) -> str:
    """Return what to do about the pictures."""
    if server.state == "same":
        return "Nothing has to be changed in the server; what the deployment's files and flags lose stands below."
    if server.state == "declared":
        return "The server does what you described; what that loses stands below."
    if server.state == "explained":
        return as_sentence("Change this in the server: " + "; ".join(text for _, text, _ in _changes(server)))
    if server.state == "tie":
        return "Change one of them in the server, paint again, and give that picture or one more (--server_image)."
    return as_sentence(f"To check: {REMEDIES['server']}")


def findings(server: ServerResult) -> tuple[Finding, ...]:
    """Return a finding for each habit that the pictures show; empty where they alarm nobody."""
    if not is_alarm(server):
        return ()
    if server.state != "explained":
        said = "; ".join([headline(server).removesuffix("."), *sentences(server)[:1]])
        return (Finding("server", 1.0, (), said),)
    along = "; ".join(sentences(server)[1:])
    return tuple(
        Finding(name, part, (), f"{headline(server)} {words}; {along}" if place == 0 else words)
        for place, (name, words, part) in enumerate(
            sorted(_named(server), key=lambda each: -each[2])
        )
    )


def remedies(server: ServerResult) -> list[Remedy]:
    """Return what to change in the server, what takes off most first."""
    if server.state != "explained":
        return []
    return [
        Remedy(as_sentence(f"In the server: {text}; it takes off {part:.0%} of what its pictures are off"))
        for _, text, part in _changes(server)
    ]


def _named(server: ServerResult) -> list[tuple[str, str, float]]:
    """Return cause, words and share of each habit that was not declared."""
    declared = server.declared.changes()
    habits = zip(server.nearest.habits, server.parts, strict=True)
    return [
        (next(iter(habit)), words_of(habit, server.declared), part)
        for habit, part in habits
        if len(habit) == 1 and not habit.items() <= declared.items()
    ]


def _changes(server: ServerResult) -> list[tuple[str, str, float]]:
    """Return cause, what to do and share of each habit, the largest first."""
    found = []
    for name, words, part in sorted(_named(server), key=lambda each: -each[2]):
        text = f"{words}; {REMEDIES[name]}"
        if name == "blank":
            level = server.nearest.changes[name]
            usual = "the colour of training" if server.trained is None else f"{colour(server.trained)}, as in training"
            text = f"{words}; blank it with {usual}, or train again with inpaint_blank {colour(level)!r}"
        found.append((name, text, part))
    return found
