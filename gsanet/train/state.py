"""What changes during a run, and so what a checkpoint has to hold."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from gsanet.train import checkpoint


class DivergedError(ValueError):
    """The loss or the weights are no longer finite numbers."""

    def __init__(self, what: str, step: int, out: Path):
        super().__init__(
            f"{what} at step {step}: stopped. The last good weights are in {out / 'last'}; try a lower lr, more "
            f"warmup_epochs or clip_grad, from the start or from those weights (--weights {out / 'last'})"
        )


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0  # optimizer steps done
    train_images: int = 0  # of the data set, to notice when it is another
    epoch_loss: float = 0.0  # sum over the steps of this epoch
    epoch_steps: int = 0
    row_losses: list[float] = field(default_factory=list)  # of the steps since the last row of metrics
    best_top1: float = -1.0
    best_step: int = 0
    evaluation: dict[str, Any] = field(default_factory=dict)  # the latest
    seconds: float = 0.0


@dataclass
class TrainingState:
    """The network, what trains it, and how far it is.

    Args:
        model: The network itself, without any wrapper.
        optimizer: Of its parameters.
        ema: The moving average of its weights, or None.
        progress: How far the run is.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: ModelEmaV3 | None
    progress: Progress

    @property
    def evaluated(self) -> nn.Module:
        """The network that counts: the moving average, if there is one."""
        return self.model if self.ema is None else self.ema.module

    def save_last(self, out: Path) -> None:
        """Write the checkpoint from which the run can go on."""
        tensors = {"model": self.model.state_dict(), "optimizer": self._memory()}
        if self.ema is not None:
            tensors["ema"] = self.ema.module.state_dict()
        checkpoint.save(out / "last", tensors, asdict(self.progress))

    def save_best(self, out: Path) -> None:
        """Write the weights that count."""
        checkpoint.save(out / "best", {"model": self.evaluated.state_dict()}, asdict(self.progress))

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Become what `save_last` wrote."""
        progress = Progress(**found.state)
        if progress.train_images != self.progress.train_images:
            changed = (
                f"this run was started on {progress.train_images} training images and there are now "
                f"{self.progress.train_images}"
            )
            if progress.step == 0:
                raise ValueError(f"{changed}: no step was done yet, so start it anew with the same --out")
            raise ValueError(
                f"{changed}: it goes on with the same ones only (older versions passed over .gif "
                f"and .avif files, and took hidden ones): put them back, or start a new run with --weights {found.path}"
            )
        self.progress = progress
        self.model.load_state_dict(found.tensors["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(found.tensors["ema"])
        parameters = dict(self.model.named_parameters())
        for key, value in found.tensors["optimizer"].items():
            kind, _, name = key.partition("/")
            # In the parameter's memory format: vectorised and scalar code round differently.
            memory = torch.empty_like(parameters[name], dtype=value.dtype, requires_grad=False)
            self.optimizer.state[parameters[name]][kind] = memory.copy_(value)

    def check_finite(self, out: Path) -> None:
        """Refuse broken weights, before they are saved: a finite loss can still have had an infinite gradient."""
        weights = self.model.state_dict()
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in weights.values()])
        if not finite.all():
            name = list(weights)[finite.tolist().index(False)]
            raise DivergedError(f"the weights {name} are not finite", self.progress.step, out)

    def _memory(self) -> dict[str, Tensor]:
        """What the optimizer remembers, such as momentum, each tensor as `kind/parameter`."""
        return {
            f"{kind}/{name}": value
            for name, parameter in self.model.named_parameters()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
