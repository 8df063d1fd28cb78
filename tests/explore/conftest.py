import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def explorer(digits_run):
    from gsanet.explore.study import Explorer
    from gsanet.predict import load_classifier

    return Explorer(load_classifier(digits_run / "gsa_resnet26_tiny", device="cpu"))


@pytest.fixture(scope="session")
def uploads(tmp_path_factory):
    """Pictures of the kinds that go wrong, by name; those whose name starts with `bad` give no picture."""
    folder = tmp_path_factory.mktemp("uploads")
    photograph = Image.effect_noise((60, 40), 80)
    photograph.convert("RGB").save(folder / "plain.png")
    photograph.convert("CMYK").save(folder / "print.jpg")
    Image.fromarray(np.full((40, 60), 40_000, np.uint16)).save(folder / "deep.png")
    photograph.resize((20, 80)).save(folder / "tall.png")
    Image.new("RGBA", (60, 40), (200, 0, 0, 0)).save(folder / "clear.png")
    photograph.save(folder / "moving.gif", save_all=True, append_images=[Image.new("L", (60, 40))])
    Image.new("1", (10_001, 10_000)).save(folder / "bad-huge.png")
    (folder / "bad-text.jpg").write_text("no image")
    (folder / "bad-cut.jpg").write_bytes((folder / "print.jpg").read_bytes()[:500])
    return folder


@pytest.fixture(scope="session")
def address(digits_run):
    """Where `gsanet explore` serves the network of the digits, in a process of its own."""
    from shoot_explorer import serving

    with serving("--run", digits_run / "gsa_resnet26_tiny") as found:
        yield found
