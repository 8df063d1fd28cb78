"""1x1 convolutions of inference on a CPU: by the kernel of this package, and by PyTorch.

    python benchmarks/pointwise.py
    python benchmarks/pointwise.py --threads 1 --batches 1 8

Each shape of GSA-ResNet-50 in float32, with what comes behind it, and then the whole network: milliseconds of PyTorch
and of the kernel, whatever the network itself would choose, and how many times as fast the kernel is. Both take turns
in one process; each call has another weight, as in a network.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from unittest import mock

import torch
from products import CASES, Case
from torch import Tensor

import gsanet
from gsanet.bench import environment, milliseconds
from gsanet.functional.convolution import convolution_relu, pointwise_convolution
from gsanet.functional.native import pointwise

WEIGHTS = 4
CONVOLUTIONS = [case for case in CASES if case.kind != "projection"]


@contextmanager
def pixels_at_most(most: int) -> Iterator[None]:
    """The kernel takes maps of so many pixels, with any number of threads."""
    one_rule = mock.patch.object(pointwise, "_has_threads", return_value=True)
    with mock.patch.object(pointwise, "MOST_PIXELS", most), one_rule:
        yield


class Convolution:
    """One shape, with several weights.

    Args:
        case: The shape.
        batch: Number of images.
    """

    def __init__(self, case: Case, batch: int):
        torch.manual_seed(0)
        side = case.side * case.stride
        self.case = case
        self.x = torch.randn(batch, case.channels, side, side).to(memory_format=torch.channels_last)
        self.weights = cycle([torch.randn(case.columns, case.channels, 1, 1) for _ in range(WEIGHTS)])
        self.bias = torch.randn(case.columns)
        residual = torch.randn(batch, case.columns, case.side, case.side).to(memory_format=torch.channels_last)
        self.residual = residual if case.kind == "last" else None

    def __call__(self) -> Tensor:
        """The output."""
        weight = next(self.weights)
        if self.case.kind == "shortcut":
            return pointwise_convolution(self.x, weight, None, (self.case.stride,) * 2)
        return convolution_relu(self.x, weight, self.bias, self.residual)


def compare(run: Callable[[], object], seconds: float) -> dict[str, float]:
    """Milliseconds by PyTorch and by the kernel."""

    def with_limit(most: int) -> object:
        pointwise.MOST_PIXELS = most  # and no more than that while it is timed
        return run()

    with pixels_at_most(0):
        return milliseconds({"PyTorch": lambda: with_limit(0), "kernel": lambda: with_limit(10**9)}, "cpu", seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=[torch.get_num_threads(), 1], metavar="N")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4], metavar="N")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each shape; the network has ten times as long")
    parser.add_argument("--shapes", type=int, nargs="*", metavar="SIDE", help="only maps of these sides")
    parser.add_argument("--img-size", type=int, default=224, help="of the network's images")
    chosen = parser.parse_args(arguments)
    print(", ".join(f"{key} {value}" for key, value in environment("cpu").items()))
    model = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet50", img_size=chosen.img_size))
    model = model.to(memory_format=torch.channels_last)
    before = torch.get_num_threads()
    try:
        for threads in dict.fromkeys(chosen.threads):
            torch.set_num_threads(threads)
            for batch in chosen.batches:
                _compare_all(model, batch, threads, chosen)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _compare_all(model: torch.nn.Module, batch: int, threads: int, chosen: argparse.Namespace) -> None:
    print(f"\nthreads: {threads}, batch: {batch}")
    for case in CONVOLUTIONS:
        if not chosen.shapes or case.side in chosen.shapes:
            _print(str(case), compare(Convolution(case, batch), chosen.seconds))
    size = (batch, 3, chosen.img_size, chosen.img_size)
    images = torch.randn(size).to(memory_format=torch.channels_last)
    _print("GSA-ResNet-50", compare(lambda: model(images), 10 * chosen.seconds))


def _print(title: str, times: dict[str, float]) -> None:
    usual, ours = times["PyTorch"], times["kernel"]
    print(f"  {title:50} {usual:8.3f} {ours:8.3f}  {usual / ours:.2f}", flush=True)


if __name__ == "__main__":
    main()
