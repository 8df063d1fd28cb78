"""Start from weights that were trained for other classes or another image size."""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from gsanet.layers.relative import TABLES
from gsanet.models.described import count_classes
from gsanet.models.fit import check_fit, fit_state_dict, layer_names
from gsanet.train import checkpoint


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights of a safetensors file, of a checkpoint directory, or the best ones of a run directory."""
    path = Path(path)
    if path.is_file():
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError:
            raise ValueError(f"{path} is not a safetensors file, the only kind of weights that is read") from None
    folder = next((place for place in (path, path / "best", path / "last") if checkpoint.exists(place)), None)
    if folder is None:
        raise FileNotFoundError(f"there are no weights at {path}")
    found, damage = checkpoint.load(folder)
    assert found is not None  # as it exists
    if damage:
        raise checkpoint.CheckpointError(f"{damage[0]}; the one before it is whole: {found.path}")
    return found.tensors.get("ema", found.tensors["model"])


def load_weights(model: nn.Module, path: str | Path) -> str:
    """Load weights into a model that may have another number of classes or be made for another image size.

    The head is then a new one and the tables of relative positions are resized; everything else has to fit.

    Returns:
        A line that says what was loaded, resized and left out.
    """
    weights = read_weights(path)
    target = model.state_dict()
    changed = [name for name in weights if name in target and weights[name].shape != target[name].shape]
    settings: Any = model.pretrained_cfg
    head = layer_names(settings["classifier"])
    left_out = [name for name in changed if name.rpartition(".")[0] in head]
    resized = [name for name in changed if name.endswith(TABLES)]
    check_fit(weights, target, path, allowed={*left_out, *resized})
    fitted = fit_state_dict({name: tensor for name, tensor in weights.items() if name not in left_out}, model)
    model.load_state_dict(fitted, strict=False)
    parts = [f"{len(fitted) - len(resized)} of {len(target)} tensors as they are"]
    if resized:
        parts.append(f"{len(resized)} tables of relative positions resized")
    if left_out:
        old, new = (len(tensors[left_out[0]]) for tensors in (weights, target))
        parts.append(f"a new head for {new} classes in the place of {old}")
    return f"Weights of {path}: {', '.join(parts)}."


def load_exactly(model: nn.Module, path: str | Path) -> None:
    """Load weights that fit the model as it is."""
    weights = read_weights(path)
    settings: Any = model.pretrained_cfg
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    there = count_classes(shapes, settings["classifier"])
    here = count_classes({name: tensor.shape for name, tensor in model.state_dict().items()}, settings["classifier"])
    if None not in (there, here) and there != here:
        raise ValueError(f"the weights of {path} tell {there} classes apart, not {here}: are these the right images?")
    check_fit(weights, model.state_dict(), path, allowed=set())
    model.load_state_dict(weights)
