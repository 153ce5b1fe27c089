"""Cards of the images as training sees them: boxes, what the model is given, captions, findings, and how many."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
from PIL import Image

from library.conditions import ConditionKind
from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.gallery import BucketCards, Card, gallery
from library.data.lint import Finding
from library.data.samples import scan
from tests.data.folders import add_image, make_old, write_toml


def cards_of(
    toml: Path, kind: ConditionKind = "none", most: int = 100, findings: tuple[Finding, ...] = ()
) -> list[BucketCards]:
    config = load_dataset_config(toml, DatasetArguments(dataset_config=str(toml)), kind)
    found = scan(config, 0, 16, 1.0, kind)
    counted = [("words", 0, 3)]
    return gallery(
        [*found.train, *found.held_out],
        findings,
        0,
        most,
        lambda text: [(n, len(text.split()), m) for n, _, m in counted],
    )


def pixels(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")).astype(int)


def only(buckets: list[BucketCards]) -> Card:
    (bucket,) = buckets
    (card,) = bucket.cards
    return card


def test_the_box_is_the_part_that_is_trained_on(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", (128, 64), caption="one two three four")
    card = only(cards_of(write_toml(tmp_path)))
    assert card.box == (25.0, 0.0, 50.0, 100.0)  # by hand: the middle half of 128 x 64 at 64 x 64
    assert (card.size, card.repeats, card.tokens) == ("128x64", 1, [("words", 4, 3)])
    assert card.captions == ["one two three four"]


def test_a_region_to_fill_is_shown_as_the_model_is_given_it(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    Image.new("RGB", (64, 64), "white").save(tmp_path / "img" / "a.png")
    (tmp_path / "img" / "a.txt").write_text("x")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 32, 64))
    (tmp_path / "m").mkdir()
    mask.save(tmp_path / "m" / "a.png")
    toml = write_toml(tmp_path, subset="image_dir = 'img'\ninpaint_mask_directory = 'm'")
    ((what, picture),) = only(cards_of(toml, "fill")).besides
    shown = pixels(picture)
    assert what == "given to fill"
    assert abs(shown[:, :24].mean() - 127.5) < 4  # half grey, zero in [-1, 1]
    assert shown[:, 40:].mean() > 250


def test_control_images_stand_beside_their_image(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "from", "a.png", caption=None)
    toml = write_toml(tmp_path, subset="image_dir = 'img'\ncontrol_directory = 'from'")
    assert [what for what, _ in only(cards_of(toml, "references")).besides] == ["control image"]


def test_cards_are_bounded_and_those_with_findings_come_first(tmp_path: Path) -> None:
    for number in range(12):
        add_image(tmp_path / "img", f"{number:02d}.png", (64, 64), seed=number)
    bad = Finding("bars", (str(tmp_path / "img" / "11.png"),), "11.png: even bars")
    (bucket,) = cards_of(write_toml(tmp_path), most=3, findings=(bad,))
    assert (bucket.images, len(bucket.cards)) == (12, 3)
    assert [card.name for card in bucket.cards if card.findings == [bad]] == ["11.png"]


def test_an_image_broken_since_is_a_card_that_says_so(tmp_path: Path) -> None:
    path = add_image(tmp_path / "img", "a.png", (64, 64))
    path.write_bytes(path.read_bytes()[:2000])
    make_old(path)
    card = only(cards_of(write_toml(tmp_path)))
    assert card.picture is None
    assert card.problem is not None
    assert "damaged image" in card.problem
