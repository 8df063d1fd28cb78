"""Networks as files that run without this package: ONNX, and torch.export's archives.

A file serves any batch and one image size: the tables of relative positions are cut or stretched to that size when the
file is made. Whatever is written was first compared with PyTorch on photographs; a file that differs is not kept.
"""

import contextlib
import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from torch import Tensor, nn

from gsanet.functional import use_backend
from gsanet.inference import fuse_for_inference
from gsanet.models import create_model, list_models
from gsanet.words import first_line

__all__ = ["Export", "ExportError", "Format", "Source", "export_model", "open_network", "sample_photographs"]

Format = Literal["onnx", "exported"]
Size = tuple[int, int]
OLDEST_OPSET = 18  # torch.onnx writes this one and converts upwards only
TOLERANCE = 1e-3  # of the largest logit; what rounding leaves is below 1e-4
BATCHES = (1, 3)  # what a file is checked with; it is traced with a third size
PACKAGES = ("onnx", "onnxruntime", "onnxscript")  # of the extra `onnx`


class ExportError(ValueError):
    """A network cannot be exported, or the file would not compute the same."""


@dataclass(frozen=True)
class Export:
    """A file that was written and checked.

    Attributes:
        file: Where it is.
        size: Its bytes.
        inputs: What it takes, such as `images: float32 [batch, 3, 224, 224]`.
        outputs: What it gives, such as `logits: float32 [batch, 1000]`.
        difference: From PyTorch on photographs, the largest of all batches, over the largest logit.
    """

    file: Path
    size: int
    inputs: str
    outputs: str
    difference: float


def export_model(
    model: nn.Module,
    file: str | Path,
    format: Format = "onnx",
    *,
    img_size: int | Size | None = None,
    opset: int = OLDEST_OPSET,
    fuse: bool = True,
    class_names: list[str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Export:
    """Write a network to a file that runs without this package, and check it on photographs.

    The file takes images of any batch and of one size, normalised, in float32. How to prepare them, and the names of
    the classes, are in it: in ONNX's `metadata_props`, or `gsanet.json` among the archive's extra files.

    Args:
        model: A network of this package or of timm. It is not changed.
        file: Where to write; a file that is there is replaced, but only by one that passes the check.
        format: `"onnx"`, or `"exported"`: an archive for `torch.export.load` (.pt2).
        img_size: Height and width of the images. Default: those that the network was made for. The tables of relative
            positions follow, see `RelativeTables.resize_tables`.
        opset: Of ONNX, 18 or later.
        fuse: Fold batch norms first, see `gsanet.fuse_for_inference`.
        class_names: Names of the classes, in the order of the logits.
        report: Called with a line about each step.

    Raises:
        ExportError: The network cannot be exported, or differs from PyTorch by more than 1e-3 of its largest logit.
    """
    file = Path(file)
    check_request(file, format, opset)
    network = _prepare(model, img_size, fuse)
    height, width = _image_size(network)
    settings: dict[str, Any] = {
        "model": network.pretrained_cfg.get("architecture", type(network).__name__),
        "input_size": [getattr(network, "in_chans", 3), height, width],
        **{key: network.pretrained_cfg.get(key) for key in ("mean", "std", "crop_pct", "interpolation")},
        "class_names": class_names,
    }
    mean, std = settings["mean"] or IMAGENET_DEFAULT_MEAN, settings["std"] or IMAGENET_DEFAULT_STD
    images = sample_photographs((height, width), settings["input_size"][0], mean, std)
    report(f"Tracing {settings['model']} at {height}x{width}{', batch norms folded' if fuse else ''}")
    program = _trace(network, images)
    partial = file.with_name(f".{file.stem}.partial{file.suffix}")  # torch.export.save looks at the suffix
    try:
        report(f"Writing {format}")
        if format == "onnx":
            _write_onnx(program, images, partial, opset, settings)
        else:
            torch.export.save(program, partial, extra_files={"gsanet.json": json.dumps(settings)})
        report(f"Comparing with PyTorch on photographs, batches of {' and '.join(map(str, BATCHES))}")
        run = _open_onnx(partial) if format == "onnx" else _open_exported(partial)
        difference, shape = _compare(network, run, images)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    channels = settings["input_size"][0]
    return Export(
        file,
        file.stat().st_size,
        f"images: float32 [batch, {channels}, {height}, {width}]",
        f"logits: float32 [batch, {', '.join(map(str, shape[1:]))}]",
        difference,
    )


@dataclass(frozen=True)
class Source:
    """A network, the names of its classes if they are known, and a line that says where its weights are from."""

    model: nn.Module
    class_names: list[str] | None
    weights: str


def open_network(
    model: str = "",
    weights: Path | None = None,
    run: Path | None = None,
    img_size: Size | None = None,
    options: Mapping[str, Any] | None = None,
) -> Source:
    """The network that `gsanet export` is asked for, as it was trained.

    Args:
        model: A name, or `local-dir:FOLDER` or `hf-hub:USER/NAME` for a published network. Not needed with a run.
        weights: A safetensors file for the named network; the number of classes is read from it.
        run: A run directory: its best weights.
        img_size: What a named network is made for. Default: its own size.
        options: Of a named network.
    """
    from gsanet.models.fit import layer_names
    from gsanet.train.run_network import load_run_network
    from gsanet.train.weights import load_weights, read_weights

    if run is not None:
        if weights is not None or options:
            raise ValueError("a run has its own weights and options: give no other with --run")
        found = load_run_network(run)
        if model not in ("", found.recipe.model):
            raise ValueError(f"{run} trained {found.recipe.model}, not {model}")
        return Source(found.model, found.class_names or None, f"Weights of {run}, the best of the run.")
    if not model:
        raise ValueError("give the name of a network, or --run DIR")
    chosen = {**({} if img_size is None else {"img_size": img_size}), **(options or {})}
    if ":" in model:
        network: Any = create_model(model, pretrained=True, **chosen)
        return Source(network.eval(), network.pretrained_cfg.get("label_names"), f"Weights of {model}.")
    if weights is None and model in list_models(pretrained=True):
        network = create_model(model, pretrained=True, **chosen)
        names = None if "num_classes" in chosen else network.pretrained_cfg.get("label_names")
        return Source(network.eval(), names, f"Weights of {model}, those of the package.")
    if weights is None:
        return Source(
            create_model(model, **chosen).eval(), None, "Weights are random: give --weights FILE or --run DIR."
        )
    heads = {f"{name}.weight" for name in layer_names(timm.models.get_pretrained_cfg_value(model, "classifier"))}
    if classes := [len(tensor) for name, tensor in read_weights(weights).items() if name in heads]:
        chosen.setdefault("num_classes", classes[0])
    network = create_model(model, **chosen)
    return Source(network.eval(), None, load_weights(network, weights))


def check_request(file: Path, format: str, opset: int = OLDEST_OPSET) -> Format:
    """Refuse early what cannot work, as tracing takes a while; the arguments are those of `export_model`."""
    kinds: dict[str, Format] = {kind: kind for kind in get_args(Format)}
    if format not in kinds:
        raise ValueError(f"format must be one of {', '.join(kinds)}, got {format!r}")
    if opset < OLDEST_OPSET:
        raise ValueError(f"opset must be {OLDEST_OPSET} or later, got {opset}: torch.onnx writes no older one")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} to write {file.name} into")
    suffix = {"onnx": ".onnx", "exported": ".pt2"}[format]
    if file.suffix != suffix:
        raise ValueError(f"a file of format {format} ends in {suffix}, got {file.name}")
    missing = [name for name in PACKAGES if format == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise ExportError(f"ONNX needs {', '.join(missing)}: pip install 'gsanet[onnx]'")
    return kinds[format]


def sample_photographs(img_size: Size, channels: int, mean: Any, std: Any) -> Tensor:
    """Three images as networks take them: the photographs that come with scikit-learn, and one of them mirrored."""
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images().images
    height, width = img_size
    resized = [
        np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC)) for each in photographs
    ]
    images = torch.from_numpy(np.stack([*resized, resized[0][:, ::-1]])).permute(0, 3, 1, 2) / 255
    images = images[:, [channel % 3 for channel in range(channels)]]
    centre, spread = (
        torch.tensor([float(values[channel % len(values)]) for channel in range(channels)]).view(-1, 1, 1)
        for values in (mean, std)
    )
    return ((images - centre) / spread).contiguous()


def _prepare(model: nn.Module, img_size: int | Size | None, fuse: bool) -> Any:
    """A copy for inference, on the CPU and in float32, whose tables fit the image size."""
    network: Any = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().eval()
    if img_size is not None and tuple(to_2tuple(img_size)) != _image_size(network):
        resize = getattr(network, "set_input_size", None)
        if resize is not None:
            resize(to_2tuple(img_size))
        elif network.pretrained_cfg.get("fixed_input_size"):
            raise ExportError(
                f"{type(network).__name__} cannot change its image size: create it with img_size={to_2tuple(img_size)}"
            )
        network.pretrained_cfg = {**network.pretrained_cfg, "input_size": (3, *to_2tuple(img_size))}
    return fuse_for_inference(network) if fuse else network.requires_grad_(False)


def _image_size(network: Any) -> Size:
    size = getattr(network, "img_size", None) or network.pretrained_cfg.get("input_size", (3, 224, 224))[-2:]
    height, width = to_2tuple(size)
    return height, width


def _trace(network: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    # Traced with a batch of two: a size of one would be taken for a constant.
    shapes = ({0: torch.export.Dim("batch")},)
    with use_backend("torch"), torch.no_grad(), _quiet():
        try:
            program = torch.export.export(network, (images[:2],), dynamic_shapes=shapes)
        except Exception as error:  # whatever torch.export meets in anybody's network
            raise ExportError(f"torch.export cannot trace {type(network).__name__}: {first_line(error)}") from error
    own = {str(node.target) for node in program.graph.nodes if str(node.target).startswith("gsanet")}
    if own:
        raise ExportError(f"operators of this package would be needed to run the file: {', '.join(sorted(own))}")
    return program


def _write_onnx(
    program: torch.export.ExportedProgram, images: Tensor, file: Path, opset: int, settings: dict[str, Any]
) -> None:
    with _quiet():
        try:
            written = torch.onnx.export(
                program,
                (images[:2],),
                dynamo=True,
                opset_version=opset,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: "batch"},),
                verbose=False,
            )
        except Exception as error:  # an operator without an ONNX form, or one that this opset lacks
            raise ExportError(f"torch.onnx cannot write {settings['model']}: {first_line(error)}") from error
    assert written is not None
    if written.model.opset_imports[""] != opset:  # conversion upwards that fails is only logged
        raise ExportError(f"opset {opset} is not possible, only {written.model.opset_imports['']}")
    written.model.metadata_props.update(
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    )
    written.save(file)


def _open_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _open_exported(file: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(file).module()


@torch.no_grad()
def _compare(network: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> tuple[float, torch.Size]:
    difference = 0.0
    for batch in BATCHES:
        expected, found = network(images[:batch]), run(images[:batch])
        if not expected.isfinite().all():
            raise ExportError("the network itself gives no finite numbers for photographs: there is nothing to compare")
        if found.shape != expected.shape:
            raise ExportError(f"the file gives {tuple(found.shape)} where PyTorch gives {tuple(expected.shape)}")
        apart = ((found - expected).abs().max() / expected.abs().max()).item()
        if not apart <= TOLERANCE:  # not a number, too
            raise ExportError(
                f"the file differs from PyTorch by {apart:.1e} of the largest logit on photographs, more than "
                f"{TOLERANCE:.0e}: it was not kept"
            )
        difference = max(difference, apart)
    return difference, expected.shape


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export and its parts warn of, all of it about themselves."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
