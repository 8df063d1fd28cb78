"""How good a network is: top-1, top-5, loss, and images a second."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from gsanet.train.data import EvalLoader
from gsanet.words import count


@dataclass(frozen=True)
class Evaluation:
    """Accuracies in per cent; `loss` is the cross-entropy without label smoothing.

    `overflowed` images have an output that is not finite: they count as wrong, and have no part in the loss.
    """

    top1: float
    top5: float
    loss: float
    images: int
    images_per_second: float
    overflowed: int = 0


@torch.inference_mode()
def evaluate(model: nn.Module, loader: EvalLoader, accelerator: Accelerator, precision: str = "fp32") -> Evaluation:
    """Evaluate on all samples of a loader, over all processes; leaves the model in evaluation mode."""
    model.eval()
    device = accelerator.device
    totals = torch.zeros(5, device=device)  # top-1, top-5, loss, overflowed, images
    seen = 0
    start = time.perf_counter()
    for images, labels in loader.batches():
        with autocast(device, precision):
            logits = model(images)
        logits = logits.float()
        finite = logits.isfinite().all(1)
        ranked = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]) & finite[:, None]
        losses = F.cross_entropy(logits, labels, reduction="none").where(finite, 0.0)
        totals[:4] += torch.stack([ranked[:, 0].sum(), ranked.sum(), losses.sum(), (~finite).sum()])
        seen += len(labels)
    totals[4] = seen
    top1, top5, loss, overflowed, count = accelerator.reduce(totals, "sum").tolist()
    seconds = time.perf_counter() - start
    if not count:
        raise ValueError("there are no images to evaluate on")
    return Evaluation(
        top1=100 * top1 / count,
        top5=100 * top5 / count,
        loss=loss / (count - overflowed) if overflowed < count else math.nan,
        images=int(count),
        images_per_second=count / seconds,
        overflowed=int(overflowed),
    )


def overflow_words(overflowed: float) -> str:
    """What to say of images that overflowed; nothing if none did."""
    return f"{count(int(overflowed), 'image')} without a finite output" if overflowed else ""


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """What computes in `bf16` or `fp32`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
