"""Conversations as tokens and batches, beside transformers' chat templates and Meta's published code."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Sequence
from datetime import date
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from library.data.batches import DataParallelRank
from library.errors import UserError
from library.llm.chat_batches import (
    Chat,
    ChatSampler,
    Example,
    collate_windows,
    note_unread,
    pack_examples,
    parse_chat,
    read_chats,
    tokenise_chats,
)
from library.llm.chat_templates import (
    BUILT_IN,
    ChatTemplate,
    Message,
    load_chat_template,
    template_arguments,
    write_jinja_template,
)
from library.llm.preferences import parse_pair
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer, train_bpe
from library.nn.attention import document_mask, document_positions
from library.nn.cross_entropy import IGNORED
from tests.llm.talkers import fields, taught

CONVERSATION = [
    Message("system", "Be short."),
    Message("user", "What is a cat?"),
    Message("assistant", "An animal."),
    Message("user", "And a mat?"),
    Message("assistant", "A rug, café."),
]
TEXTS = [message.content for message in CONVERSATION] * 3 + ["user", "assistant", "system"]
LLAMA3_MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
# As published with Llama 3 Instruct and with Qwen, with the answers marked as transformers' documentation says.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def answers(tokens: Sequence[int], is_target: Sequence[bool]) -> list[list[int]]:
    """Return the runs of targets."""
    runs = groupby(zip(tokens, is_target, strict=True), key=itemgetter(1))
    return [[token for token, _ in run] for learnt, run in runs if learnt]


def without_marks(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tokenizer_folder(folder: Path, special: Sequence[str], template: str | None = None) -> Path:
    train_bpe(TEXTS, 300, special).save(folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def of_transformers(folder: Path, template: str, answer_next: bool = False) -> tuple[list[int], list[int]]:
    """Return tokens and assistant mask of ``CONVERSATION`` by transformers."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [fields(message) for message in CONVERSATION]
    made = theirs.apply_chat_template(
        messages,
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=answer_next,
    )
    return made["input_ids"], made["assistant_masks"]


@pytest.mark.parametrize(
    ("name", "special", "source"),
    [("llama3", LLAMA3_MARKS, LLAMA3), ("chatml", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), CHATML)],
)
def test_templates_give_the_tokens_and_the_answers_of_transformers(
    tmp_path: Path, name: str, special: Sequence[str], source: str
) -> None:
    folder = tokenizer_folder(tmp_path, special)
    template = load_chat_template("auto", load_tokenizer(folder), folder)
    assert template.name == name
    expected, mask = of_transformers(folder, source)
    assert taught(template, CONVERSATION) == (expected, [bool(learnt) for learnt in mask])
    assert template.prompt_tokens(CONVERSATION) == of_transformers(folder, source, answer_next=True)[0]


SOURCES = [
    LLAMA3,
    "{% if add_generation_prompt and 0 %}{% endif %}" + LLAMA3,
    without_marks(LLAMA3),
    without_marks(CHATML),
]


@pytest.mark.parametrize("source", SOURCES, ids=["marked", "marked later", "unmarked", "chatml"])
def test_the_tokenizers_own_template_is_followed_with_and_without_marked_answers(tmp_path: Path, source: str) -> None:
    folder = tokenizer_folder(tmp_path, (*LLAMA3_MARKS, "<|im_start|>", "<|im_end|>"), source)
    template = load_chat_template("auto", load_tokenizer(folder), folder)
    assert template.name == "tokenizer"
    expected, mask = of_transformers(folder, CHATML if "im_start" in source else LLAMA3)
    assert taught(template, CONVERSATION) == (expected, [bool(learnt) for learnt in mask])


def test_a_template_that_writes_the_date_writes_todays_or_the_one_it_is_given(tmp_path: Path) -> None:
    dated = "{% if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}{{ date_string }}"
    folder = tokenizer_folder(tmp_path, LLAMA3_MARKS, dated + without_marks(LLAMA3).replace("{{ bos_token }}", ""))
    tokenizer = load_tokenizer(folder)
    for given, year in (([], str(date.today().year)), (["date_string=26 Jul"], "26 Jul")):
        template = load_chat_template("tokenizer", tokenizer, folder, template_arguments(given))
        assert tokenizer.decode(template.prompt_tokens(CONVERSATION)).startswith(f"{year}<|start_header_id|>")


def test_llama_2_is_written_as_metas_code_writes_it(tmp_path: Path) -> None:
    model = io.BytesIO()
    words = [f"[INST] <<SYS>> {text} <</SYS>> [/INST] {text}" for text in TEXTS]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_writer=model, vocab_size=100, model_type="bpe", minloglevel=2
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    ours, theirs = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    template = load_chat_template("auto", ours, tmp_path)
    assert template.name == "llama2"
    tokens, is_target = taught(template, CONVERSATION)
    first = "[INST] <<SYS>>\nBe short.\n<</SYS>>\n\nWhat is a cat? [/INST] An animal. "
    second = "[INST] And a mat? [/INST] A rug, café. "
    expected = [1, *theirs.encode(first), 2, 1, *theirs.encode(second), 2]  # llama/generation.py: bos and eos each turn
    assert tokens == expected
    said = answers(tokens, is_target)
    assert [theirs.decode(answer) for answer in said] == [theirs.decode(theirs.encode("An animal. ")),
                                                          theirs.decode(theirs.encode("A rug, café. "))]  # fmt: skip
    assert [answer[-1] for answer in said] == [2, 2]
    asked = template.prompt_tokens(CONVERSATION[:2])
    assert asked == tokens[: len(asked)]


def test_a_model_without_marks_learns_answers_that_end_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, ("<|endoftext|>",)))
    template = load_chat_template("auto", tokenizer, tmp_path)
    tokens, is_target = taught(template, CONVERSATION)
    text = (
        "Be short.\n\nUser: What is a cat?\nAssistant: An animal.<|endoftext|>User: And a mat?\nAssistant: A rug, café."
    )
    assert tokenizer.decode(tokens) == text + "<|endoftext|>"
    assert [tokenizer.decode(answer) for answer in answers(tokens, is_target)] == [
        " An animal.<|endoftext|>",
        " A rug, café.<|endoftext|>",
    ]
    asked = template.prompt_tokens(CONVERSATION[:2])
    assert asked == tokens[: len(asked)]


@pytest.mark.parametrize("name", ["llama3", "chatml", "plain", "tokenizer"])
def test_no_message_can_end_its_turn(tmp_path: Path, name: str) -> None:
    marks = ("<|endoftext|>", *LLAMA3_MARKS, "<|im_start|>", "<|im_end|>")
    folder = tokenizer_folder(tmp_path, marks, without_marks(LLAMA3))
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(name, tokenizer, folder)

    def ends(text: str) -> int:
        tokens, _ = taught(template, [Message("user", text), Message("assistant", "ok")])
        return sum(token in tokenizer.special.values() for token in tokens)

    assert ends("a <|eot_id|> <|im_end|> <|endoftext|> b") == ends("a b")


@pytest.mark.parametrize("name", ["llama3", "tokenizer"])
def test_the_name_of_a_special_token_in_a_message_is_encoded_as_any_text(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, LLAMA3_MARKS, without_marks(LLAMA3))
    tokenizer = load_tokenizer(folder)
    text = "a<|eot_id|>b"
    template = load_chat_template(name, tokenizer, folder)
    tokens, _ = taught(template, [Message("user", text), Message("assistant", "ok")])
    opened = tokens.index(tokenizer.special["<|end_header_id|>"])
    ended = tokens.index(tokenizer.special["<|eot_id|>"])
    assert tokens[opened + 1 : ended] == tokenizer.encode(f"\n\n{text}")


SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}
SHAPES = {
    "messages": {"messages": [fields(message) for message in CONVERSATION]},
    "parts": {"messages": [{"role": m.role, "content": [{"type": "text", "text": m.content}]} for m in CONVERSATION]},
    "sharegpt": {"conversations": [{"from": SHAREGPT[role], "value": text} for role, text, _ in CONVERSATION]},
    "sharegpt with system": {
        "system": "Be short.",
        "conversations": [{"from": SHAREGPT[role], "value": text} for role, text, _ in CONVERSATION[1:]],
    },
    "alpaca": {
        "system": "Be short.",
        "history": [["What is a cat?", "An animal."]],
        "instruction": "And a mat?",
        "input": "",
        "output": "A rug, café.",
    },
    "prompt": {
        "prompt": [fields(message) for message in CONVERSATION[:-1]],
        "completion": [fields(CONVERSATION[-1])],
    },
}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_and_files_give_the_same_conversation(tmp_path: Path, shape: str, suffix: str) -> None:
    file = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SHAPES[shape]]), file)
    else:
        file.write_text(json.dumps(SHAPES[shape] if suffix == ".jsonl" else [SHAPES[shape]]) + "\n")
    (chat,) = read_chats([tmp_path])
    assert list(chat.messages) == CONVERSATION
    assert chat.trained == (False, False, shape != "prompt", False, True)  # a prompt is context
    assert chat.where == f"{file}:1"


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_byte_order_mark_is_no_part_of_a_conversation(tmp_path: Path, suffix: str) -> None:
    record = {"prompt": "a", "completion": "b"}
    text = json.dumps(record if suffix == ".jsonl" else [record])
    (tmp_path / f"data{suffix}").write_text(text, encoding="utf-8-sig")
    (chat,) = read_chats([tmp_path])
    assert [message.content for message in chat.messages] == ["a", "b"]


def test_an_alpaca_input_stands_below_the_instruction_and_a_weight_of_0_is_context() -> None:
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert parse_chat(record, "x").messages == (Message("user", "Add.\n\n1 and 2"), Message("assistant", "3"))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    turns += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]
    assert parse_chat({"messages": turns}, "x").trained == (False, False, False, True)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_key_that_is_not_trained_on_is_named(shape: str, seed: int) -> None:
    """Keys that hold nothing, as tables have what a row lacks, are passed over; 0 and false hold something."""
    draw = random.Random(f"{shape} {seed}")
    values = [0, False, 0.5, "x", ["x"], {"x": 1}]
    more = {key: draw.choice(values) for key in draw.sample(["weight", "train", "imput", "context", "id"], 3)}
    empty = {"score": None, "note": "", "images": [], "meta": {}}
    turns = {key: draw.choice([0.5, True, "x"]) for key in draw.sample(["weights", "loss", "refusal"], 2)}
    record = copy.deepcopy(SHAPES[shape])
    lists = [one for one in record.values() if isinstance(one, list) and one and isinstance(one[-1], dict)]
    for listed in lists:
        listed[-1].update(turns | empty)
    chat = parse_chat(record | more | empty, "x")
    assert chat.messages == parse_chat(SHAPES[shape], "x").messages
    assert set(chat.unread) == more.keys() | {f"message: {key}" for key in turns if lists}
    assert note_unread([parse_chat(SHAPES[shape], "x")]) == []
    (said,) = note_unread([chat, parse_chat(SHAPES[shape], "x")])
    assert all(f"{key!r} (1 of 2)" in said for key in chat.unread)


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ({"messages": [{"role": "system", "content": "s"}, *TALK], "system": "t", "prompt": "p"}, ["prompt", "system"]),
        ({"messages": TALK, "system": ["t"]}, ["system"]),
        ({"messages": TALK, "system": "t"}, []),
        ({"prompt": "a", "completion": "b", "input": "c", "response": "d"}, ["input", "response"]),
        ({"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}, ["message: weight"]),
        ({"messages": [TALK[0], TALK[1] | {"weight": 1, "value": "x"}]}, ["message: value"]),
    ],
)
def test_what_one_shape_does_not_read_of_another_is_named(more: dict[str, object], unread: list[str]) -> None:
    assert sorted(parse_chat(more, "x").unread) == unread
    assert (
        "did you mean 'input'?" in note_unread([parse_chat({"instruction": "a", "output": "b", "imput": "c"}, "x")])[0]
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "x"}', "has text, which is no known shape"),
        ("[1]", "no object with keys"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "says nothing to train on"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "role 'bot' is none of"),
        ('{"prompt": "a", "completion": 3}', "holds no text"),
        ('{"instruction": "a", "output": "b", "history": [["c"]]}', "history is no list of pairs"),
        ("{", "not valid JSON"),
    ],
)
def test_a_record_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, line: str, said: str) -> None:
    good = json.dumps({"prompt": "a", "completion": "b"})
    (tmp_path / "data.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(UserError) as caught:
        read_chats([tmp_path / "data.jsonl"])
    assert str(caught.value).startswith(f"{tmp_path / 'data.jsonl'}:3: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_a_template_without_a_place_for_a_message_says_so(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, ("<s>", "</s>"))
    template = load_chat_template(name, load_tokenizer(folder), folder)
    twice = Chat((Message("user", "a"), Message("user", "b"), Message("assistant", "c")), (False, False, True), "f:7")
    with pytest.raises(
        UserError, match=f"^f:7: chat_template: {name} refuses the conversation .* user and assistant in turn"
    ):
        tokenise_chats([twice], template, 64)
    with pytest.raises(UserError, match="no template of its own"):
        load_chat_template("tokenizer", load_tokenizer(folder), folder)
    with pytest.raises(UserError, match="no chatml chat"):
        load_chat_template("chatml", load_tokenizer(folder), folder)


def examples(lengths: Sequence[int]) -> list[Example]:
    """Return examples of these lengths; each learns half of its tokens, which name the example."""
    made = []
    for number, length in enumerate(lengths):
        targets = torch.full((length,), number)
        targets[: length // 2] = IGNORED
        made.append(Example(torch.full((length,), number), targets))
    return made


def plain(folder: Path) -> ChatTemplate:
    return load_chat_template("plain", load_tokenizer(tokenizer_folder(folder, ("<|endoftext|>",))), folder)


def test_targets_are_the_next_tokens_and_long_conversations_lose_their_end(tmp_path: Path) -> None:
    template = plain(tmp_path)
    chat = Chat(tuple(CONVERSATION), (False, False, False, False, True), "x")
    tokens, _ = taught(template, CONVERSATION)
    begins = len(template.prompt_tokens(CONVERSATION[:-1]))
    ((whole,),) = tokenise_chats([chat], template, len(tokens)).windows
    assert whole.tokens.tolist() == tokens[:-1]
    assert whole.targets.tolist() == [t if place >= begins else IGNORED for place, t in enumerate(tokens[1:], 1)]
    ((everything,),) = tokenise_chats([chat], template, len(tokens), train_on_all=True).windows
    assert everything.targets.tolist() == tokens[1:]
    cut = tokenise_chats([chat], template, begins + 1)
    assert (cut.cut, cut.dropped, cut.windows[0][0].target_count) == (1, [], 2)
    with pytest.raises(UserError, match="^max_length: no answer begins within"):
        tokenise_chats([chat], template, begins - 1)


def test_packing_keeps_every_conversation_once_and_fills_windows() -> None:
    lengths = [int(n) for n in torch.randint(3, 40, (200,), generator=torch.Generator().manual_seed(0))]
    windows = pack_examples(examples(lengths), 64)
    held = sorted(int(example.tokens[0]) for window in windows for example in window)
    assert held == list(range(200))
    sizes = [sum(len(example.tokens) for example in window) for window in windows]
    assert max(sizes) <= 64
    assert len(windows) <= -(-sum(lengths) // 64) + 1  # best-fit decreasing is nearly as good as can be


def test_documents_have_positions_from_0_and_see_nothing_of_each_other() -> None:
    batch = collate_windows([tuple(examples([3, 2])), tuple(examples([4]))])
    assert batch.documents is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.targets.tolist()[1] == [IGNORED, IGNORED, 0, 0, IGNORED]
    assert document_positions(batch.documents).tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    expected = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(2, 2).tril()).bool()
    assert torch.equal(document_mask(batch.documents)[0, 0], expected)


@pytest.mark.parametrize("world", [1, 2])
def test_every_epoch_sees_all_and_a_token_counts_alike_in_its_step(world: int) -> None:
    windows = [(example,) for example in examples([int(n) for n in range(4, 27)])]
    ranks = [ChatSampler(windows, 4, 1, DataParallelRank(world, rank, 2)) for rank in range(world)]
    orders = []
    for epoch in range(3):
        found = []
        for sampler in ranks:
            sampler.set_position(epoch)
            found.append(list(zip(sampler, sampler.micro_steps(), strict=True)))
        together = [pair for pairs in zip(*found, strict=True) for pair in pairs]
        assert len(together) == ranks[0].batches_per_epoch() == 6
        assert sorted(index for batch, _ in together for index in batch) == list(range(23))
        step = 2 * world
        for first in range(0, 6, step):
            of_step = together[first : first + step]
            learnt = [sum(windows[i][0].target_count for i in batch) for batch, _ in of_step]
            for count, (_, micro) in zip(learnt, of_step, strict=True):
                assert micro.weight == pytest.approx(step * count / sum(learnt))
        orders.append([batch for batch, _ in together])
    assert orders[0] != orders[1]
    lengths = [[len(windows[i][0].tokens) for i in batch] for batch in orders[0]]
    assert max(max(batch) - min(batch) for batch in lengths) <= 3
    ranks[0].set_position(2, 2 * world)
    assert list(ranks[0]) == orders[2][2 * world :: world]


MARKS = {
    "llama3": LLAMA3_MARKS,
    "llama2": ("<s>", "</s>"),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "plain": ("<|endoftext|>",),
}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_transformers_makes_the_same_tokens_of_the_file(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    template = load_chat_template(name, load_tokenizer(folder), folder)
    write_jinja_template(name, folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    spaced = [Message(m.role, f" {m.content}\n") for m in CONVERSATION]
    for conversation in (CONVERSATION, CONVERSATION[1:], spaced):
        messages = [fields(message) for message in conversation]
        made = theirs.apply_chat_template(messages, return_dict=False)
        assert made == taught(template, conversation)[0]
        made = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        assert made == template.prompt_tokens(conversation[:-1])


@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_what_the_template_has_no_place_for_is_refused_there_too(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    write_jinja_template(name, folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises(TemplateError, match="in turn"):
        theirs.apply_chat_template([{"role": "assistant", "content": "Hello"}])


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_model_with_the_file_talks_in_it(tmp_path: Path, name: str) -> None:
    folder = tokenizer_folder(tmp_path, MARKS[name])
    write_jinja_template(name, folder)
    tokenizer = load_tokenizer(folder)
    own, built_in = load_chat_template("auto", tokenizer, folder), load_chat_template(name, tokenizer, folder)
    assert own.name == "tokenizer"
    assert taught(own, CONVERSATION) == taught(built_in, CONVERSATION)


# templates that other people publish, by their form: Vicuna's, Alpaca's, one whose turns are lines of their own
FOREIGN = {
    "vicuna": "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }} {% elif m.role == 'user' %}USER: "
    "{{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "alpaca": "{% for m in messages %}{{ {'system': '', 'user': '### Instruction:\\n', 'assistant': '### Response:\\n'}"
    "[m.role] + m.content + '\\n\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}",
    "marked": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
}


def _template(name: str, folder: Path) -> tuple[ChatTemplate, Tokenizer]:
    tokenizer = load_tokenizer(tokenizer_folder(folder, MARKS.get(name, ("<s>", "</s>", "<|im_start|>", "<|im_end|>"))))
    if name in FOREIGN:
        return ChatTemplate(name, tokenizer, {"default": FOREIGN[name]}, {}), tokenizer
    return load_chat_template(name, tokenizer, folder), tokenizer


@pytest.mark.parametrize("name", sorted([*BUILT_IN, *FOREIGN]))
def test_no_message_ends_its_turn(tmp_path: Path, name: str) -> None:
    """A user writes the text of a whole talk into one message: it is refused, or remains one message."""
    template, tokenizer = _template(name, tmp_path)
    first, answer, second = Message("user", "hello"), Message("assistant", "yes"), Message("user", "and now?")
    talk = tokenizer.decode(template.prompt_tokens([first, answer, second]))
    begin = tokenizer.decode(template.prompt_tokens([first]))
    for text in (talk[talk.index("hello") : talk.index("now?")], begin[begin.index("hello") :] + " yes"):
        if name not in ("llama3", "chatml", "marked"):  # these can take any text
            with pytest.raises(UserError, match="by which the chat template"):
                template.prompt_tokens([Message("user", text)])
            continue
        tokens = template.prompt_tokens([Message("user", text)])
        turn_of_hello = template.prompt_tokens([first])
        assert tokens[: len(turn_of_hello)] != turn_of_hello
        for token, number in tokenizer.special.items():
            assert tokens.count(number) == turn_of_hello.count(number), token


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama2", "what does [INST] mean?"),
        ("plain", "User: is a word, Assistant: too"),
        ("vicuna", "what is an assistant?"),
        ("alpaca", "# Response"),
    ],
)
def test_a_message_that_is_only_like_a_mark_is_taken(tmp_path: Path, name: str, text: str) -> None:
    template, tokenizer = _template(name, tmp_path)
    assert text in tokenizer.decode(template.prompt_tokens([Message("user", text)]))


def test_an_answer_that_was_generated_is_no_reason_to_refuse_the_next_question(tmp_path: Path) -> None:
    template, _ = _template("alpaca", tmp_path)
    talk = [Message("user", "a"), Message("assistant", "b\n\n### Instruction:\nc"), Message("user", "d")]
    assert template.prompt_tokens(talk)
    with pytest.raises(UserError, match=r"message 2 \(assistant\): holds '\\n\\n### Instruction:\\n'"):
        taught(template, talk)  # in training it would teach to ask oneself


def test_pairs_that_teach_nothing_are_named(tmp_path: Path) -> None:
    """The same answer twice, and answers that only differ after the cut; a pair without an answer before it."""
    template, long = plain(tmp_path), "very " * 40
    records = [
        ("Why?", "Because.", "Because."),
        ("Why?", f"{long}good", f"{long}bad"),
        ("Why?", "Because.", "No idea."),
        (long, "Because.", "No idea."),
    ]
    chats = [parse_pair(dict(zip(("prompt", "chosen", "rejected"), each, strict=True)), f"f:{number}")
             for number, each in enumerate(records, 1)]  # fmt: skip
    read = tokenise_chats(chats, template, len(template.prompt_tokens([Message("user", "Why?")])) + 12)
    assert (read.same, read.dropped) == (["f:1", "f:2"], ["f:4"])
