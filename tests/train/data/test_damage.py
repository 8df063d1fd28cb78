"""Images that do not decode are counted, named and skipped, up to a stated share."""

import warnings
from functools import partial

import pytest
import torch
from pictures import UNTOUCHED, joined, numbers, open_small, same, write_folder, write_shards
from PIL import Image

from gsanet.train.data import DamagedDataError, memory
from gsanet.train.data.damage import Damage, skipped_words

HOW = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"this is no image",
    "flipped bytes": lambda data: data[:60] + bytes(255 - byte for byte in data[60:]),
}


@pytest.fixture(params=["memory", "loader", "shards"])
def kind(request):
    return request.param


@pytest.fixture
def spoilt(kind, tmp_path):
    """Damage some of 30 training and 15 held-out pictures; returns a function that opens them."""

    def write(damaged, how="truncated"):
        def spoil(number, data):
            return HOW[how](data) if number in damaged else data

        if kind == "shards":
            write_shards(tmp_path / "train", (13, 17), size=(20, 24), spoil=spoil)
            write_shards(tmp_path / "val", (15,), start=30, size=(20, 24), spoil=spoil)
            return partial(open_small, f"wds:{tmp_path}/train/*.tar|{tmp_path}/val/*.tar", batch_size=6)
        write_folder(tmp_path)
        for file in tmp_path.glob("*/*/*.png"):
            file.write_bytes(spoil(int(file.stem), file.read_bytes()))
        return partial(open_small, tmp_path, kind, batch_size=6)

    return write


@pytest.mark.parametrize(("how", "workers"), [*((how, 0) for how in HOW), ("truncated", 2)])
def test_damaged_images_are_named_and_batches_stay_whole(spoilt, how, workers):
    data = spoilt({4, 5, 29, 30}, how)(max_bad_fraction=0.1, workers=workers)
    assert [len(labels) for _, labels in data.train.batches(0)] == [6] * 5
    assert sum(len(labels) for _, labels in data.val.batches()) == 14
    assert sorted(name.rpartition("/")[2][:4] for name in data.bad_files()) == ["0004", "0005", "0029", "0030"]


@pytest.mark.parametrize(("how", "reason"), [("truncated", "truncated"), ("text", "not an image of a known kind")])
def test_it_is_said_why_an_image_does_not_decode(spoilt, how, reason):
    data = spoilt({4}, how)(max_bad_fraction=0.1)
    list(data.train.batches(0))
    ((name, why),) = data.bad_files().items()
    assert reason in why
    assert skipped_words(data.bad_files()) == f"1 image could not be decoded and was skipped: {name} ({why})"


@pytest.mark.parametrize("workers", [0, 2])
def test_large_photographs_are_taken_without_a_word(spoilt, workers, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20 * 24 - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which would be damage
        data = spoilt(set())(workers=workers)
        assert len(list(data.train.batches(0))) == 5
    assert data.bad_files() == {}


def test_larger_ones_are_named_with_their_size(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "train" / "bee" / "0012.png"
    Image.new("1", (20_000, 10_000)).save(file)
    data = open_small(tmp_path, "loader", max_bad_fraction=0.1)
    list(data.train.batches(0))
    assert data.bad_files() == {str(file): "over 178 megapixels"}
    assert skipped_words(data.bad_files()).endswith(
        f"1 image could not be decoded and was skipped: {file} (over 178 megapixels)"
    )


def test_a_sound_sample_takes_the_place_of_a_damaged_one(spoilt, kind):
    data = spoilt({4, 5, 29, 30})(max_bad_fraction=0.1, **UNTOUCHED)
    seen = numbers(data.train.batches(0))
    assert set(seen) == set(range(30)) - {4, 5, 29}
    assert sorted(numbers(data.val.batches())) == list(range(31, 45))
    if kind != "shards":  # where neighbours are known: the next one
        assert sorted(seen) == sorted([*(set(range(30)) - {4, 5, 29}), 6, 6, 0])


def test_damage_keeps_the_order_exact(spoilt):
    open_it = partial(spoilt({0, 1, 4, 5, 13, 28, 29}), max_bad_fraction=0.4)
    train = open_it().train
    whole = list(train.batches(3))
    for start in range(6):
        assert same(train.batches(3, start), whole[start:])
    parts = [open_it(rank=rank, world_size=2, workers=2).train.batches(3, 1) for rank in range(2)]
    assert same(joined(parts), whole[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_too_much_damage_stops_with_one_sentence(spoilt, workers):
    with pytest.raises(DamagedDataError) as error:
        list(spoilt({3, 4, 5, 6})(max_bad_fraction=0.1, workers=workers).train.batches(0))
    message = str(error.value)
    assert "4 of 30 training images do not decode (13.33%, and data.max_bad_fraction allows 10.00%)" in message
    assert sum(f"000{number}" in message for number in (3, 4, 5, 6)) == 3
    assert " and 1 more. " in message
    assert message.endswith("Remove them, or allow so many with `--set data.max_bad_fraction=0.14` or more")
    assert "\n" not in message


@pytest.mark.parametrize(("found", "total", "least"), [(1, 24, 0.05), (29, 100, 0.3), (1, 1000, 0.01), (99, 100, 0.99)])
def test_the_limit_that_is_named_is_enough(found, total, least):
    names = [(f"{number}.jpg", "truncated") for number in range(found)]
    with pytest.raises(DamagedDataError, match=rf"Remove (it|them), or allow .*max_bad_fraction={least}` or more$"):
        Damage("training", total, 0.0).add(names)
    Damage("training", total, least).add(names)


def test_no_limit_is_named_where_none_is_enough():
    with pytest.raises(DamagedDataError, match=r"\. Remove them$"):
        Damage("training", 2, 0.0).add([("a.jpg", "truncated"), ("b.jpg", "truncated")])


def test_all_damaged_images_are_found_where_they_are_decoded_at_the_start(folder, monkeypatch):
    monkeypatch.setattr(memory, "CHUNK", 4)
    for number in (3, 9, 15, 21, 27):
        next(folder.glob(f"train/*/{number:04d}.png")).write_bytes(b"")
    with pytest.raises(DamagedDataError, match=r"^5 of 30 training images do not decode .* and 2 more\. Remove them"):
        _ = open_small(folder, "memory", max_bad_fraction=0.0).train


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_damage_stops_too(spoilt, workers):
    data = spoilt(set(range(45)))(max_bad_fraction=0.5, workers=workers)
    with pytest.raises(DamagedDataError, match="training images do not decode"):
        list(data.train.batches(0))
    with pytest.raises(DamagedDataError, match="held-out images do not decode"):
        list(data.val.batches())


def test_both_paths_replace_alike(folder):
    """The same sample in the same place, seen through the view of the sample that it stands in for."""
    for number in (4, 5, 29):
        next(folder.glob(f"train/*/{number:04d}.png")).write_bytes(b"")
    memory, loader = (open_small(folder, kind, max_bad_fraction=0.1).train for kind in ("memory", "loader"))
    for (images, labels), (same_images, same_labels) in zip(memory.batches(0), loader.batches(0), strict=True):
        assert torch.equal(labels, same_labels)
        assert (images - same_images).abs().max() * 0.229 * 255 < 1.5


def test_images_are_decoded_once_where_that_is_asked_for(folder, monkeypatch):
    """The second time, nothing is read, and what was damaged is named again."""
    next((folder / "train").glob("*/*.png")).write_bytes(b"this is no image")
    decoded = []
    real = memory.decode
    monkeypatch.setattr(memory, "decode", lambda open_image: (decoded.append(1), real(open_image))[1])
    with memory.decoded_once():
        first, second = (open_small(folder, "memory", max_bad_fraction=0.5) for _ in range(2))
        assert same(first.train.batches(0), second.train.batches(0))
        assert len(decoded) == first.train.num_samples
    assert first.bad_files() == second.bad_files() != {}
    list(open_small(folder, "memory", max_bad_fraction=0.5).train.batches(0))
    assert len(decoded) == 2 * first.train.num_samples
