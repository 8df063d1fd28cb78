"""Tar shards: found, counted, streamed from files and over HTTP."""

import json
from http.server import SimpleHTTPRequestHandler

import numpy as np
import pytest
from pictures import UNTOUCHED, numbers, open_small, same, write_shards

from gsanet.train.data import stream
from gsanet.train.data.shards import open_shards

COUNTS = (7, 9, 5, 11)


def describe(folder, counts=COUNTS, classes="ant\nbee\ncat\n"):
    """Write the files that spare the counting."""
    (folder / "sizes.json").write_text(json.dumps({f"shard-{i:02d}.tar": count for i, count in enumerate(counts)}))
    (folder / "classnames.txt").write_text(classes)


@pytest.fixture
def described(shards):
    describe(shards / "train")
    describe(shards / "val", (6, 7))
    return shards


@pytest.mark.parametrize("pattern", ["*.tar", "shard-{00..03}.tar", "shard-0{0,1}.tar,", "shard-0[23].tar"])
def test_local_patterns(shards, pattern):
    pattern = f"{{{shards}/train/{pattern}}}" if pattern.endswith(",") else f"{shards}/train/{pattern}"
    found = open_shards(pattern)
    assert found.sizes.tolist() == [COUNTS[int(url[-6:-4])] for url in found.urls]
    assert len(found.class_names) == 3


def test_http_gives_what_files_give(described, serve):
    address = serve(described)
    local = open_small(f"wds:{described}/train/*.tar|{described}/val/*.tar")
    remote = open_small(f"wds:{address}/train/shard-{{00..03}}.tar|{address}/val/shard-{{00..01}}.tar", workers=2)
    assert remote.class_names == local.class_names == ["ant", "bee", "cat"]
    assert same(remote.train.batches(1), local.train.batches(1))
    assert sum(len(labels) for _, labels in remote.val.batches()) == 13


def test_a_broken_connection_is_taken_up_again(described, serve):
    """The first answer to each request for a shard breaks off in the middle."""
    broken = set()

    class BreaksOff(SimpleHTTPRequestHandler):
        def copyfile(self, source, outputfile):
            data = source.read()
            if self.path.endswith(".tar") and self.path not in broken:
                broken.add(self.path)
                data = data[: len(data) // 2]
            outputfile.write(data)

    address = serve(described, BreaksOff)
    local = open_small(f"wds:{described}/train/*.tar|{described}/val/*.tar")
    remote = open_small(f"wds:{address}/train/shard-{{00..03}}.tar|{address}/val/shard-{{00..01}}.tar")
    assert same(remote.train.batches(0), local.train.batches(0))
    assert len(broken) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shard_that_is_gone_is_named(described, serve, workers):
    address = serve(described)
    data = open_small(f"wds:{address}/train/shard-{{00..03}}.tar|{address}/val/shard-{{00..01}}.tar", workers=workers)
    (described / "train" / "shard-02.tar").unlink()
    with pytest.raises(OSError, match=r"cannot read shard http.*/train/shard-02.tar: HTTP Error 404") as error:
        list(data.train.batches(0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_truncated_shard_is_named(described, workers):
    path = described / "train" / "shard-03.tar"
    path.write_bytes(path.read_bytes()[:5000])
    data = open_small(f"wds:{described}/train/*.tar|{described}/val/*.tar", workers=workers)
    with pytest.raises(OSError, match=r"cannot read shard .*shard-03.tar") as error:
        list(data.train.batches(0))
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_tar_archive_is_one_line(tmp_path):
    (tmp_path / "noise.tar").write_bytes(bytes(range(1, 256)) * 8)
    with pytest.raises(
        OSError, match=r"cannot read shard .*noise.tar: file could not be opened successfully$"
    ) as error:
        open_shards(f"{tmp_path}/*.tar")
    assert "\n" not in str(error.value)


def test_sizes_that_are_wrong_are_found_out(described):
    describe(described / "train", (7, 9, 6, 11))
    data = open_small(f"wds:{described}/train/*.tar|{described}/val/*.tar")
    with pytest.raises(OSError, match=r"shard-02.tar: it holds 5 samples where 6 are expected"):
        list(data.train.batches(0))


@pytest.mark.parametrize("missing", ["sizes.json", "classnames.txt"])
def test_http_needs_the_description(described, serve, missing):
    (described / "train" / missing).unlink()
    with pytest.raises(FileNotFoundError, match=f"/train/ lacks {missing}"):
        open_shards(f"{serve(described)}/train/shard-{{00..03}}.tar")


def test_sizes_must_list_every_shard(described):
    describe(described / "train", (7, 9))
    with pytest.raises(ValueError, match=r"sizes.json does not list shard-02.tar, one of 2 such shards"):
        open_shards(f"{described}/train/*.tar")


@pytest.mark.parametrize("pattern", ["{root}/none-*.tar", "pipe:touch {root}/ran", "ftp://example.org/a.tar"])
def test_what_is_no_shard(tmp_path, pattern):
    """Commands, which the WebDataset library would run, among them: a recipe from a stranger must not run code."""
    with pytest.raises(FileNotFoundError, match="no tar shards match"):
        open_shards(pattern.format(root=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_label_beyond_the_classes_is_named(described, workers):
    describe(described / "train", classes="ant\nbee")
    data = open_small(f"wds:{described}/train/*.tar|{described}/val/*.tar", workers=workers)
    with pytest.raises(OSError, match=r"/0\d\d\d has the label 2, but there are 2 classes"):
        list(data.train.batches(0))


def test_held_out_labels_count_as_classes(tmp_path):
    """Where no file names the classes, and the training split happens to lack the last."""
    write_shards(tmp_path / "train", (2,))
    write_shards(tmp_path / "val", (3,))
    data = open_small(f"wds:{tmp_path}/train/*.tar|{tmp_path}/val/*.tar", batch_size=2)
    assert data.class_names == ["0", "1", "2"]


def test_both_splits_are_needed(shards):
    with pytest.raises(ValueError, match=r"wds:TRAIN\|VAL"):
        open_small(f"wds:{shards}/train/*.tar")


def test_lanes_must_be_shared(shards):
    path = f"wds:{shards}/train/*.tar|{shards}/val/*.tar"
    assert len(open_small(path, batch_size=6, rank=1, world_size=3).train) == 5
    with pytest.raises(ValueError, match=r"read in 3 lanes, which 2 processes cannot share"):
        _ = open_limited(path, batch_size=6, rank=1, world_size=2)


def open_limited(path, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "MAX_LANES", 4)
        return open_small(path, **options).train


def test_samples_of_a_shard_are_spread_over_an_epoch(tmp_path, monkeypatch):
    """With one lane and a buffer much smaller than the split, neighbours still part."""
    write_shards(tmp_path / "train", (30, 30, 30, 30), size=(20, 24))
    write_shards(tmp_path / "val", (8,), start=120, size=(20, 24))
    monkeypatch.setattr(stream, "BUFFER", 20)
    data = open_small(f"wds:{tmp_path}/train/*.tar|{tmp_path}/val/*.tar", batch_size=1, **UNTOUCHED)
    orders = [numbers(data.train.batches(epoch)) for epoch in range(2)]
    for order in orders:
        assert sorted(order) == list(range(120))
        steps = np.abs(np.diff(order))
        assert (steps == 1).mean() < 0.2
    assert orders[0] != orders[1]
    assert {order[0] // 30 for order in orders} != {0} or orders[0][:30] != orders[1][:30]
