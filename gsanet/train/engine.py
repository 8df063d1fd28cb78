"""The training loop: `train` reads from top to bottom; what it calls follows in the order of the calls.

The same code runs on a CPU, a GPU, and under `torchrun` on many: accelerate finds the processes and wraps the network.
A run is a function of its recipe. Nothing random carries over from one step to the next: the data order comes from
(seed, epoch), the augmentation from (seed, epoch, sample), everything else from (seed, step, process). So weights,
momentum and the number of steps are all that it takes to go on exactly where a run stopped.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from timm.data import Mixup
from timm.layers import convert_sync_batchnorm
from timm.optim import param_groups_weight_decay
from timm.utils import ModelEmaV3, distribute_bn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gsanet.models import create_model, list_models
from gsanet.train import checkpoint
from gsanet.train.data import Data, open_data
from gsanet.train.evaluate import Evaluation, autocast, evaluate
from gsanet.train.interrupt import Interrupt
from gsanet.train.recipe import Recipe
from gsanet.train.report import Reporter, draw_curves, duration
from gsanet.train.run_directory import record_session, start_run
from gsanet.train.schedule import learning_rate
from gsanet.train.step_log import StepLog
from gsanet.train.weights import load_weights


class DivergedError(ValueError):
    """The loss or the weights are no longer finite numbers."""


@dataclass
class Progress:
    """How far a run is; saved with each checkpoint."""

    step: int = 0  # optimizer steps done
    train_images: int = 0  # of the data set, to notice when it is another
    epoch_loss: float = 0.0  # sum over the steps of this epoch
    epoch_steps: int = 0
    best_top1: float = -1.0
    best_step: int = 0
    last: dict[str, Any] | None = None  # the last evaluation
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended; `stopped_by` is the number of the signal, if one did."""

    out: Path
    progress: Progress
    stopped_by: int | None = None


def train(recipe: Recipe, out: str | Path, resume: bool = False) -> Result:
    """Train as the recipe says.

    Args:
        recipe: With `data.path` set.
        out: The run directory, seen by all processes. Without `resume`, it must not hold a run.
        resume: Go on from the last checkpoint of `out`, or from the start if there is none yet.
    """
    out = Path(out)
    accelerator = make_accelerator(recipe)
    is_main, world_size = accelerator.is_main_process, accelerator.num_processes

    # Data. A batch is computed in `micro_steps` parts; each process gets an equal share of each part.
    micro_steps = recipe.micro_steps(world_size)
    data = open_data(
        recipe.data_path,
        recipe.data_settings,
        batch_size=recipe.batch_size // micro_steps,
        seed=recipe.seed,
        rank=accelerator.process_index,
        world_size=world_size,
        device=accelerator.device,
    )
    steps_per_epoch = len(data.train) // micro_steps
    if not steps_per_epoch:
        raise ValueError(
            f"the training set has {data.train.num_samples} images, fewer than one batch of {recipe.batch_size}: "
            "set a smaller batch_size"
        )
    total_steps = recipe.steps or (recipe.epochs or 0) * steps_per_epoch
    total_epochs = math.ceil(total_steps / steps_per_epoch)

    # The network, and what trains it.
    seed_all(recipe.seed)
    model = make_model(recipe, data.num_classes)
    loaded = load_weights(model, recipe.weights) if recipe.weights else None
    if recipe.sync_bn:
        model = synchronise_bn(model, accelerator)
    model.to(accelerator.device, memory_format=torch.channels_last)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(recipe, model)
    ema = ModelEmaV3(model, recipe.ema, use_warmup=True, warmup_power=3 / 4) if recipe.ema else None
    evaluated = ema.module if ema else model
    mix = make_mixup(recipe, data.num_classes, recipe.batch_size // (micro_steps * world_size))
    progress = Progress(train_images=data.train.num_samples)

    def save() -> None:
        """Write the checkpoint `last`: only of finite weights, and only from the first process."""
        check_finite(model, progress.step, out)
        if is_main:
            tensors = {"model": model.state_dict(), "optimizer": checkpoint.optimizer_tensors(optimizer, names)}
            if ema:
                tensors["ema"] = ema.module.state_dict()
            checkpoint.save(out / "last", tensors, asdict(progress))

    if resume:
        found, damage = checkpoint.load(out / "last")
        if found:
            model.load_state_dict(found.tensors["model"])
            checkpoint.restore_optimizer(optimizer, names, found.tensors["optimizer"])
            if ema:
                ema.module.load_state_dict(found.tensors["ema"])
            progress = restore_progress(found.state, data)
        if is_main:
            record_session(out, recipe)
    else:
        damage = []
        if is_main:
            start_run(out, recipe, data.class_names)
            save()  # a disk that cannot be written is noticed now, and there are good weights from the first step on

    network = accelerator.prepare_model(model)
    if recipe.compile:
        network = torch.compile(network)

    log, seconds_before, began = StepLog(accelerator), progress.seconds, time.perf_counter()
    with Interrupt() as interrupt, Reporter(out, progress.step, total_steps, is_main) as reporter:
        for line in (data.description, loaded, *damage):
            if line:
                reporter.say(line)
        reporter.say(
            f"{recipe.model}: step {progress.step} of {total_steps}, {steps_per_epoch} an epoch, batch "
            f"{recipe.batch_size} = {world_size} x {recipe.batch_size // (world_size * micro_steps)} x {micro_steps} "
            f"(processes x images x parts) on {accelerator.device.type}"
        )
        saved_at = time.perf_counter()

        def read_losses(everything: bool = False) -> tuple[bool, bool]:
            """Take in the steps that the device has done; whether a process asks to stop, or to save."""
            stop = save = False
            for record in log.records(0) if everything else log.records():
                if not math.isfinite(record.loss):
                    raise DivergedError(diverged(f"the loss became {record.loss}", record.step, out))
                progress.epoch_loss += record.loss
                progress.epoch_steps += 1
                reporter.step(record.step, record.loss, rate(record.step - 1), recipe.batch_size)
                stop, save = stop or record.stop, save or record.save
            return stop, save

        rate = partial(learning_rate, recipe, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
        while progress.step < total_steps:
            epoch, done = divmod(progress.step, steps_per_epoch)
            epoch_end = min((epoch + 1) * steps_per_epoch, total_steps)
            set_training(model, recipe.freeze_bn)
            batches = data.train.batches(epoch, done * micro_steps)
            epoch_began, epoch_began_at = time.perf_counter(), progress.step
            while progress.step < epoch_end:
                seed_all(recipe.seed, progress.step, accelerator.process_index)
                for group in optimizer.param_groups:
                    group["lr"] = rate(progress.step)
                loss = train_step(network, optimizer, batches, micro_steps, recipe, accelerator, mix)
                progress.step += 1
                if ema:
                    ema.update(model, progress.step)
                due = is_main and time.perf_counter() - saved_at > 60 * recipe.checkpoint_minutes
                log.push(progress.step, loss, stop=interrupt.received is not None, save=due)
                stop, save_now = read_losses()
                if recipe.checkpoint_steps and progress.step % recipe.checkpoint_steps == 0:
                    save_now = True
                if (stop or save_now) and progress.step < epoch_end:
                    read_losses(everything=True)
                    progress.seconds = seconds_before + time.perf_counter() - began
                    save()
                    saved_at = time.perf_counter()
                    if stop:
                        reporter.say(stopped(progress.step, total_steps, out))
                        return Result(out, progress, int(interrupt.received or 0))

            # The end of an epoch: evaluate, keep the best, save.
            stop = read_losses(everything=True)[0] or stop
            speed = (progress.step - epoch_began_at) * recipe.batch_size / (time.perf_counter() - epoch_began)
            if world_size > 1:
                distribute_bn(evaluated, world_size)  # the first process's statistics count, as they do in its checkpoints
            result = evaluate(evaluated, data.val, accelerator, recipe.precision)
            progress.last = asdict(result)
            reporter.epoch(progress.step, total_epochs, epoch_row(progress, steps_per_epoch, result, speed))
            progress.epoch_loss, progress.epoch_steps = 0.0, 0
            progress.seconds = seconds_before + time.perf_counter() - began
            if result.top1 > progress.best_top1:
                progress.best_top1, progress.best_step = result.top1, progress.step
                if is_main:
                    checkpoint.save(out / "best", {"model": evaluated.state_dict()}, asdict(progress))
            save()
            saved_at = time.perf_counter()
            if stop and progress.step < total_steps:
                reporter.say(stopped(progress.step, total_steps, out))
                return Result(out, progress, int(interrupt.received or 0))

    if is_main:
        finish(out, recipe, data, progress)
    return Result(out, progress)


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The processes and their devices; on one CPU, one process."""
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    timeout = InitProcessGroupKwargs(timeout=timedelta(minutes=recipe.timeout_minutes))
    return Accelerator(cpu=not torch.accelerator.is_available(), kwargs_handlers=[timeout])


def seed_all(*numbers: int) -> None:
    """Seed torch and numpy (which timm's mixup draws from) by several numbers together."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)


def make_model(recipe: Recipe, num_classes: int) -> nn.Module:
    """The recipe's network for a number of classes."""
    options = dict(recipe.model_kwargs)
    # timm's networks take an image size only where their structure depends on it.
    if recipe.model in list_models() or timm.models.get_pretrained_cfg_value(recipe.model, "fixed_input_size"):
        options.setdefault("img_size", recipe.image_size)
    return create_model(recipe.model, num_classes=num_classes, **options)


def synchronise_bn(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Batch normalisation over all processes; torch has it for GPUs only."""
    if accelerator.device.type == "cpu":
        raise ValueError("sync_bn needs GPUs: set sync_bn=false, or freeze_bn=true to do without batch statistics")
    return convert_sync_batchnorm(model) if accelerator.num_processes > 1 else model


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.SGD:
    """SGD, without weight decay on norms and biases."""
    groups = param_groups_weight_decay(model, recipe.weight_decay)
    return torch.optim.SGD(groups, lr=recipe.peak_lr, momentum=recipe.momentum, nesterov=recipe.nesterov)


def make_mixup(recipe: Recipe, num_classes: int, device_batch: int) -> Mixup | None:
    """Mixup and CutMix, which also smooth the labels."""
    if not (recipe.mixup or recipe.cutmix):
        return None
    if device_batch % 2:
        raise ValueError(f"mixup and cutmix mix pairs: a device's batch must be even, got {device_batch}")
    return Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=num_classes)


def restore_progress(state: dict[str, Any], data: Data) -> Progress:
    """Where the run was, on the same data."""
    progress = Progress(**state)
    if progress.train_images != data.train.num_samples:
        raise ValueError(
            f"this run was started on {progress.train_images} training images and there are now "
            f"{data.train.num_samples}: it cannot go on as if nothing had happened; start a new one with --weights"
        )
    return progress


def set_training(model: nn.Module, freeze_bn: bool) -> None:
    """Training mode, but for batch normalisation if it is frozen."""
    model.train()
    if freeze_bn:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def train_step(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    micro_steps: int,
    recipe: Recipe,
    accelerator: Accelerator,
    mix: Mixup | None,
) -> Tensor:
    """One optimizer step over the next batch; returns this process's mean loss, still on the device."""
    total = torch.zeros((), device=accelerator.device)
    for part in range(micro_steps):
        images, labels = next(batches)
        if mix:
            images, labels = mix(images, labels)
        is_last = part == micro_steps - 1
        with nullcontext() if is_last else accelerator.no_sync(network):  # processes add up gradients only once
            with autocast(accelerator.device, recipe.precision):
                logits = network(images)
            smoothing = 0.0 if mix else recipe.label_smoothing
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing) / micro_steps
            loss.backward()
        total += loss.detach()
    if recipe.clip_grad:
        nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
    optimizer.step()
    optimizer.zero_grad()
    return total


def check_finite(model: nn.Module, step: int, out: Path) -> None:
    """Refuse to save broken weights: a finite loss can still have had an infinite gradient."""
    finite = torch.stack([torch.isfinite(tensor).all() for tensor in model.state_dict().values()])
    if not finite.all():
        name = list(model.state_dict())[int(finite.logical_not().nonzero()[0])]
        raise DivergedError(diverged(f"the weights {name} are not finite", step, out))


def diverged(what: str, step: int, out: Path) -> str:
    """What is said when a run cannot go on."""
    return (
        f"{what} at step {step}: stopped. The last good weights are in {out / 'last'}; "
        f"try a lower lr, more warmup_epochs or clip_grad, from them with --weights {out / 'last'} or from the start"
    )


def stopped(step: int, total_steps: int, out: Path) -> str:
    """What is said when a run was asked to stop."""
    return f"Stopped after step {step} of {total_steps}, and saved. To go on: gsanet train --resume {out}"


def epoch_row(progress: Progress, steps_per_epoch: int, result: Evaluation, speed: float) -> dict[str, float]:
    """The metrics of an epoch."""
    return {
        "epoch": progress.step / steps_per_epoch,
        "train_loss": progress.epoch_loss / progress.epoch_steps,
        "val_loss": result.loss,
        "top1": result.top1,
        "top5": result.top5,
        "images_per_second": speed,
    }


def finish(out: Path, recipe: Recipe, data: Data, progress: Progress) -> None:
    """Draw the curves and say where everything is."""
    no_curves = draw_curves({recipe.model: out}, out / "curves.png")
    last = progress.last or {}
    bad = len(data.bad_files())
    for line in (
        f"Done: {progress.step} steps in {duration(progress.seconds)}.",
        f"  top-1 {last['top1']:.2f} %, top-5 {last['top5']:.2f} % at the end (weights: {out / 'last'})",
        f"  top-1 {progress.best_top1:.2f} % at best, after step {progress.best_step} (weights: {out / 'best'})",
        f"  {bad} images could not be decoded and were skipped" if bad else None,
        f"  curves: {no_curves or out / 'curves.png'}",
        f"  metrics: {out / 'metrics.jsonl'}, and tensorboard --logdir {out}",
        f"  to evaluate again: gsanet eval --run {out}",
    ):
        if line:
            print(line, flush=True)
