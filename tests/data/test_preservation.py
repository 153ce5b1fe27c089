"""Which samples of an epoch preserve, with which captions, and how many of each kind there are."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from library.config.schema import DatasetArguments, PreservationConfig
from library.data.batches import collate
from library.data.config import DatasetConfig, load_dataset_config
from library.data.dataset import Painted, TrainingData, build_dataset
from library.data.sources import generated_record
from library.errors import UserError
from tests.data.folders import AverageEncoder, LettersEncoder, add_image, write_toml

EPOCHS = 60


def build(toml: Path, painted: Painted | None = None, weight: float = 0.5, **asked: object) -> TrainingData:
    preservation = PreservationConfig(preserve="prior", **asked)
    return build_dataset(load(toml), 3, 16, 8, weight, preservation, painted)


def load(toml: Path) -> DatasetConfig:
    return load_dataset_config(toml, DatasetArguments(dataset_config=str(toml)))


def folder_of(path: Path, images: int, caption: str) -> Path:
    for number in range(images):
        add_image(path, f"{number}.png", caption=caption, seed=number)
    return path


def seen(data: TrainingData) -> Counter[tuple[str, bool]]:
    """Return how often each caption is seen with and without the frozen model's answer in :data:`EPOCHS` epochs."""
    found: Counter[tuple[str, bool]] = Counter()
    for epoch in range(EPOCHS):
        for batch in data.batch_sampler().plan_epoch(epoch):
            sources = [data.train.source((epoch, index)) for index in batch]
            found.update((source.text.caption, source.prior) for source in sources)
    return found


def test_a_share_of_the_appearances_has_the_class_for_the_trigger_and_the_frozen_answer(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 10, "a zorbo on a Zorbo's zorbomat")
    found = seen(
        build(write_toml(tmp_path, general='trigger_word = "zorbo"'), preserve_class="toy", preserve_share=0.3)
    )
    assert set(found) == {("a zorbo on a Zorbo's zorbomat", False), ("a toy on a toy's zorbomat", True)}
    # 600 draws of a share of 0.3: four standard deviations are 0.075
    assert found["a toy on a toy's zorbomat", True] / found.total() == pytest.approx(0.3, abs=0.075)


def test_the_share_is_that_of_all_samples_whatever_kinds_there_are(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 12, "a zorbo")
    folder_of(tmp_path / "reg", 3, "a house")
    toml = write_toml(tmp_path, general='trigger_word = "zorbo"')
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\n")
    found = seen(build(toml, preserve_class="toy", preserve_blank=True, preserve_share=0.3))
    kinds = {key: count / found.total() for key, count in found.items()}
    assert kinds.keys() == {("a zorbo", False), ("a toy", True), ("", True), ("a house", True)}
    # a tenth each; of twelve images two regularisation ones are the next whole number: 2 / 14
    assert kinds["a house", True] == pytest.approx(2 / 14, abs=1e-9)
    assert kinds["a toy", True] == pytest.approx(0.1, abs=0.04)
    assert kinds["", True] == pytest.approx(0.1, abs=0.04)


def test_without_preserve_regularisation_images_are_half_of_an_epoch_with_their_own_targets(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 4, "a zorbo")
    folder_of(tmp_path / "reg", 3, "a house")
    toml = write_toml(tmp_path)
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\n")
    data = build_dataset(load(toml), 3, 16, 8)
    assert seen(data) == {("a zorbo", False): 4 * EPOCHS, ("a house", False): 4 * EPOCHS}


def test_each_concept_has_its_own_trigger_and_class(tmp_path: Path) -> None:
    folder_of(tmp_path / "one", 4, "a zorbo")
    folder_of(tmp_path / "two", 4, "a mup")
    folder_of(tmp_path / "three", 4, "a thing")
    toml = write_toml(tmp_path, subset="image_dir = 'one'\ntrigger_word = 'zorbo'\npreserve_class = 'toy'")
    toml.write_text(
        toml.read_text()
        + "[[datasets.subsets]]\nimage_dir = 'two'\ntrigger_word = 'mup'\nnum_repeats = 2\n"
        + "[[datasets.subsets]]\nimage_dir = 'three'\n"
    )
    found = seen(build(toml, preserve_class="animal", preserve_share=0.5))
    assert {caption for caption, prior in found if prior} == {"a toy", "a animal"}
    assert found["a mup", False] + found["a animal", True] == 2 * 4 * EPOCHS
    assert found["a thing", False] == 4 * EPOCHS


def test_what_preserves_is_cached_weighs_as_regularisation_images_and_counts_everywhere(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 6, "a zorbo")
    data = build(
        write_toml(tmp_path, general='trigger_word = "zorbo"'), preserve_class="toy", preserve_share=0.5, weight=0.25
    )
    assert set(data.captions()) == {"a zorbo", "a toy"}
    data.missing_latents("vae-1")
    data.missing_text("letters-1")
    encoder = LettersEncoder()
    data.cache_latents(AverageEncoder(), 4, lambda *_: lambda _: None)
    data.cache_text(encoder, [], 4, lambda *_: lambda _: None)
    batch = collate([data.train[epoch, index] for epoch in range(3) for index in range(6)])
    assert any(batch.prior)
    assert not all(batch.prior)
    assert batch.loss_weights.tolist() == [0.25 if prior else 1.0 for prior in batch.prior]
    assert [caption == "a toy" for caption in batch.captions] == batch.prior
    part = batch.rows([1, 3])
    assert (part.prior, part.sample_ids) == (
        [batch.prior[1], batch.prior[3]],
        [batch.sample_ids[1], batch.sample_ids[3]],
    )


def test_held_out_images_are_never_seen_with_the_class(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 8, "a zorbo")
    toml = write_toml(tmp_path, "validation_split = 0.25", general='trigger_word = "zorbo"')
    data = build(toml, preserve_class="toy", preserve_share=0.9)
    assert data.validation is not None
    sources = [data.validation.source((epoch, i)) for epoch in range(20) for i in range(len(data.validation))]
    assert {(source.text.caption, source.prior) for source in sources} == {("a zorbo", False)}


def test_painted_images_are_regularisation_images_of_every_resolution_and_measured_ones_are_not_trained_on(
    tmp_path: Path,
) -> None:
    folder_of(tmp_path / "img", 9, "a zorbo")
    kept = folder_of(tmp_path / "kept", 5, "a house")
    general = folder_of(tmp_path / "general", 2, "a tree")
    toml = write_toml(tmp_path)
    toml.write_text(
        toml.read_text() + "[[datasets]]\nresolution = 32\n[[datasets.subsets]]\nimage_dir = 'img'\nnum_repeats = 2\n"
    )
    *pictures, of_another_prompt, stranger = sorted(kept.glob("*.png"))
    generated_record(of_another_prompt).write_text("[]")
    generated_record(pictures[0]).write_text("[]")
    namesake = shutil.copy(stranger, pictures[0].with_suffix(".bmp"))
    data = build(toml, Painted(pictures, sorted(general.glob("*.png"))), preserve_share=0.25)
    (said,) = [line for line in data.describe() if "left out" in line]
    reason = "left out, as the base has not generated them"
    assert said.endswith(f"generated images in {kept}: {reason}: {namesake.name}, {stranger.name}")
    found = seen(data)
    assert found == {("a zorbo", False): 27 * EPOCHS, ("a house", True): (3 + 6) * EPOCHS}
    assert data.general is not None
    assert [sample.caption for sample in data.general.samples] == ["a tree", "a tree"]
    assert "a tree" in data.captions()
    assert ", 0 images held out, " in " ".join(data.describe())  # of the dataset


def test_a_class_without_a_trigger_word_ends_in_a_line(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 2, "a zorbo")
    with pytest.raises(UserError, match=r"dataset\.toml: preserve_class: .*set trigger_word"):
        build(write_toml(tmp_path), preserve_class="toy")


def test_a_class_in_the_dataset_of_a_run_that_does_not_preserve_is_noted(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 2, "a zorbo")
    toml = write_toml(tmp_path, general='trigger_word = "zorbo"\npreserve_class = "toy"')
    data = build_dataset(load(toml), 3, 16, 8)
    assert any('no effect without preserve = "prior": preserve_class' in line for line in data.describe())
    assert not any("no effect" in line for line in build(toml).describe())


@pytest.mark.parametrize("word", ["Zorbo", "purple zorbo"])
def test_a_class_that_holds_the_trigger_word_ends_in_a_line(tmp_path: Path, word: str) -> None:
    folder_of(tmp_path / "img", 2, "a zorbo")
    with pytest.raises(UserError, match=f"preserve_class '{word}' holds the trigger word 'zorbo'"):
        build(write_toml(tmp_path, general='trigger_word = "zorbo"'), preserve_class=word)


def test_a_split_that_holds_out_nothing_counts_what_could_be_held_out(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 1, "a zorbo")
    folder_of(tmp_path / "reg", 3, "a tree")
    subsets = "image_dir = 'img'\n[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true"
    with pytest.raises(UserError, match=r"holds out none of 1 image; add images, or set 0"):
        build(write_toml(tmp_path, "validation_split = 0.25", subsets))


def test_more_regularisation_images_than_an_epoch_takes_are_seen_in_turn_as_many_of_each_size(tmp_path: Path) -> None:
    folder_of(tmp_path / "img", 9, "a zorbo")
    for number in range(7):
        size = (64, 64) if number < 5 else (128, 64)
        add_image(tmp_path / "reg", f"{number}.png", size, caption=f"house {number}", seed=number)
    toml = write_toml(tmp_path, "enable_bucket = true\nbucket_reso_steps = 64")
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\n")
    data = build(toml, preserve_share=0.25)  # three of seven an epoch
    batches = {data.batch_sampler().batches_per_epoch()}
    epochs = []
    for epoch in range(14):
        plan = data.batch_sampler().plan_epoch(epoch)
        batches.add(len(plan))
        sources = [data.train.source((epoch, index)) for batch in plan for index in batch]
        epochs.append(sorted(source.text.caption for source in sources if source.prior))
        for batch in plan:  # whatever is in turn, the samples of a batch have one size
            assert len({data.train.source((epoch, index)).sample.fit.bucket for index in batch}) == 1
        assert all(data.train.samples_of([source.sample_id])[0] is source.sample for source in sources)
    assert len(batches) == 1
    assert all(len(set(each)) == 3 for each in epochs)
    counts = Counter(caption for each in epochs for caption in each)
    assert set(counts) == {f"house {number}" for number in range(7)}
    small, large = ([counts[f"house {n}"] for n in numbers] for numbers in (range(5), range(5, 7)))
    assert max(small) - min(small) <= 1
    assert max(large) - min(large) <= 1
    assert any("7 images x 1, 3 an epoch in turn" in line for line in data.describe())
