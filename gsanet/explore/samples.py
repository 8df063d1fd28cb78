"""Pictures to start from: photographs and scans that come with the libraries, without a download."""

from collections.abc import Sequence

from PIL import Image

DIGITS = tuple("0123456789")


def sample_pictures(class_names: Sequence[str], img_size: tuple[int, int]) -> dict[str, Image.Image]:
    """RGB images by name: held-out scans for a network of digits, photographs for all others.

    Args:
        class_names: What the network tells apart.
        img_size: Height and width of its input.
    """
    return _scans() if tuple(class_names) == DIGITS and max(img_size) <= 32 else _photographs()


def _photographs() -> dict[str, Image.Image]:
    from skimage import data
    from sklearn.datasets import load_sample_image

    arrays = {
        "rocket": data.rocket(),
        "coffee": data.coffee(),
        "flower": load_sample_image("flower.jpg"),
        "temple": load_sample_image("china.jpg"),
        "cat": data.chelsea(),
        "astronaut": data.astronaut(),
    }
    return {name: Image.fromarray(array) for name, array in arrays.items()}


def _scans() -> dict[str, Image.Image]:
    from gsanet.train.demo import first_scans

    scans = first_scans()
    return {str(digit): scans[digit] for digit in (3, 0, 2, 5, 7, 8)}
