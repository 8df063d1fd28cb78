"""Pictures of all kinds become the RGB images that a person would see."""

import http.server
import threading

import numpy as np
import pytest
from PIL import Image

from gsanet.images import UnreadableImageError, find_images, read_image

PIXELS = np.arange(6 * 4, dtype=np.uint8).reshape(4, 6) * 10


def colour(image, place=(0, 0)):
    return image.getpixel(place)


def test_plain_and_grey(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "grey.png")
    picture = read_image(tmp_path / "grey.png")
    assert picture.image.mode == "RGB"
    assert picture.note == ""
    assert (np.asarray(picture.image)[..., 1] == PIXELS).all()
    Image.fromarray(PIXELS > 100).save(tmp_path / "bits.png")
    assert colour(read_image(tmp_path / "bits.png").image, (5, 3)) == (255, 255, 255)


def test_exif_turns_it_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be seen upright it is turned clockwise
    image = Image.new("RGB", (8, 16), "black")
    image.paste("white", (0, 8, 8, 16))
    image.save(tmp_path / "turned.jpg", exif=exif)
    upright = read_image(tmp_path / "turned.jpg").image
    assert upright.size == (16, 8)
    assert min(colour(upright, (1, 4))) > 200
    assert max(colour(upright, (14, 4))) < 50


def test_palette_and_transparency_on_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "palette.png")
    assert [colour(read_image(tmp_path / "palette.png").image, (x, 0)) for x in (0, 1)] == [(255, 0, 0), (0, 0, 255)]
    image.save(tmp_path / "clear.png", transparency=1)
    assert colour(read_image(tmp_path / "clear.png").image, (1, 0)) == (255, 255, 255)
    for mode, value in {"RGBA": (0, 0, 0, 0), "LA": (0, 0)}.items():
        Image.new(mode, (2, 2), value).save(tmp_path / "none.png")
        assert colour(read_image(tmp_path / "none.png").image) == (255, 255, 255)
    Image.new("RGBA", (2, 2), (200, 0, 0, 128)).save(tmp_path / "half.png")
    assert colour(read_image(tmp_path / "half.png").image) == pytest.approx((227, 127, 127), abs=1)


def test_cmyk(tmp_path):
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg", quality=95)
    red, green, blue = colour(read_image(tmp_path / "print.jpg").image)
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_are_scaled_not_cut(tmp_path, name):
    Image.fromarray(PIXELS.astype(np.uint16) * 256).save(tmp_path / name)
    assert (np.asarray(read_image(tmp_path / name).image)[..., 0] == PIXELS).all()


def test_numbers_without_a_white_are_refused(tmp_path):
    Image.fromarray(PIXELS.astype(np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(UnreadableImageError, match="32-bit numbers"):
        read_image(tmp_path / "float.tif")


def test_the_first_frame_of_an_animation(tmp_path):
    red, blue = (Image.new("RGB", (4, 4), name) for name in ("red", "blue"))
    red.save(tmp_path / "moving.gif", save_all=True, append_images=[blue])
    picture = read_image(tmp_path / "moving.gif")
    assert picture.note == "the first of 2 frames"
    assert colour(picture.image) == (255, 0, 0)


def test_what_is_refused(tmp_path):
    Image.new("1", (10_001, 10_000)).save(tmp_path / "huge.png")
    Image.new("1", (20_000, 10_000)).save(tmp_path / "bomb.png")
    Image.new("1", (1, 1_000_000)).save(tmp_path / "strip.png")
    (tmp_path / "text.jpg").write_text("no image")
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:700])
    for name, reason in {
        "huge.png": "more than 100 megapixels are refused",
        "bomb.png": "more than 100 megapixels are refused",
        "strip.png": "has 1x1000000 pixels: one side is over 1000 times the other",
        "text.jpg": "is not an image of a known kind",
        "cut.jpg": "cannot be read",
        "none.jpg": "there is no file",
        ".": "is a folder",
    }.items():
        with pytest.raises(UnreadableImageError, match=reason):
            read_image(tmp_path / name)


def test_folders_are_searched(tmp_path):
    (tmp_path / "b" / "deep").mkdir(parents=True)
    for name in ("z.PNG", "b/deep/a.jpg", "b/notes.txt"):
        (tmp_path / name).write_bytes(b"")
    assert find_images([tmp_path, "other.dat", "https://host/x"]) == [
        *(str(tmp_path / name) for name in ("b/deep/a.jpg", "z.PNG")),
        "other.dat",
        "https://host/x",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there are no images in"):
        find_images([tmp_path / "empty"])
    assert find_images([tmp_path / "empty", "other.dat"]) == ["other.dat", str(tmp_path / "empty")]


@pytest.fixture
def address(tmp_path, monkeypatch):
    """A web server of this machine."""
    monkeypatch.setenv("no_proxy", "*")
    Image.new("RGB", (4, 4), "red").save(tmp_path / "red.png")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_addresses(address):
    assert colour(read_image(f"{address}/red.png").image) == (255, 0, 0)
    with pytest.raises(UnreadableImageError, match="cannot be downloaded: 404"):
        read_image(f"{address}/blue.png")
    with pytest.raises(UnreadableImageError, match="cannot be downloaded"):
        read_image("http://127.0.0.1:1/red.png")
