"""A finished run as one file: bf16 weights, and in their metadata all that it takes to use them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch

from gsanet.models import count_flops, count_parameters
from gsanet.models.described import Description
from gsanet.train import checkpoint as checkpoints
from gsanet.train.checkpoint import explained, write_durably
from gsanet.train.data.sources import evaluated_on
from gsanet.train.evaluate_weights import evaluate_weights, weights_recipe
from gsanet.train.recipe import Recipe
from gsanet.train.run_directory import read_evaluation
from gsanet.train.run_network import load_run_network

__all__ = ["pack"]

# Of the machine, not of the network.
PLACES = ("path", "in_memory", "workers")


def pack(
    run: str | Path,
    out: str | Path,
    *,
    checkpoint: str = "last",
    data: str = "",
    license: str = "apache-2.0",
    note: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> Description:
    """Write the weights of a run in bf16, with what they are (see `gsanet.models.described`).

    Args:
        run: The run directory.
        out: The file, `NAME.safetensors`.
        checkpoint: `"last"` or `"best"` weights. The best ones were chosen by the images that the run was evaluated on,
            so their accuracy there says too much.
        data: Evaluate what was written on this data set, as `gsanet.train.data.open_data` takes it. Default: take the
            figures of the run, whose weights were not yet rounded to bf16.
        license: Of the weights, as the Hub spells it.
        note: What the licence does not say, such as the terms of the data.
        report: Called with a line on images of `data` that could not be decoded, which are not counted.
    """
    run, out = Path(run), Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"the file must be named NAME.safetensors, got {out}")
    if checkpoint not in ("last", "best"):
        raise ValueError(f"checkpoint must be last or best, got {checkpoint!r}")
    found = load_run_network(run, checkpoint)
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in found.model.state_dict().items()
    }
    described = Description(
        out,
        recipe=_without_places(found.recipe).to_yaml(),
        classes=found.class_names,
        metrics={
            **_run_metrics(run, checkpoint, found.recipe),
            "params": count_parameters(found.model),
            "flops": count_flops(found.model),
        },
        license=license,
        note=note,
    )
    with explained(out):  # before an evaluation that may take long
        folder = TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-")
    # The file appears when all is well: one whose evaluation failed would look like any other.
    with folder as beside:
        draft = Path(beside, out.name)
        _write(draft, tensors, described, out)
        if data:
            evaluation = evaluate_weights(weights_recipe(draft, "", {"data.path": data}), draft, report)
            figures = {**described.metrics, **_figures(asdict(evaluation), data, 0.0, "bf16")}
            described = replace(described, metrics=figures)
            _write(draft, tensors, described, out)
        with explained(out):
            draft.replace(out)
    return described


def _write(draft: Path, tensors: dict[str, torch.Tensor], described: Description, out: Path) -> None:
    with explained(out):
        write_durably(draft, safetensors.torch.save(tensors, described.metadata()))


def _without_places(recipe: Recipe) -> Recipe:
    data = {key: value for key, value in recipe.data.items() if key not in PLACES}
    return replace(recipe, data=data, weights=None)


def _run_metrics(run: Path, checkpoint: str, recipe: Recipe) -> dict[str, Any]:
    """What was measured of the weights as they were trained: by `gsanet eval`, or during training."""
    if figures := read_evaluation(run, checkpoint):
        return _figures(figures, figures["data"], figures["holdout"], "fp32")
    saved, _ = checkpoints.load(run / checkpoint)
    state = saved.state if saved else {}
    if not state.get("evaluation") or state["epoch_steps"]:  # trained on since
        command = f"gsanet eval --run {run} --checkpoint {checkpoint}"
        raise ValueError(f"{run} has not evaluated its {checkpoint} weights yet: `{command}`")
    return _figures(state["evaluation"], recipe.data_path, recipe.data_settings.holdout, "fp32")


def _figures(evaluation: dict[str, Any], data: str, holdout: float, weights: str) -> dict[str, Any]:
    """The figures that belong to the weights, and what they were measured on."""
    kept = {key: evaluation[key] for key in ("top1", "top5", "loss", "images")}
    return {**kept, "on": evaluated_on(data, evaluation["images"], holdout), "weights": weights}
