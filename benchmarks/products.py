"""1x1 convolutions and projections of one image: by a kernel of this package, and by cuDNN and cuBLAS.

    python benchmarks/products.py
    python benchmarks/products.py --cuts 3 --seconds 0.02 --shapes 49 196
    python benchmarks/products.py --compile --seconds 1

First each shape of GSA-ResNet-50, as a CUDA graph of several products in a row, each with a weight of its own; then
the network, for inference in bfloat16: as it is without the kernel, with it layer by layer, and with it in blocks,
whose kernels read their weights early; and torchvision's ResNet-50. All in one process, in turns, launched as usual and
early, with how far the results are apart. With `--cuts` all ways to cut a product into blocks are timed, and so many of
the fastest are printed: what `gsanet.functional.fused.plan.product` should choose. Needs a GPU.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torchvision
from launches import REPLAYS, Captured
from measure import compiled, images, measure
from networks import infer
from projections import difference
from registry import Setting
from torch import Tensor

import gsanet
from gsanet.bench import environment
from gsanet.functional.convolution import fused_convolution_relu, fused_pointwise_convolution
from gsanet.functional.fused import calls, pointwise
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import architecture_of, compile_all
from gsanet.functional.fused.plan import plan_product
from gsanet.functional.fused.plan import product as plans
from gsanet.functional.fused.plan.product import Cut, cut_product
from gsanet.functional.fused.projection import project
from gsanet.inference import attention_block

IN_A_ROW = 12  # products of a shape
ANY = 10**6  # blocks


class Case(NamedTuple):
    """A product of the network: side of the output's map, channels, columns, what it is, and how often it is there."""

    side: int
    channels: int
    columns: int
    kind: str
    times: int

    @property
    def stride(self) -> int:
        """Of the shortcut's convolution."""
        return 2 if self.kind == "shortcut" and self.side < 56 else 1

    def __str__(self) -> str:
        return f"{self.side}x{self.side}, {self.channels} to {self.columns}, {self.kind} ({self.times} times)"


CASES = [
    Case(56, 64, 256, "shortcut", 1), Case(56, 64, 64, "first", 1), Case(56, 64, 192, "projection", 3),
    Case(56, 64, 256, "last", 3), Case(56, 256, 64, "first", 2),
    Case(28, 256, 512, "shortcut", 1), Case(56, 256, 128, "first", 1), Case(56, 128, 384, "projection", 1),
    Case(28, 128, 512, "last", 4), Case(28, 512, 128, "first", 3), Case(28, 128, 384, "projection", 3),
    Case(14, 512, 1024, "shortcut", 1), Case(28, 512, 256, "first", 1), Case(28, 256, 768, "projection", 1),
    Case(14, 256, 1024, "last", 6), Case(14, 1024, 256, "first", 5), Case(14, 256, 768, "projection", 5),
    Case(7, 1024, 2048, "shortcut", 1), Case(14, 1024, 512, "first", 1), Case(14, 512, 1536, "projection", 1),
    Case(7, 512, 2048, "last", 3), Case(7, 2048, 512, "first", 2), Case(7, 512, 1536, "projection", 2),
]  # fmt: skip


class Products:
    """Several products of one shape in a row.

    Args:
        case: The shape.
        batch: Number of images.
        device: Where they are.
    """

    def __init__(self, case: Case, batch: int, device: str):
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self.case = case
        side = case.side * case.stride
        self.x = random(batch, case.channels, side, side).to(memory_format=torch.channels_last)
        self.weights = [random(case.columns, case.channels, 1, 1) / case.channels**0.5 for _ in range(IN_A_ROW)]
        self.bias = random(case.columns)
        self.residual = random(batch, case.columns, case.side, case.side).to(memory_format=torch.channels_last)

    def by_others(self, x: Tensor) -> Tensor:
        """By cuDNN and cuBLAS, as where the kernel is not the plan; the last output."""
        kind, stride = self.case.kind, (self.case.stride,) * 2
        with blocks_at_most(0):
            for weight in self.weights:
                if kind == "projection":
                    out = project(x, weight.flatten(1))
                elif kind == "shortcut":
                    out = fused_pointwise_convolution(x, weight, None, stride)
                else:
                    residual = self.residual if kind == "last" else None
                    out = fused_convolution_relu(x, weight, self.bias, residual, (1, 1), (0, 0), (1, 1))
        return out if kind == "projection" else out.permute(0, 2, 3, 1).flatten(0, 2)

    def by_kernel(self, x: Tensor, early_weight: bool = False, cut: Cut | None = None) -> Tensor:
        """The same by the kernel, whatever the plan is."""
        convolution = self.case.kind in ("first", "last")
        outs = []
        with blocks_at_most(ANY, cut):
            for i, weight in enumerate(self.weights):
                out = calls.product(
                    x.permute(0, 2, 3, 1),
                    weight.flatten(1),
                    self.bias if convolution else None,
                    self.residual.permute(0, 2, 3, 1) if self.case.kind == "last" else None,
                    relu=convolution,
                    stride=(self.case.stride,) * 2,
                    early_weight=early_weight and i > 0,
                )
                assert out is not None
                outs.append(out)
        return outs[-1].flatten(0, 2)


@contextmanager
def blocks_at_most(most: int, cut: Cut | None = None) -> Iterator[None]:
    """Plans with the kernel for so many blocks on each multiprocessor, of one cut if that is given."""

    def clear() -> None:
        cut_product.cache_clear()
        plan_product.cache_clear()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(plans, "MOST_BLOCKS", most))
        if cut is not None:
            stack.enter_context(mock.patch.object(plans, "_cuts", return_value=[cut]))
        clear()
        yield
    clear()


Network = Callable[[Tensor], Tensor]


def timed(
    networks: Mapping[str, tuple[Network, bool]], x: Tensor, setting: Setting
) -> dict[str, tuple[float, Captured]]:
    """Microseconds of each as a CUDA graph, and that; with each whether its kernels are launched early."""
    runs: dict[str, Captured] = {}
    for side, (network, early) in networks.items():
        for _ in range(2):
            infer(network, x)  # compiles, and chooses algorithms
        runs[side] = Captured(network, x, early, streams=True)
    found = measure({side: partial(dict, {"CUDA graph": run}) for side, run in runs.items()}, setting, REPLAYS)
    for side, error in found.errors.items():
        print(f"  {side}: {error}")
    return {side: (1e3 * time, runs[side]) for side, time in found.times.items()}


def results(runs: Mapping[str, tuple[float, Captured]]) -> dict[str, Tensor]:
    """What each graph gives."""
    for _, run in runs.values():
        run()
    return {side: run.out for side, (_, run) in runs.items()}


def compare_shape(case: Case, batch: int, setting: Setting) -> dict[str, float]:
    """Print the times of one product; what all of its kind in the network take."""
    products = Products(case, batch, setting.device)
    early = partial(products.by_kernel, early_weight=True)
    found = timed(
        {
            "others": (products.by_others, False),
            "ours": (products.by_kernel, False),
            "launched early": (products.by_kernel, True),
            "weights early": (early, True),
        },
        products.x,
        setting,
    )
    usual, *ours = results(found).values()
    same = all(torch.equal(ours[0], other) for other in ours)
    apart = difference(ours[0], usual)
    rows = batch * case.side**2
    cut = cut_product(launching.machine(products.x.device), rows, case.channels, case.columns)
    times = {side: time / IN_A_ROW for side, (time, _) in found.items()}
    text = ", ".join(f"{side} {time:.2f}" for side, time in times.items())
    plan = "not the plan" if cut is None else describe(cut, rows, case.columns)
    print(f"{case}: {text} us; {plan}; {apart:.1e} apart, bits {'the same' if same else 'DIFFER'}", flush=True)
    return {side: case.times * time for side, time in times.items()}


def describe(cut: Cut, rows: int, columns: int) -> str:
    """A cut, and how many blocks it makes."""
    down, along = cut.blocks(rows, columns)
    chunks = "" if cut.chunks == 1 else f", {cut.chunks} chunks"
    return f"{down * along} of {cut.length}x{cut.columns}, warps {cut.down}x{cut.along}, {cut.parts} parts{chunks}"


def compare_cuts(case: Case, batch: int, setting: Setting, show: int) -> None:
    """Print the fastest cuts of one product, launched early."""
    products = Products(case, batch, setting.device)
    device = products.x.device
    machine, rows = launching.machine(device), batch * case.side**2
    fitting = [cut for cut in plans._cuts(case.channels) if cut.shared_bytes(case.channels) <= machine.shared_memory]
    kernels = []
    with mock.patch.object(launching, "launch", lambda launch, *_: kernels.append(launch.kernel)):
        for cut in fitting:
            products.by_kernel(products.x, early_weight=True, cut=cut)
    compile_all(kernels, architecture_of(device))
    networks = {
        describe(cut, rows, case.columns): (partial(products.by_kernel, early_weight=True, cut=cut), True)
        for cut in fitting
    }
    found = timed(networks, products.x, setting)
    chosen = cut_product(machine, rows, case.channels, case.columns)
    name = None if chosen is None else describe(chosen, rows, case.columns)
    times = {side: time / IN_A_ROW for side, (time, _) in found.items()}
    planned = "" if name is None else f"{times[name]:.2f} us as planned ({name})"
    fastest = "".join(f"; {side}: {time:.2f}" for side, time in sorted(times.items(), key=lambda item: item[1])[:show])
    print(f"{case}, {len(times)} cuts: {planned}{fastest}", flush=True)


@contextmanager
def ways(products: bool, blocks: bool) -> Iterator[None]:
    """A network with or without the kernel of products, and with or without blocks that are one operator."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(pointwise, "wanted", products))
        if not blocks:
            stack.enter_context(mock.patch.object(attention_block, "FEW", 0))
        yield


def compare_network(setting: Setting, batch: int) -> None:
    """Print the times of the network in all ways."""
    model = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet50").eval())
    resnet = torchvision.models.resnet50().eval()
    model, resnet = (
        one.to(setting.device, setting.dtype).to(memory_format=torch.channels_last) for one in (model, resnet)
    )
    model, resnet = compiled(model, setting), compiled(resnet, setting)
    x = images(setting, batch, setting.img_size, setting.dtype)

    def run(products: bool, blocks: bool, x: Tensor) -> Tensor:
        with ways(products, blocks):
            return model(x)

    sides = {
        "without": partial(run, False, False),
        "with, by layers": partial(run, True, False),
        "with, in blocks": partial(run, True, True),
    }
    networks = {f"{side}, {name}": (one, early) for side, one in sides.items()
                for name, early in (("usual", False), ("early", True))}  # fmt: skip
    found = timed({**networks, "ResNet-50": (resnet, False)}, x, setting)
    outs = results(found)
    for side, (time, captured) in found.items():
        apart = "" if side == "ResNet-50" else f", {difference(outs[side], outs['without, usual']):.1e} apart"
        print(f"{side}: {time:.1f} us ({captured.edges}){apart}")
    resnet_time = found["ResNet-50"][0]
    fastest = min(time for side, (time, _) in found.items() if side != "ResNet-50")
    print(f"fastest: {fastest / resnet_time:.3f} of ResNet-50's time", flush=True)
    for side in sides:
        same = torch.equal(outs[f"{side}, usual"], outs[f"{side}, early"])
        print(f"{side}: early and usual give {'the same bits' if same else 'OTHER BITS'}")
    same = torch.equal(outs["with, by layers, usual"], outs["with, in blocks, usual"])
    print(f"by layers and in blocks: {'the same bits' if same else 'OTHER BITS'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare shapes, then the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.1, help="for each side")
    parser.add_argument("--compile", action="store_true", help="the networks through torch.compile, as in run.py")
    parser.add_argument("--cuts", type=int, default=0, help="time all cuts, and print so many of the fastest")
    parser.add_argument("--shapes", type=int, nargs="+", help="only those of maps with so many pixels")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("the kernel needs a GPU")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    setting = Setting("cuda", torch.bfloat16, options.batch, options.seconds, options.compile)
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    cases = [case for case in CASES if options.shapes is None or case.side**2 in options.shapes]
    if options.cuts:
        for case in cases:
            compare_cuts(case, options.batch, setting, options.cuts)
        return
    total: dict[str, float] = {}
    for case in cases:
        for side, time in compare_shape(case, options.batch, setting).items():
            total[side] = total.get(side, 0.0) + time
    text = ", ".join(f"{side} {time:.0f} us" for side, time in total.items())
    print(f"all {sum(case.times for case in cases)}: {text}")
    if options.shapes is None:
        compare_network(setting, options.batch)


if __name__ == "__main__":
    main()
