"""The ends of residual blocks in training: convolution, norm, sum and ReLU as layers, and without the map between them.

    python benchmarks/expansions.py
    python benchmarks/expansions.py --networks gsa_resnet50 conv_resnet50 --seconds 1

Forward and backward, compiled, in bfloat16 under autocast, as CUDA graphs that are timed in turns in one process: the
end of a block at the maps of ResNet-50's four groups and of 64x64 images, then a training step of each network, with
`gsanet.functional.fused.expansion` on and off. It says how far apart the gradients of the weight are, and for networks
the loss. `MOST_CHANNELS_IN` and `LEAST_NUMBERS` there are where to write down what is faster. Needs a GPU.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
from measure import Graphed, Modes, compiled, forget, images, measure
from registry import Setting
from timm.layers import ConvNormAct
from torch import Tensor, nn

import gsanet
from gsanet.bench import TrainingStep, environment
from gsanet.functional.fused import expansion
from gsanet.layers.batch_norm import CompiledBatchNormAct2d

SIDES = {"layers": False, "expansion": True}
# (batch, height and width, channels in, channels).
ENDS = [
    (256, 56, 64, 256), (256, 28, 128, 512), (256, 28, 256, 512), (256, 14, 256, 1024), (256, 7, 512, 2048),
    (512, 32, 64, 256), (512, 16, 128, 512), (512, 8, 256, 1024),
]  # fmt: skip


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

    def __init__(self, shape: tuple[int, int, int, int], setting: Setting, expands: bool):
        batch, size, channels_in, channels = shape
        torch.manual_seed(0)
        end = End(channels_in, channels, expands).to(setting.device).to(memory_format=torch.channels_last)
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


class NetworkStep(TrainingStep):
    """A step that keeps its loss."""

    def __init__(self, name: str, setting: Setting, _: bool):
        torch.manual_seed(0)
        model = gsanet.create_model(name, img_size=setting.img_size).to(setting.device)
        model = compiled(model.to(memory_format=torch.channels_last), setting)
        super().__init__(model, images(setting, setting.batch, setting.img_size), setting.dtype)
        self.loss = torch.empty(0)

    def forward(self) -> Tensor:
        """The loss."""
        self.loss = super().forward()
        return self.loss


def compare(what: str, make: Callable[[bool], Callable[[], None]], seen: str, setting: Setting) -> None:
    """Print the times of both sides, and how far apart one of their results is."""
    steps: dict[str, Callable[[], None]] = {}

    def modes(side: str) -> Modes:
        with mock.patch.object(expansion, "wanted", SIDES[side]):
            steps[side] = make(SIDES[side])
            graph = Graphed(steps[side])
            graph()  # captured: what is wanted is not asked again
        return {"CUDA graph": graph}

    found = measure({side: partial(modes, side) for side in SIDES}, setting, repeats=3)
    times = ", ".join(f"{side} {1e3 * time:.0f}" for side, time in found.times.items())
    errors = "".join(f"; {side}: {error}" for side, error in found.errors.items())
    apart = ""
    if not found.errors:
        usual, own = (getattr(steps[side], seen).detach().float() for side in SIDES)
        ratio = found.times["layers"] / found.times["expansion"]
        apart = f"; {ratio:.2f} times as fast; {seen} apart by {((own - usual).norm() / usual.norm()).item():.1e}"
    print(f"{what}: {times} us{apart}{errors}", flush=True)
    steps.clear()
    forget()


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare ends of blocks, and networks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["gsa_resnet50"], help="names; none for the ends alone")
    parser.add_argument("--batch", type=int, default=256, help="of the networks")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("compiled blocks are compared on a GPU")
    setting = Setting("cuda", torch.bfloat16, options.batch, options.seconds, True)
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    for shape in ENDS:
        batch, size, channels_in, channels = shape
        what = f"{size}x{size}, {channels_in} to {channels} channels, batch {batch}"
        compare(what, partial(EndStep, shape, setting), "d_weight", setting)
    for name in options.networks:
        compare(f"{name}, batch {options.batch}", partial(NetworkStep, name, setting), "loss", setting)


if __name__ == "__main__":
    main()
