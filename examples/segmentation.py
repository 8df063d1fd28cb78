"""A GSA network as the encoder of segmentation-models-pytorch, for images of changing sizes.

The library takes any timm network with maps of the strides 2 to 32 under the name `tu-NAME`, and hands options on to
it; importing gsanet is all it needs. Decoders want sides that are multiples of 32, so images are padded to that.

Crops for training have one size: `img_size` is theirs, and every offset is trained. Whole images at test time are
larger and of all shapes; `keep_reach=True` takes them as they are, with nothing from beyond the trained reach, and
needs no change of the network between two images.

Run it: pip install 'gsanet[examples]' && python examples/segmentation.py
"""

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gsanet  # noqa: F401 (registers the networks)

MULTIPLE = 32


def make_segmenter(name: str = "gsa_resnet50", classes: int = 21, crop: int = 512, **options: object) -> nn.Module:
    """A U-Net over a GSA network.

    Args:
        name: The network under it.
        classes: Of pixels.
        crop: The image size in training, for which the tables of relative positions are made.
        options: Of the network.
    """
    return smp.Unet(f"tu-{name}", encoder_weights=None, classes=classes, img_size=crop, keep_reach=True, **options)


def segment(model: nn.Module, images: Tensor) -> Tensor:
    """Logits of every pixel of images of any size."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, -width % MULTIPLE, 0, -height % MULTIPLE))
    return model(padded)[..., :height, :width]


def main() -> None:
    """One step of training and one of inference with a small network, on random images of several sizes."""
    torch.manual_seed(0)
    model = make_segmenter("gsa_resnet26", classes=3, crop=64, width=0.25, depths=(1, 1, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.rand(2, 3, 64, 64), torch.randint(3, (2, 64, 64))
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"loss: {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        for size in ((64, 64), (75, 100)):
            print(f"image {size}: logits {tuple(segment(model, torch.rand(1, 3, *size)).shape)}")


if __name__ == "__main__":
    main()
