"""The picture of a recipe's augmentation shows what training sees."""

import numpy as np
import pytest
import torch
from pictures import open_small, write_folder, write_shards
from PIL import Image

from gsanet.train.preview import GAP, draw_preview
from gsanet.train.recipe import load_recipe

SIZE, SHOWN = 24, 96  # pixels; small images are enlarged
CHANGES = {"policy": "trivial", "erase": 0.5}


def tiles(file):
    """The images of a preview, (row, column, height, width, channel), as large as the network sees them."""
    with Image.open(file) as picture:
        pixels = np.asarray(picture)
    step = SHOWN + GAP
    rows, columns = pixels.shape[0] // step, pixels.shape[1] // step
    grid = pixels.reshape(rows, step, columns, step, 3).swapaxes(1, 2)
    return grid[:, :, : SHOWN : SHOWN // SIZE, : SHOWN : SHOWN // SIZE]


def preview(path, out, images):
    settings = {"path": str(path), "augment": "crop", "workers": 0, **CHANGES}
    overrides = {"img_size": SIZE, "seed": 3, **{f"data.{key}": value for key, value in settings.items()}}
    draw_preview(load_recipe("quickstart", overrides), out, images, epochs=2)
    return tiles(out)


def seen(data, epoch):
    """All images of an epoch, as bytes."""
    images = torch.cat([images for images, _ in data.train.batches(epoch)])
    pixels = ((images / 2 + 0.5) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    return {image.numpy().tobytes() for image in pixels}


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_every_tile_is_an_image_that_training_sees(kind, tmp_path):
    if kind == "folder":
        path = write_folder(tmp_path / "folder", sizes=((SIZE, SIZE),))
    else:
        write_shards(tmp_path / "shards", size=(SIZE, SIZE))
        path = f"wds:{tmp_path}/shards/*.tar|{tmp_path}/shards/shard-00.tar"
    shown = preview(path, tmp_path / "preview.png", images=5)
    assert shown.shape == (5, 3, SIZE, SIZE, 3)
    half = (0.5, 0.5, 0.5)
    options = {"img_size": (SIZE, SIZE), "augment": "crop", "padding": 1, "flip": 0.0, "mean": half, "std": half}
    data = open_small(path, batch_size=1, seed=3, **options, **CHANGES)
    for epoch in range(2):
        of_epoch = seen(data, epoch)
        assert all(tile.tobytes() in of_epoch for tile in shown[:, 1 + epoch])


def test_damaged_images_are_left_out(tmp_path):
    folder = write_folder(tmp_path / "folder", train=1, sizes=((SIZE, SIZE),))
    (folder / "train" / "ant" / "0000.png").write_bytes(b"not an image")
    assert len(preview(folder, tmp_path / "preview.png", images=3)) == 2
    for file in folder.glob("train/*/*.png"):
        file.write_bytes(b"not an image")
    with pytest.raises(OSError, match="none of the images"):
        preview(folder, tmp_path / "preview.png", images=3)
