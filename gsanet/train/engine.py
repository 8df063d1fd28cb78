"""The training loop: `train` reads from top to bottom; what it calls follows in the order of the calls.

The same code runs on a CPU, a GPU, and under `torchrun` on many: accelerate finds the processes and wraps the network.
A run is a function of its recipe. Nothing random carries over from one step to the next: the data order comes from
(seed, epoch), the augmentation from (seed, epoch, sample), everything else from (seed, step, process). So weights,
momentum and the number of steps are all that it takes to go on exactly where a run stopped.
"""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

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
from gsanet.models.registry import check_name
from gsanet.train import checkpoint
from gsanet.train.data import Data, open_data, too_few
from gsanet.train.data.damage import skipped_words
from gsanet.train.evaluate import Evaluation, autocast, evaluate
from gsanet.train.graph import GraphedStep
from gsanet.train.interrupt import Interrupt
from gsanet.train.recipe import Recipe
from gsanet.train.report import Reporter, draw_curves, duration
from gsanet.train.run_directory import resume_run, start_run
from gsanet.train.schedule import learning_rate
from gsanet.train.state import DivergedError, Progress, TrainingState
from gsanet.train.step_log import StepLog, StepRecord
from gsanet.train.weights import load_weights
from gsanet.words import count


@dataclass(frozen=True)
class Result:
    """How a call of `train` ended; `stopped_by` is the number of the signal, if one did (SIGALRM: the time was up)."""

    out: Path
    progress: Progress
    stopped_by: int | None = None


def train(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    stop_after: float | None = None,
    before_step: Callable[[int], None] | None = None,
) -> Result:
    """Train as the recipe says.

    Args:
        recipe: With `data.path` set.
        out: The run directory, seen by all processes. Without `resume`, it must not hold a run, but for one that
            ended before a step was saved.
        resume: Go on from the last checkpoint of `out`, or from the start if there is none yet.
        stop_after: Save and stop after so many seconds, as if a signal had come.
        before_step: Called before each step, in each process, with the number of those that are done.
    """
    deadline = None if stop_after is None else time.monotonic() + stop_after
    out = Path(out)
    check_name(recipe.model)  # before the data, which may take long to open
    accelerator = make_accelerator(recipe)
    is_main, world_size = accelerator.is_main_process, accelerator.num_processes

    # Data. A batch is computed in `micro_steps` parts; each process gets an equal share of each part.
    micro_steps = recipe.micro_steps(world_size)
    device_batch = recipe.batch_size // (micro_steps * world_size)
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
        raise ValueError(f"{recipe.data_path} has {too_few(data.train.num_samples, recipe.batch_size)}")
    total_steps = recipe.steps or (recipe.epochs or 0) * steps_per_epoch
    total_epochs = math.ceil(total_steps / steps_per_epoch)

    # The network, what trains it, and how far it is.
    seed_all(recipe.seed)
    model = make_model(recipe, data.num_classes)
    found, damage = checkpoint.load(out / "last") if resume else (None, [])
    loaded = load_weights(model, recipe.weights) if recipe.weights and found is None else ""
    if recipe.sync_bn:
        model = synchronise_bn(model, accelerator)
    model.to(accelerator.device).to(memory_format=torch.channels_last)
    state = TrainingState(
        model,
        make_optimizer(recipe, model),
        ModelEmaV3(model, recipe.ema, use_warmup=True, warmup_power=3 / 4) if recipe.ema else None,
        Progress(train_images=data.train.num_samples),
    )
    mix = make_mixup(recipe, data.num_classes, device_batch)
    if found is not None:
        state.restore(found)
    if is_main:
        resume_run(out, recipe) if resume else start_run(out, recipe, data.class_names)
        if found is None:
            state.save_last(out)  # good weights from the first step on; and a full disk is noticed now
    network = accelerator.prepare_model(model)
    if recipe.compile:
        network = torch.compile(network)
    graph, no_graph = make_graph(recipe, network, micro_steps, accelerator, mix)

    progress, log = state.progress, StepLog(accelerator)
    began, saved_at = time.perf_counter() - progress.seconds, time.perf_counter()
    with (
        Interrupt(deadline) as interrupt,
        Reporter(out, progress.step, total_steps, is_main, progress.row_losses) as reporter,
    ):
        for line in (data.description, loaded, *damage, no_graph):
            if line:
                reporter.say(line)
        shares = f"{count(world_size, 'process', 'processes')} x {count(micro_steps, 'part')} x {device_batch}"
        reporter.say(
            f"{recipe.model} on {accelerator.device.type}: step {progress.step} of {total_steps}, {steps_per_epoch} an "
            f"epoch; {recipe.batch_size} images a step = {shares}"
        )
        if recipe.compile and progress.step < total_steps:
            reporter.say("compiling the network: the first steps take a minute or two")
        while progress.step < total_steps:
            epoch, steps_done = divmod(progress.step, steps_per_epoch)
            epoch_end = min((epoch + 1) * steps_per_epoch, total_steps)
            first_step, epoch_began, stop = progress.step, time.perf_counter(), False
            set_training(model, recipe.freeze_bn)
            batches = data.train.batches(epoch, steps_done * micro_steps)
            while progress.step < epoch_end and not stop:
                if before_step is not None:
                    before_step(progress.step)
                lr = learning_rate(recipe, progress.step, steps_per_epoch, total_steps)
                seed_all(recipe.seed, progress.step, accelerator.process_index)
                loss = train_step(network, state.optimizer, lr, batches, micro_steps, recipe, accelerator, mix, graph)
                progress.step += 1
                if state.ema is not None:
                    state.ema.update(model, progress.step)
                due = is_main and time.perf_counter() - saved_at > 60 * recipe.checkpoint_minutes
                log.push(progress.step, loss, lr, stop=interrupt.wish is not None, save=due)
                stop, save = take_in(log.records(), progress, reporter, recipe, out)
                if recipe.checkpoint_steps and progress.step % recipe.checkpoint_steps == 0:
                    save = True
                if save and progress.step < epoch_end:  # the end of an epoch is saved below
                    take_in(log.records(lag=0), progress, reporter, recipe, out)
                    save_last(state, out, is_main, began)
                    saved_at = time.perf_counter()

            take_in(log.records(lag=0), progress, reporter, recipe, out)
            evaluates = progress.step == total_steps or (epoch + 1) % recipe.evaluate_epochs == 0
            if progress.step == epoch_end and not evaluates and not stop:
                continue
            if progress.step == epoch_end and evaluates:
                speed = (epoch_end - first_step) * recipe.batch_size / (time.perf_counter() - epoch_began)
                if world_size > 1:
                    distribute_bn(state.evaluated, world_size)  # as in checkpoints, the first process's count
                result = evaluate(state.evaluated, data.val, accelerator, recipe.precision_on(accelerator.device))
                reporter.epoch(progress.step, total_epochs, epoch_row(progress, steps_per_epoch, result, speed))
                progress.evaluation = asdict(result)
                progress.epoch_loss, progress.epoch_steps = 0.0, 0
                if result.top1 > progress.best_top1:
                    progress.best_top1, progress.best_step = result.top1, progress.step
                    if is_main:
                        state.save_best(out)
            save_last(state, out, is_main, began)
            saved_at = time.perf_counter()
            if stop and progress.step < total_steps:
                reporter.say(
                    f"Stopped after step {progress.step} of {total_steps}, and saved. "
                    f"To go on: gsanet train --resume {out}"
                )
                return Result(out, progress, interrupt.wish or signal.SIGTERM)

    if is_main:
        finish(out, recipe, data, progress)
    return Result(out, progress)


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The processes and their devices; on one CPU, one process."""
    if torch.cuda.is_available():
        # What is fastest today may be another algorithm tomorrow: not for one who asked torch for the same bits again.
        torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
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
    check_name(recipe.model)
    options = dict(recipe.model_kwargs)
    # timm's networks take an image size only where their structure depends on it.
    if recipe.model in list_models() or timm.models.get_pretrained_cfg_value(recipe.model, "fixed_input_size"):
        options.setdefault("img_size", recipe.image_size)
    try:
        return create_model(recipe.model, num_classes=num_classes, **options)
    except TypeError as error:
        raise ValueError(
            f"{recipe.model} does not take all of model_kwargs {recipe.model_kwargs}: {error} "
            "(--set model_kwargs={} leaves them out)"
        ) from error


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
    return Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mix_probability,
        label_smoothing=recipe.label_smoothing,
        num_classes=num_classes,
    )


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
    lr: float,
    batches: Iterator[tuple[Tensor, Tensor]],
    micro_steps: int,
    recipe: Recipe,
    accelerator: Accelerator,
    mix: Mixup | None,
    graph: GraphedStep | None = None,
) -> Tensor:
    """One optimizer step over the next batch; returns this process's mean loss, still on the device."""
    compute = graph or partial(differentiate, network, recipe, micro_steps, accelerator, mix)
    total = torch.zeros((), device=accelerator.device)
    for part in range(micro_steps):
        images, labels = next(batches)
        if mix:
            images, labels = mix(images, labels)
        is_last = part == micro_steps - 1
        with nullcontext() if is_last else accelerator.no_sync(network):  # processes add up gradients only once
            total += compute(images, labels).detach()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if recipe.clip_grad:
        nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
    optimizer.step()
    if graph is None:  # a graph writes over them
        optimizer.zero_grad()
    return total


def differentiate(
    network: nn.Module,
    recipe: Recipe,
    micro_steps: int,
    accelerator: Accelerator,
    mix: Mixup | None,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """The loss of one part of a batch, as its share of the whole, with its gradients added to those that are there."""
    with autocast(accelerator.device, recipe.precision_on(accelerator.device)):
        logits = network(images)
    smoothing = 0.0 if mix else recipe.label_smoothing
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing) / micro_steps
    loss.backward()
    return loss


def make_graph(
    recipe: Recipe, network: nn.Module, micro_steps: int, accelerator: Accelerator, mix: Mixup | None
) -> tuple[GraphedStep | None, str]:
    """Forward and backward pass as a CUDA graph, if the recipe asks for it; or a line that says why not."""
    if not recipe.cuda_graphs:
        return None, ""
    if accelerator.device.type != "cuda":
        return None, f"cuda_graphs needs a GPU with CUDA: it is not used on {accelerator.device.type}"
    if micro_steps > 1 or accelerator.num_processes > 1:
        return None, "cuda_graphs is for one GPU that computes a batch at once: it is not used here"
    return GraphedStep(network, partial(differentiate, network, recipe, micro_steps, accelerator, mix)), ""


def take_in(
    records: Iterable[StepRecord], progress: Progress, reporter: Reporter, recipe: Recipe, out: Path
) -> tuple[bool, bool]:
    """Count the steps that the device has done; whether any process asks to stop, and to save."""
    stop = save = False
    for record in records:
        if not math.isfinite(record.loss):
            raise DivergedError(f"the loss became {record.loss}", record.step, out)
        progress.epoch_loss += record.loss
        progress.epoch_steps += 1
        reporter.step(record, recipe.batch_size)
        stop, save = stop or record.stop, save or record.save
    return stop, save


def save_last(state: TrainingState, out: Path, is_main: bool, began: float) -> None:
    """Save, from the first process; all of them look at the weights first, so that all stop if they are broken."""
    state.check_finite(out)
    state.progress.seconds = time.perf_counter() - began
    if is_main:
        state.save_last(out)


def epoch_row(progress: Progress, steps_per_epoch: int, result: Evaluation, speed: float) -> dict[str, float]:
    """The metrics of an epoch."""
    return {
        "epoch": progress.step / steps_per_epoch,
        "train_loss": progress.epoch_loss / progress.epoch_steps,
        "val_loss": result.loss,
        "top1": result.top1,
        "top5": result.top5,
        "overflowed": result.overflowed,
        "images_per_second": speed,
    }


def finish(out: Path, recipe: Recipe, data: Data, progress: Progress) -> None:
    """Draw the curves and say where everything is."""
    no_curves = draw_curves({recipe.model: out}, out / "curves.png")
    last = progress.evaluation
    skipped = skipped_words(data.bad_files())
    for line in (
        f"Done: {progress.step} steps in {duration(progress.seconds)}.",
        f"  top-1 {last['top1']:.2f} %, top-5 {last['top5']:.2f} % at the end (weights: {out / 'last'})",
        f"  top-1 {progress.best_top1:.2f} % at best, after step {progress.best_step} (weights: {out / 'best'})",
        f"  {skipped}" if skipped else None,
        f"  curves: {no_curves or out / 'curves.png'}",
        f"  metrics: {out / 'metrics.jsonl'}, and tensorboard --logdir {out}",
        f"  to evaluate again: gsanet eval --run {out}",
    ):
        if line:
            print(line, flush=True)
