"""Residual blocks in training: their ends and entries as layers, and with kernels that save maps.

    python benchmarks/expansions.py
    python benchmarks/expansions.py --sides expansion sums entries --networks gsa_resnet50 conv_resnet50 --seconds 1
    python benchmarks/expansions.py --sides ends gradients kept --parts --networks gsa_resnet38 --img-size 64

Forward and backward, compiled, in bfloat16 under autocast, as CUDA graphs that are timed in turns in one process: the
end of a block at the maps of ResNet-50's four groups and of 64x64 images, two blocks of each of its first three groups,
then a training step of each network. Sides are

    layers      as they are
    expansion   without the map between the last convolution and its norm (`gsanet.functional.fused.expansion`)
    sums        the same, with the sum of two products in its gradient as one kernel
    entries     the same; the mask and the sum of a block's gradient are part of the next block's (`entry.py`)
    ends        the same; the convolution with the sum and the ReLU is a kernel of ours too
    gradients   the same; in GSA modules of 64 channels both gradients of the projection are one kernel
    kept        the same; modules of 64 and 128 channels keep q and v for their gradient (`projection.py`)

It says how far apart the gradients of a weight are, and for networks the loss, from the first side. `MOST_CHANNELS_IN`
and `LEAST_NUMBERS` of `expansion.py`, `CUTS` of `plan/channel_map.py`, and `projection.py` are where to write down what
is faster. Needs a GPU.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from measure import Graphed, Modes, compiled, forget, images, measure
from registry import Setting
from timm.layers import ConvNormAct
from torch import Tensor, nn

import gsanet
from gsanet.bench import TrainingStep, environment
from gsanet.functional.fused import entry, expansion, expansion_ops, pointwise, projection
from gsanet.layers.batch_norm import CompiledBatchNormAct2d


class Side(NamedTuple):
    """What is on."""

    expansion: bool
    sums: bool = False
    entries: bool = False
    ends: bool = False
    gradients: bool = False
    kept: int = projection.KEPT  # from so many channels on

    @contextmanager
    def on(self) -> Iterator[None]:
        """While something is compiled and captured."""
        with (
            mock.patch.object(expansion, "wanted", self.expansion),
            mock.patch.object(expansion_ops, "sums_wanted", self.sums),
            mock.patch.object(pointwise, "many_wanted", self.ends),
            mock.patch.object(entry, "wanted", self.entries),
            mock.patch.multiple(projection, gradients_wanted=self.gradients, KEPT_IN_PART=self.kept),
        ):
            yield


SIDES = {
    "layers": Side(False),
    "expansion": Side(True),
    "sums": Side(True, sums=True),
    "entries": Side(True, sums=True, entries=True),
    "ends": Side(True, sums=True, entries=True, ends=True),
    "gradients": Side(True, sums=True, entries=True, ends=True, gradients=True),
    "kept": Side(True, sums=True, entries=True, ends=True, gradients=True, kept=64),
}
# (batch, height and width, channels in, channels).
ENDS = [
    (256, 56, 64, 256), (256, 28, 128, 512), (256, 28, 256, 512), (256, 14, 256, 1024), (256, 7, 512, 2048),
    (512, 32, 64, 256), (512, 16, 128, 512), (512, 8, 256, 1024),
]  # fmt: skip
# (batch, height and width, group of ResNet-50).
GROUPS = [(256, 56, 0), (256, 28, 1), (256, 14, 2)]


class End(nn.Module):
    """The end of a residual block."""

    def __init__(self, channels_in: int, channels: int, expands: bool):
        super().__init__()
        self.layers = ConvNormAct(channels_in, channels, 1, apply_act=False)
        self.expands = expands
        CompiledBatchNormAct2d.convert(self)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """From the branch and the shortcut to the block's output."""
        if self.expands:
            return expansion.expand(x, self.layers.conv, self.layers.bn, residual, relu=True)
        out: Tensor = torch.relu(self.layers(x) + residual)
        return out


class EndStep:
    """Forward and backward of an `End`."""

    def __init__(self, shape: tuple[int, int, int, int], setting: Setting, side: Side):
        batch, size, channels_in, channels = shape
        torch.manual_seed(0)
        end = End(channels_in, channels, side.expansion).to(setting.device).to(memory_format=torch.channels_last)
        self.end, self.setting = compiled(end, setting), setting
        x, self.d_out, residual = (
            torch.randn(batch, one, size, size, device=setting.device, dtype=setting.dtype).to(
                memory_format=torch.channels_last
            )
            for one in (channels_in, channels, channels)
        )
        self.x, self.residual = x.relu().requires_grad_(), residual.requires_grad_()
        self.d_weight = torch.empty(0)

    def __call__(self) -> None:
        """One step."""
        with torch.autocast(self.setting.device, self.setting.dtype):
            out = self.end(self.x, self.residual)
        leaves = [self.x, self.residual, *self.end.parameters()]
        self.d_weight = torch.autograd.grad(out, leaves, self.d_out)[2]


class BlocksStep:
    """Forward and backward of the second and third block of a group."""

    def __init__(self, shape: tuple[int, int, int], setting: Setting, _: Side):
        batch, size, group = shape
        torch.manual_seed(0)
        groups: Any = gsanet.create_model("conv_resnet50", zero_init_last=False).stages
        blocks = groups[group][1:3]
        channels = blocks[0].conv1_1x1.conv.in_channels
        self.blocks = compiled(blocks.to(setting.device).to(memory_format=torch.channels_last), setting)
        self.setting = setting
        self.x, self.d_out = (
            torch.randn(batch, channels, size, size, device=setting.device, dtype=setting.dtype).to(
                memory_format=torch.channels_last
            )
            for _ in range(2)
        )
        self.x = self.x.relu().requires_grad_()
        self.d_weight = torch.empty(0)

    def __call__(self) -> None:
        """One step."""
        with torch.autocast(self.setting.device, self.setting.dtype):
            out = self.blocks(self.x)
        self.d_weight = torch.autograd.grad(out, [self.x, *self.blocks.parameters()], self.d_out)[1]


class NetworkStep(TrainingStep):
    """A step that keeps its loss; images of up to 64 pixels have the stem that the experiments give them."""

    def __init__(self, name: str, setting: Setting, _: Side):
        torch.manual_seed(0)
        small: dict[str, Any] = {"stem": "7x7/2"} if setting.img_size <= 64 else {}
        model = gsanet.create_model(name, img_size=setting.img_size, **small).to(setting.device)
        model = compiled(model.to(memory_format=torch.channels_last), setting)
        super().__init__(model, images(setting, setting.batch, setting.img_size), setting.dtype)
        self.loss = torch.empty(0)

    def forward(self) -> Tensor:
        """The loss."""
        self.loss = super().forward()
        return self.loss


def compare(
    what: str, make: Callable[[Side], Callable[[], None]], seen: str, setting: Setting, sides: Sequence[str]
) -> None:
    """Print the times of all sides, and how far apart one of their results is from the first one's."""
    steps: dict[str, Callable[[], None]] = {}

    def modes(side: str) -> Modes:
        with SIDES[side].on():
            steps[side] = make(SIDES[side])
            graph = Graphed(steps[side])
            graph()  # captured: what is wanted is not asked again
        return {"CUDA graph": graph}

    found = measure({side: partial(modes, side) for side in sides}, setting, repeats=3)
    results = {side: getattr(steps[side], seen).detach().float() for side in found.times}
    texts = []
    for side, time in found.times.items():
        text = f"{side} {1e3 * time:.0f}"
        if sides[0] in results and side != sides[0]:
            apart = ((results[side] - results[sides[0]]).norm() / results[sides[0]].norm()).item()
            text += f" ({found.times[sides[0]] / time:.2f} times as fast, {seen} apart by {apart:.1e})"
        texts.append(text)
    errors = "".join(f"; {side}: {error}" for side, error in found.errors.items())
    print(f"{what}: {', '.join(texts)} us{errors}", flush=True)
    steps.clear()
    forget()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare ends of blocks, blocks, and networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES, help="all by default")
    parser.add_argument("--parts", nargs="*", default=["ends", "blocks"], choices=["ends", "blocks"])
    parser.add_argument("--networks", nargs="*", default=["gsa_resnet50"], help="names; none for the parts alone")
    parser.add_argument("--batch", type=int, help="of the networks; 256 by default, and 512 of up to 64 pixels")
    parser.add_argument("--img-size", type=int, default=224, help="the same")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("compiled blocks are compared on a GPU")
    of_networks = options.batch or (512 if options.img_size <= 64 else 256)
    setting = Setting("cuda", torch.bfloat16, of_networks, options.seconds, True, img_size=options.img_size)
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    of_ends = [side for side in options.sides if not SIDES[side].entries]
    for shape in ENDS if "ends" in options.parts and of_ends else ():
        batch, size, channels_in, channels = shape
        what = f"{size}x{size}, {channels_in} to {channels} channels, batch {batch}"
        compare(what, partial(EndStep, shape, setting), "d_weight", setting, of_ends)
    for group in GROUPS if "blocks" in options.parts else ():
        what = f"two blocks at {group[1]}x{group[1]}, batch {group[0]}"
        compare(what, partial(BlocksStep, group, setting), "d_weight", setting, options.sides)
    for name in options.networks:
        what = f"{name}, {options.img_size}x{options.img_size}, batch {setting.batch}"
        compare(what, partial(NetworkStep, name, setting), "loss", setting, options.sides)


if __name__ == "__main__":
    main()
