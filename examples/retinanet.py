"""A GSA network under torchvision's RetinaNet, through a feature pyramid, for images of changing sizes.

Detectors see images of all sizes, and the tables of relative positions are made for one. Three ways out:

- `keep_reach=True`, as here: a larger map is taken as it is, and offsets that were never trained contribute nothing.
  Nothing changes from batch to batch, so weights that were trained for classification serve at any size, and what
  attention by position loses beyond its reach, attention by content still sees. Offsets outside the tables get no
  gradient: make the network for the largest size that it will often see (`img_size`), and they are trained too.
- `set_input_size`, once before training, for detectors whose images all have one size: the tables are stretched.
- `reach`, a small one, if the network is to behave the same at all sizes.

Run it: python examples/retinanet.py
"""

from collections import OrderedDict
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

import gsanet  # noqa: F401 (registers the networks)

STRIDES = (8, 16, 32)  # of the maps that enter the pyramid; P6 and P7 are made from the last


class PyramidBackbone(nn.Module):
    """The maps of a timm network that have the strides 8, 16 and 32, as a pyramid of five.

    Args:
        name: The network.
        out_channels: Of every level of the pyramid.
        options: Of the network, as in `timm.create_model`.
    """

    def __init__(self, name: str, out_channels: int = 256, **options: Any):
        super().__init__()
        probe = timm.create_model(name, features_only=True, **options).feature_info
        indices = [index for index, stride in enumerate(probe.reduction()) if stride in STRIDES]
        self.body = timm.create_model(name, features_only=True, out_indices=indices, **options)
        channels = self.body.feature_info.channels()
        self.pyramid = FeaturePyramidNetwork(channels, out_channels, LastLevelP6P7(out_channels, out_channels))
        self.out_channels = out_channels  # torchvision asks for it

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """From images to maps of the strides 8 to 128."""
        levels = OrderedDict((str(level), map) for level, map in enumerate(self.body(x)))
        return self.pyramid(levels)


def make_detector(name: str = "gsa_resnet50", num_classes: int = 91, size: int = 800, **options: Any) -> RetinaNet:
    """A RetinaNet for images whose shorter side is resized to `size`.

    Args:
        name: The network under it.
        num_classes: With the background.
        size: Also what the tables of relative positions are made for.
        options: Of the network.
    """
    backbone = PyramidBackbone(name, img_size=size, keep_reach=True, **options)
    anchors = AnchorGenerator(
        tuple((side, int(side * 2 ** (1 / 3)), int(side * 2 ** (2 / 3))) for side in (32, 64, 128, 256, 512)),
        ((0.5, 1.0, 2.0),) * 5,
    )
    return RetinaNet(
        backbone, num_classes, anchor_generator=anchors, min_size=size, max_size=size * 5 // 3, detections_per_img=20
    )


def main() -> None:
    """One step of training and one of inference with a small network, on random images of several sizes."""
    torch.manual_seed(0)
    model = make_detector("gsa_resnet26", num_classes=3, size=64, width=0.25, depths=(1, 1, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = [torch.rand(3, 64, 80), torch.rand(3, 100, 70)]
    targets = [{"boxes": torch.tensor([[8.0, 8.0, 40.0, 50.0]]), "labels": torch.tensor([1])} for _ in images]
    losses = model(images, targets)
    sum(losses.values()).backward()
    optimizer.step()
    print("losses:", ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items()))
    model.eval()
    with torch.no_grad():
        maps = model.backbone(torch.rand(1, 3, 96, 64))
        print("pyramid of 96x64:", ", ".join("x".join(map(str, level.shape[1:])) for level in maps.values()))
        for image in (torch.rand(3, 72, 64), torch.rand(3, 64, 120)):
            found = model([image])[0]
            print(f"image {tuple(image.shape)}: boxes {tuple(found['boxes'].shape)}")


if __name__ == "__main__":
    main()
