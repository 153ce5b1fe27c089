"""Pairs of answers: every form gives the same pair, and what is no pair is refused."""

from __future__ import annotations

from typing import Any

import pytest

from library.errors import UserError
from library.llm.preferences import parse_pair

ASKED, GOOD, BAD = "Why?", "Because.", "No idea."
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str = ASKED) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


FORMS: dict[str, dict[str, Any]] = {
    "TRL, texts": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "TRL, messages": {"prompt": [user()], "chosen": [said(GOOD)], "rejected": [said(BAD)]},
    "TRL, implicit": {"chosen": [user(), said(GOOD)], "rejected": [user(), said(BAD)]},
    "UltraFeedback": {
        "prompt": ASKED, "prompt_id": "1", "messages": [user(), said(GOOD)], "score_chosen": 8.0, "score_rejected": 2.0,
        "chosen": [user(), said(GOOD)], "rejected": [user(), said(BAD)],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": ASKED}],
        "chosen": {"from": "gpt", "value": GOOD}, "rejected": {"from": "gpt", "value": BAD},
    },
    "Alpaca": {"instruction": ASKED, "input": "", "chosen": GOOD, "rejected": BAD},
    "question": {"question": ASKED, "chosen": GOOD, "rejected": BAD},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("system", [False, True])
def test_every_form_gives_the_same_pair(form: str, system: bool) -> None:
    record = FORMS[form] | ({"system": "Be brief."} if system else {})
    chosen = parse_pair(record, "f:1")
    before = ["Be brief."] * system + [ASKED]
    for chat, answer in ((chosen, GOOD), (chosen.rejected, BAD)):
        assert chat is not None
        assert [message.content for message in chat.messages] == [*before, answer]
        assert chat.trained == (False,) * len(before) + (True,)
        assert {"prompt", "messages", "conversations", "instruction"}.isdisjoint(chat.unread)
    assert ("score_chosen" in chosen.unread) == (form == "UltraFeedback")


def test_an_alpaca_pair_is_read_as_an_alpaca_record() -> None:
    record = {"instruction": "Add.", "input": "1 2", "history": [["a", "b"]], "chosen": "3", "rejected": "4"}
    chosen = parse_pair(record, "f:1")
    assert [message.content for message in chosen.messages] == ["a", "b", "Add.\n\n1 2", "3"]
    assert chosen.trained == (False, False, False, True)
    assert chosen.unread == ()


def test_all_that_the_assistant_says_from_the_first_difference_on_is_learnt() -> None:
    common = [SYSTEM, user("a"), said("b"), user("c")]
    chosen = [*common, said("d"), user("e"), said("f")]
    pair = parse_pair({"chosen": chosen, "rejected": [*common, said("g")]}, "f:1")
    assert pair.rejected is not None
    assert pair.trained == (False, False, False, False, True, False, True)
    assert pair.rejected.trained == (False, False, False, False, True)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [user(), said(GOOD)]}, 'has no "chosen" and "rejected" answer'),
        ({"prompt": ASKED, "chosen": GOOD, "rejected": ""}, 'has no "chosen" and "rejected" answer'),
        ({"chosen": f"Human: {ASKED}", "rejected": BAD}, "begin differently; give both the same prompt"),
        ({"chosen": [user("a"), said(GOOD)], "rejected": [user("b"), said(BAD)]}, "begin differently"),
        (
            {"chosen": [user(), said(GOOD), user(), said(GOOD)], "rejected": [user(), said(GOOD)]},
            "part at message 3, which is not the assistant's in both",
        ),
        ({"messages": [user("?")], "chosen": [user(), said(GOOD)], "rejected": [user(), said(BAD)]},
         "messages is not how chosen and rejected begin"),
        ({"prompt": ASKED, "chosen": 3, "rejected": BAD}, "holds no text"),
        ("text", 'has no "chosen" and "rejected" answer'),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_refused(record: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        parse_pair(record, "f:1")
    assert str(caught.value).startswith("f:1: ")


def test_a_prompt_that_the_chats_do_not_hold_is_named() -> None:
    pair = parse_pair({"prompt": "Human: Why?", **FORMS["TRL, implicit"]}, "f:1")
    assert pair.unread == ("prompt",)
