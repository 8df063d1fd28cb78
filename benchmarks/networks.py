"""Whole networks: GSA-ResNets against the convolutional ResNets whose 3x3 convolutions they replace.

ResNet-50 is torchvision's; in inference its batch normalisations are folded into the convolutions. In rows of their own
it gets what else makes ours fast and has nothing to do with attention: in training it is `conv_resnet50` of this
package, with our stem, norms and ends of blocks, in inference it goes through `gsanet.fuse_for_inference` too. Ours is
`gsanet.create_model`, in inference through the same function where this version has it. A training step is
`gsanet.bench.TrainingStep`: autocast, forward, cross-entropy, backward, SGD with momentum; no gradient scaler in
float16.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torchvision
from measure import (
    Graphed,
    Measured,
    Modes,
    Run,
    Sides,
    compiled,
    compiled_modes,
    images,
    measure,
    shared,
    with_graphs,
)
from registry import Row, Setting, SkippedError, Target, case
from rivals import GsaPytorch, fold_batch_norms, load_gsa_pytorch
from torch import Tensor, nn

import gsanet
from gsanet.bench import TrainingStep, one_line, train_memory

CONV = "ResNet-50"
GSA = "GSA-ResNet-50"
TWIN = "ResNet-50 with our stem and norms"
EPILOGUES = "ResNet-50 with our epilogues"


def training_modes(make: Callable[[], nn.Module], setting: Setting, batch: int, size: int) -> dict[str, Run]:
    """A network's training step in each mode of the setting; the first is the plain step."""
    model = make().to(setting.device).to(memory_format=torch.channels_last)
    batch_of_images = images(setting, batch, size)
    steps = {
        mode: TrainingStep(network, batch_of_images, setting.dtype)
        for mode, network in compiled_modes(model, setting).items()
    }
    return with_graphs(steps, setting)


def _conv_training(setting: Setting) -> Modes:
    make = partial(training_modes, torchvision.models.resnet50, setting, setting.batch, setting.img_size)
    return shared(("training", CONV), make)


def _twin_training(setting: Setting) -> Modes:
    create = partial(gsanet.create_model, "conv_resnet50", img_size=setting.img_size)
    make = partial(training_modes, create, setting, setting.batch, setting.img_size)
    return shared(("training", TWIN), make)


def _gsa_training(setting: Setting, **options: Any) -> Modes:
    create = partial(gsanet.create_model, "gsa_resnet50", img_size=setting.img_size, **options)
    make = partial(training_modes, create, setting, setting.batch, setting.img_size)
    return shared(("training", GSA), make) if not options else make()


def _training_rows(
    what: str, ours: str, make_ours: Callable[[], Modes], setting: Setting, target: Target
) -> Iterator[Row]:
    """Against ResNet-50, and against it with all of ours but attention: measured together."""
    sides: Sides = {ours: make_ours, CONV: partial(_conv_training, setting), TWIN: partial(_twin_training, setting)}
    found, batches = measure(sides, setting, repeats=3), dict.fromkeys(sides, setting.batch)
    yield _throughput_row(f"{what}, batch {setting.batch}", ours, found.only(ours, CONV), batches, target)
    what = f"{what}, {TWIN}, batch {setting.batch}"
    yield _throughput_row(what, ours, found.only(ours, TWIN), batches, None)


def _throughput_row(what: str, ours: str, found: Measured, batches: dict[str, int], target: Target | None) -> Row:
    return Row(
        what,
        "images/s",
        found.per_second(batches),
        ours,
        "higher",
        target,
        found.modes,
        found.errors,
    )


@case("training", "training")
def training(setting: Setting) -> Iterator[Row]:
    """Training throughput of GSA-ResNet-50 and ResNet-50."""
    yield from _training_rows("Training", GSA, partial(_gsa_training, setting), setting, Target(0.71, 1.0))


@case("memory", "training")
def memory(setting: Setting) -> Iterator[Row]:
    """Peak memory of a training step, weights and the optimizer's state included."""
    if not setting.cuda:
        raise SkippedError("needs a GPU: nothing counts the peak of PyTorch's memory on a CPU")
    sides: dict[str, Callable[[Setting], Modes]] = {GSA: _gsa_training, CONV: _conv_training}
    values: dict[str, float] = {}
    modes: dict[str, str] = {}
    errors: dict[str, str] = {}
    for side, make in sides.items():
        try:
            modes[side], step = next(iter(make(setting).items()))
            step()  # the optimizer's state is made in the first
            values[side] = train_memory(step, setting.device) / 2**30
        except Exception as error:
            errors[side] = one_line(error)
    what = f"Peak training memory, batch {setting.batch}"
    yield Row(what, "GiB", values, GSA, "lower", Target(1.2, 1.0), modes, errors)


@case("training-groups", "training")
def training_groups(setting: Setting) -> Iterator[Row]:
    """Training throughput with GSA in the later residual groups, and convolution in the others."""
    for groups, target in {(2, 3, 4): Target(0.79, 1.0), (3, 4): Target(0.92, 1.0)}.items():
        words = f"groups {groups[0]}-{groups[-1]}"
        ours = f"{GSA}, {words}"
        make_ours = partial(_gsa_training, setting, groups=groups)
        yield from _training_rows(f"Training, GSA in {words}", ours, make_ours, setting, target)


@case("gsa-pytorch", "training")
def gsa_pytorch(setting: Setting) -> Iterator[Row]:
    """Training throughput of GSA-ResNet-50 with our module and with PyPI's gsa-pytorch in its place."""
    load_gsa_pytorch()
    # It needs far more memory: where the batch does not fit, a quarter of it does it no injustice.
    quarter = max(2, setting.batch // 4)
    for batch in dict.fromkeys((setting.batch, quarter)):
        row = _gsa_pytorch_row(setting, batch, graphs=setting.graphs, target=Target(6.0, 8.0))
        if row.rival is not None:
            break
    yield row
    if setting.graphs:  # the way it was measured when the goal was set: compiled, and no more
        yield _gsa_pytorch_row(setting, quarter, graphs=False, target=None)


def _gsa_pytorch_row(setting: Setting, batch: int, graphs: bool, target: Target | None) -> Row:
    """Ours at its best, and gsa-pytorch in batches of so many, as CUDA graphs too or not."""
    theirs = "with gsa-pytorch"
    create = partial(gsanet.create_model, "gsa_resnet50", img_size=setting.img_size, attention=GsaPytorch)
    make = partial(training_modes, create, replace(setting, graphs=graphs), batch, setting.img_size)
    found = measure({GSA: partial(_gsa_training, setting), theirs: make}, setting, repeats=3)
    batches = f"{setting.batch}" if batch == setting.batch else f"{setting.batch} and {batch}"
    plain = "" if graphs == setting.graphs else ", which runs without CUDA graphs"
    what = f"Training, ours and gsa-pytorch in one network{plain}, batch {batches}"
    return _throughput_row(what, GSA, found, {GSA: setting.batch, theirs: batch}, target)


@torch.inference_mode()
def infer(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """The logits."""
    return model(batch)


def _for_inference(name: str, setting: Setting) -> nn.Module:
    """The network at its best for inference, before it is compiled."""
    fuse = getattr(gsanet, "fuse_for_inference", None)
    if name == CONV:
        model = fold_batch_norms(torchvision.models.resnet50())
    elif name == EPILOGUES:
        if fuse is None:
            raise SkippedError("this version has no fuse_for_inference")
        model = fuse(torchvision.models.resnet50())
    else:
        model = gsanet.create_model("gsa_resnet50", img_size=setting.img_size).eval()
        model = model if fuse is None else fuse(model)
    return model.to(device=setting.device, dtype=setting.dtype).to(memory_format=torch.channels_last)


def _inference_modes(name: str, setting: Setting) -> Modes:
    batch = images(setting, setting.batch, setting.img_size, setting.dtype)
    modes = compiled_modes(_for_inference(name, setting), setting)
    return with_graphs({mode: partial(infer, model, batch) for mode, model in modes.items()}, setting)


@case("inference", "inference")
def inference(setting: Setting) -> Iterator[Row]:
    """Inference throughput; ResNet-50 with batch normalisation folded into its convolutions, or more of it."""
    sides = {name: partial(_inference_modes, name, setting) for name in (GSA, CONV, EPILOGUES)}
    found = measure(sides, setting, repeats=5)
    batches = dict.fromkeys(sides, setting.batch)
    what = f"Inference, batch {setting.batch}"
    yield _throughput_row(what, GSA, found.only(GSA, CONV), batches, Target(0.80, 1.0))
    what = f"Inference, {EPILOGUES} too, batch {setting.batch}"
    yield _throughput_row(what, GSA, found.only(GSA, EPILOGUES), batches, None)


class GraphedInference:
    """A network as a CUDA graph that takes a new image at each call."""

    def __init__(self, model: Callable[[Tensor], Tensor], image: Tensor):
        self.image, self.input = image, image.clone()
        self.graph = Graphed(partial(infer, model, self.input))

    def __call__(self) -> None:
        """Copy the image to where the graph reads it, and replay."""
        self.input.copy_(self.image)
        self.graph()


def _latency_modes(name: str, setting: Setting) -> Modes:
    model = _for_inference(name, setting)
    image = images(setting, 1, setting.img_size, setting.dtype)
    modes = compiled_modes(model, setting)
    if not setting.cuda:
        return {mode: partial(infer, network, image) for mode, network in modes.items()}
    runs: dict[str, Run] = {f"{mode}, CUDA graph": GraphedInference(network, image) for mode, network in modes.items()}
    if setting.compiled:
        runs["reduce-overhead"] = partial(infer, compiled(model, setting, "reduce-overhead"), image)
    return runs


@case("latency", "latency")
def latency(setting: Setting) -> Iterator[Row]:
    """Inference latency of one image; on a GPU with CUDA graphs, PyTorch's own or captured by hand."""
    sides = {name: partial(_latency_modes, name, setting) for name in (GSA, CONV, EPILOGUES)}
    found = measure(sides, setting)
    rows = {
        "Inference, one image": (CONV, Target(1.4, 1.0)),
        f"Inference, {EPILOGUES} too, one image": (EPILOGUES, None),
    }
    for what, (rival, target) in rows.items():
        part = found.only(GSA, rival)
        yield Row(what, "ms", part.times, GSA, "lower", target, part.modes, part.errors)


SMALL = "GSA-ResNet-38"
SMALL_TWIN = "ResNet-38"
SMALL_CONV = "torchvision's ResNet-38"


@case("small-images", "small images")
def small_images(setting: Setting) -> Iterator[Row]:
    """Training throughput at 64x64 of GSA-ResNet-38 and its twin, with our norms too or torchvision's, stem 7x7/2."""
    size, batch = min(64, setting.img_size), 2 * setting.batch
    options: dict[str, Any] = {"stem": "7x7/2", "img_size": size, "num_classes": 200}
    networks: dict[str, Callable[[], nn.Module]] = {
        SMALL: partial(gsanet.create_model, "gsa_resnet38", **options),
        SMALL_TWIN: partial(gsanet.create_model, "conv_resnet38", **options),
        SMALL_CONV: _resnet38,
    }
    sides = {side: partial(training_modes, create, setting, batch, size) for side, create in networks.items()}
    found, batches = measure(sides, setting, repeats=3), dict.fromkeys(sides, batch)
    what = f"Training at {size}x{size}, batch {batch}"
    yield _throughput_row(what, SMALL, found.only(SMALL, SMALL_TWIN), batches, Target(0.71, 1.0))
    what = f"Training at {size}x{size}, {SMALL_CONV}, batch {batch}"
    yield _throughput_row(what, SMALL, found.only(SMALL, SMALL_CONV), batches, None)


def _resnet38() -> nn.Module:
    """ResNet-38 of torchvision's blocks, without max pooling, for 200 classes."""
    model = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [2, 3, 5, 2], num_classes=200)
    model.maxpool = nn.Identity()
    return model
