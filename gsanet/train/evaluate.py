"""How good a network is: top-1, top-5, loss, and images a second."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from gsanet.train.data import EvalLoader


@dataclass(frozen=True)
class Evaluation:
    """Accuracies in per cent; `loss` is the cross-entropy without label smoothing."""

    top1: float
    top5: float
    loss: float
    images: int
    images_per_second: float


@torch.inference_mode()
def evaluate(model: nn.Module, loader: EvalLoader, accelerator: Accelerator, precision: str = "bf16") -> Evaluation:
    """Evaluate on all samples of a loader, over all processes; leaves the model in evaluation mode."""
    model.eval()
    device = accelerator.device
    totals = torch.zeros(4, device=device)  # top-1, top-5, loss, images
    seen = 0
    start = time.perf_counter()
    for images, labels in loader.batches():
        with autocast(device, precision):
            logits = model(images)
        logits = logits.float()
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        totals[:3] += torch.stack([ranked[:, 0].sum(), ranked.sum(), loss])
        seen += len(labels)
    totals[3] = seen
    top1, top5, loss, count = accelerator.reduce(totals, "sum").tolist()
    seconds = time.perf_counter() - start
    if not count:
        raise ValueError("there are no images to evaluate on")
    return Evaluation(100 * top1 / count, 100 * top5 / count, loss / count, int(count), count / seconds)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bf16 autocast on GPUs; a CPU computes in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16" and device.type != "cpu")
