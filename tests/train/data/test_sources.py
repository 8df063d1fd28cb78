"""Every kind of data set opens; what is wrong with one is said in a sentence."""

import json
import pickle
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import CLASSES, UNTOUCHED, numbers, open_small, picture, write_folder
from PIL import Image

from gsanet.images import find_images, read_image
from gsanet.train.data import DataSettings, too_few
from gsanet.train.data.damage import decode
from gsanet.train.data.settings import Plan
from gsanet.train.data.sources import FolderSource, open_splits


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_folder(folder, name):
    (folder / "val").rename(folder / name)
    data = open_small(folder, **UNTOUCHED)
    assert data.class_names == list(CLASSES)
    assert (data.num_classes, data.train.num_samples, data.val.num_samples) == (3, 30, 15)
    assert data.description == f"{folder}: 30 training and 15 held-out images of 3 classes"
    assert sorted(numbers(data.val.batches())) == list(range(30, 45))
    labels = torch.cat([labels for _, labels in data.val.batches()])
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert data.bad_files() == {}


def test_what_is_hidden_is_no_data(folder):
    """As notes of macOS, and copies that a notebook keeps."""
    for place in (
        "train/ant/._0000.png",
        "train/ant/.ipynb_checkpoints/a.png",
        "val/.Trash/a.png",
        "train/.cache/a.png",
    ):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(b"no image")
    data = open_small(folder, batch_size=6, **UNTOUCHED)
    assert data.class_names == list(CLASSES)
    assert (data.train.num_samples, data.val.num_samples) == (30, 15)
    assert sorted(numbers(data.train.batches(0))) == list(range(30))
    assert find_images([folder / "train"]) == sorted(map(str, (folder / "train").glob("*/0*.png")))
    for name in CLASSES:
        (folder / "val" / name).rename(folder / "val" / f".{name}")
    with pytest.raises(FileNotFoundError, match="val holds no class folders"):
        open_small(folder)


def test_training_sees_what_prediction_reads(tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be seen upright it is turned clockwise
    picture(0).save(folder / "turned.png", exif=exif)
    clear = picture(1)
    clear.putalpha(100)
    clear.save(folder / "clear.png")
    Image.fromarray(np.arange(0, 480 * 128, 128, dtype=np.uint16).reshape(20, 24)).save(folder / "deep.png")
    source = FolderSource(tmp_path)
    sizes = {}
    for index in range(len(source)):
        image, _ = decode(partial(source.open, index))
        assert np.array_equal(image, read_image(source.name(index)).image), source.name(index)
        with Image.open(source.name(index)) as plain:
            assert not np.array_equal(image, plain.convert("RGB")), source.name(index)
        sizes[Path(source.name(index)).stem] = image.size
    assert sizes == {"clear": (24, 20), "deep": (24, 20), "turned": (20, 24)}


def test_held_out_split_alone(folder):
    shutil.rmtree(folder / "train")
    from gsanet.train.data import open_data

    settings = DataSettings(**UNTOUCHED, workers=0)
    data = open_data(str(folder), settings, batch_size=64, seed=0, device=torch.device("cpu"), train=False)
    assert sorted(numbers(data.val.batches())) == list(range(30, 45))
    with pytest.raises(ValueError, match="only the held-out split"):
        _ = data.train


@pytest.mark.parametrize("kind", ["memory", "loader"])
def test_a_part_of_the_training_images_is_held_out(folder, kind):
    parts = []
    for seed in (0, 1):
        data = open_small(folder, kind, batch_size=8, seed=seed, **UNTOUCHED, holdout=0.2)
        assert (data.train.num_samples, data.val.num_samples) == (24, 6)
        trained_on = {number for epoch in range(4) for number in numbers(data.train.batches(epoch))}
        parts.append(sorted(numbers(data.val.batches())))
        assert trained_on | set(parts[-1]) == set(range(30))
        assert not trained_on & set(parts[-1])
    assert parts[0] == parts[1]  # whatever the seed
    assert f"{folder}, held out of its training images: 24 training and 6 held-out" in data.description
    shutil.rmtree(folder / "val")
    with pytest.raises(FileNotFoundError, match="has no held-out split"):
        open_small(folder, kind, **UNTOUCHED, holdout=0.2)


def test_a_part_of_arrays_is_held_out():
    data = open_small("digits", batch_size=32, img_size=(8, 8), holdout=0.1)
    whole = open_small("digits", batch_size=32, img_size=(8, 8))
    assert (data.train.num_samples, data.val.num_samples) == (1293, 144)
    pixels = {each.numpy().tobytes() for images, _ in data.val.batches() for each in images}
    assert len(pixels & {each.numpy().tobytes() for images, _ in whole.val.batches() for each in images}) < 3


def test_what_cannot_be_held_out(folder, shards):
    with pytest.raises(ValueError, match="holdout takes 0 of 30 training images"):
        open_small(folder, holdout=0.001)
    with pytest.raises(ValueError, match="tar shards are not indexed"):
        open_small(f"wds:{shards}/train/*.tar|{shards}/val/*.tar", "shards", holdout=0.1)
    with pytest.raises(ValueError, match="data setting holdout must be from 0 to below 1, got 1"):
        DataSettings(img_size=(8, 8), holdout=1.0)


def remove_train(root):
    shutil.rmtree(root / "train")


def remove_val(root):
    shutil.rmtree(root / "val")


def empty_a_class(root):
    for file in (root / "train" / "bee").iterdir():
        file.unlink()


def remove_a_class(root):
    shutil.rmtree(root / "val" / "bee")


def add_a_class(root):
    shutil.copytree(root / "val" / "bee", root / "val" / "wasp")


def flatten(root):
    for file in (root / "train").glob("*/*"):
        file.rename(root / "train" / file.name)
    for name in CLASSES:
        (root / "train" / name).rmdir()


def keep_no_images(root):
    for file in (root / "val").glob("*/*"):
        file.rename(file.with_suffix(".txt"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "no folder"),
        (remove_train, "has no training split: it needs a folder named train"),
        (remove_val, "has no held-out split: it needs a folder named val or validation or test"),
        (empty_a_class, "train has class folders without images: bee"),
        (remove_a_class, "val/ lacks class folders that train/ has: bee"),
        (add_a_class, "val/ has class folders that train/ lacks: wasp"),
        (flatten, "train holds no class folders"),
        (keep_no_images, "val holds no images in its class folders"),
    ],
)
def test_what_is_wrong_with_a_folder(folder, spoil, message):
    spoil(folder)
    with pytest.raises(FileNotFoundError, match=message) as error:
        open_small(folder)
    assert "\n" not in str(error.value)


def test_small_images_of_one_size_are_kept_in_memory(tmp_path):
    small = open_small(write_folder(tmp_path / "small"))
    large = open_small(write_folder(tmp_path / "large", sizes=((20, 130),)))
    mixed = open_small(write_folder(tmp_path / "mixed", sizes=((20, 24), (24, 20))))
    kinds = [type(data.train.store).__name__ for data in (small, large, mixed)]
    assert kinds == ["MemoryStore", "LoaderStore", "LoaderStore"]


def test_one_image_of_another_size_among_many_is_found(tmp_path):
    """Only some sizes are looked at before the choice; one that turns up later changes the path, and nothing else."""
    write_folder(tmp_path, train=100)
    odd = tmp_path / "train" / "ant" / "0001.png"
    picture(1, (50, 40)).save(odd)
    data = open_small(tmp_path)
    assert type(data.train.store).__name__ == "LoaderStore"
    assert sum(len(labels) for _, labels in data.train.batches(0)) == 296


def test_images_of_several_sizes_are_resized_once_if_asked(tmp_path):
    write_folder(tmp_path, sizes=((20, 24), (60, 30), (10, 10)))
    data = open_small(tmp_path, in_memory=True)
    assert data.train.store.images.shape == (30, 16, 3, 16)
    assert next(data.train.batches(0))[0].shape == (8, 3, 16, 16)


def test_digits_are_split_the_same_way_every_time():
    data, again = (open_small("digits") for _ in range(2))
    assert (data.train.num_samples, data.val.num_samples, data.num_classes) == (1437, 360, 10)
    train, val = ([np.asarray(split.open(i)[0]) for i in range(len(split))] for split in two_splits("digits"))
    assert len({image.tobytes() for image in train} & {image.tobytes() for image in val}) == 0
    assert train[0].shape == (8, 8, 3)
    assert max(image.max() for image in train) == 255
    counts = Counter(torch.cat([labels for _, labels in data.val.batches()]).tolist())
    assert set(counts) == set(range(10))
    assert max(counts.values()) - min(counts.values()) <= 2  # stratified
    for one, other in zip(data.train.batches(0), again.train.batches(0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def two_splits(path):
    splits = open_splits(path)
    return splits.train, splits.val


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, monkeypatch, name):
    """Files of torchvision's layout, made up; their checksums cannot be right and are not looked at."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    pixels = np.stack([np.asarray(picture(number, (32, 32))) for number in range(30)])
    rows = pixels.transpose(0, 3, 1, 2).reshape(30, -1)
    root = tmp_path / {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}[name]
    root.mkdir()
    if name == "cifar10":
        parts = {f"data_batch_{part + 1}": slice(part * 4, part * 4 + 4) for part in range(5)}
        files = {file: {"data": rows[each], "labels": [part % 3 for part in range(4)]} for file, each in parts.items()}
        files["test_batch"] = {"data": rows[20:], "labels": [1] * 10}
        files["batches.meta"] = {"label_names": list(CLASSES)}
    else:
        files = {
            "train": {"data": rows[:20], "fine_labels": [0, 1, 2, 0] * 5},
            "test": {"data": rows[20:], "fine_labels": [1] * 10},
            "meta": {"fine_label_names": list(CLASSES)},
        }
    for file, content in files.items():
        (root / file).write_bytes(pickle.dumps(content))
    data = open_small(f"{name}:{tmp_path}", img_size=(32, 32), augment="none", crop_pct=1.0)
    assert data.class_names == list(CLASSES)
    assert (data.train.num_samples, data.val.num_samples) == (20, 10)
    image, label = open_splits(f"{name}:{tmp_path}").train.open(6)
    assert np.array_equal(np.asarray(image), pixels[6])
    assert label == 2
    assert torch.cat([labels for _, labels in data.val.batches()]).tolist() == [1] * 10


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_that_is_not_there_is_not_downloaded(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"does not hold {name} whole"):
        open_small(f"{name}:{tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_what_timm_opens(folder):
    data = open_small(f"timm:folder:{folder}", max_bad_fraction=0.1, **UNTOUCHED)
    assert data.class_names == list(CLASSES)
    assert (data.train.num_samples, data.val.num_samples) == (30, 15)
    assert sorted(numbers(data.val.batches())) == list(range(30, 45))


def test_damaged_files_behind_timm_are_named(folder):
    (folder / "val" / "bee" / "0037.png").write_bytes(b"nothing")
    data = open_small(f"timm:folder:{folder}", max_bad_fraction=0.1, **UNTOUCHED)
    assert sorted(numbers(data.val.batches())) == sorted(set(range(30, 45)) - {37})
    assert list(data.bad_files()) == [str(folder / "val" / "bee" / "0037.png")]


def test_what_timm_cannot_open_or_index_is_refused(shards):
    with pytest.raises(ValueError, match="timm cannot open the validation split of 'folder': Found 0 images"):
        open_small(f"timm:folder:{shards}")
    with pytest.raises(ValueError, match="timm needs the folder of 'folder': timm:folder:FOLDER"):
        open_small("timm:folder")
    split = {"name": "part", "filenames": ["shard-00.tar"], "shard_lengths": [6], "num_samples": 6}
    (shards / "val" / "_info.json").write_text(json.dumps({"splits": {"train": split, "validation": split}}))
    with pytest.raises(ValueError, match="timm can only stream 'wds/digits': give its tar shards"):
        open_small(f"timm:wds/digits:{shards / 'val'}")


def test_fewer_images_than_a_batch(folder):
    with pytest.raises(ValueError, match="30 training images, fewer than one batch of 31: `--set batch_size=4` takes"):
        open_small(folder, batch_size=31)


@pytest.mark.parametrize(("images", "batch"), [(1, 1), (3, 1), (7, 1), (8, 2), (48, 8), (63, 8), (64, 16), (511, 64)])
def test_the_smaller_batch_that_is_named_is_a_quarter_of_the_images_or_less(images, batch):
    assert f"`--set batch_size={batch}` takes smaller batches, for which lr" in too_few(images, 512)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("img_size", (0, 8)),
        ("mean", (0.5,)),
        ("std", (1.0, 0.0, 1.0)),
        ("augment", "mirror"),
        ("padding", -1),
        ("scale", (0.5, 0.1)),
        ("ratio", (0.0, 1.0)),
        ("flip", 1.5),
        ("crop_pct", 0.0),
        ("workers", -1),
        ("max_bad_fraction", 1.0),
    ],
)
def test_settings_that_cannot_work_are_named(setting, value):
    with pytest.raises(ValueError, match=f"data setting {setting} must be"):
        DataSettings(**{"img_size": (16, 16), setting: value})


def test_padding_must_leave_something_of_the_image():
    with pytest.raises(ValueError, match="data setting padding must be 0 or more, and below img_size, got 16"):
        DataSettings(img_size=(20, 16), augment="crop", padding=16)


def test_padding_is_of_the_input_not_of_the_file():
    data = open_small("digits", img_size=(32, 32), augment="crop", padding=12)
    assert next(data.train.batches(0))[0].shape == (8, 3, 32, 32)


@pytest.mark.parametrize(("batch_size", "rank", "world_size"), [(7, 0, 2), (0, 0, 1), (8, 2, 2)])
def test_shares_that_cannot_be(batch_size, rank, world_size):
    with pytest.raises(ValueError, match="must be"):
        Plan(DataSettings(img_size=(8, 8)), batch_size, 0, rank, world_size, torch.device("cpu"))
