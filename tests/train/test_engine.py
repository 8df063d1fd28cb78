import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from gsanet.functional import use_backend
from gsanet.train import checkpoint
from gsanet.train.engine import make_accelerator, make_mixup, make_model, make_optimizer, train, train_step
from gsanet.train.recipe import load_recipe, recipe_names
from gsanet.train.report import read_metrics
from gsanet.train.state import DivergedError
from gsanet.train.step_log import StepLog


def weights(run, name="last"):
    return load_file(run / name / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def plain_network():
    """Convolutions without batch normalisation."""
    torch.manual_seed(0)
    first, second = (nn.Conv2d(channels, 8, 3, padding=1) for channels in (3, 8))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def take_steps(recipe, network, images, labels, parts, steps=1):
    """Train on one batch, given in parts; the losses."""
    accelerator = make_accelerator(recipe)
    optimizer = make_optimizer(recipe, network)
    losses = []
    for _ in range(steps):
        batches = zip(images.chunk(parts), labels.chunk(parts), strict=True)
        losses.append(train_step(network, optimizer, recipe.peak_lr, batches, parts, recipe, accelerator, None).item())
    return losses


def test_2048_images_by_accumulation_are_2048_at_once():
    recipe = load_recipe("imagenet", {"img_size": 8, "precision": "fp32"})
    images, labels = torch.randn(2048, 3, 8, 8), torch.randint(10, (2048,))
    at_once, in_parts = plain_network(), plain_network()
    before = [parameter.clone() for parameter in at_once.parameters()]
    losses = take_steps(recipe, at_once, images, labels, parts=1, steps=2)
    losses_in_parts = take_steps(recipe, in_parts, images, labels, parts=recipe.micro_steps(1), steps=2)
    assert recipe.micro_steps(1) == 8
    assert losses_in_parts == pytest.approx(losses, rel=1e-5)
    for start, one, other in zip(before, at_once.parameters(), in_parts.parameters(), strict=True):
        assert (one - start).norm() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_whole_run_by_accumulation(tiny_recipe, tmp_path):
    frozen = {"freeze_bn": True, "steps": 6, "lr": 0.01}
    train(tiny_recipe(**frozen), tmp_path / "once")
    train(tiny_recipe(**frozen, accumulation=4), tmp_path / "parts")
    train(tiny_recipe(**frozen, max_device_batch=20), tmp_path / "limit")
    for name, expected in weights(tmp_path / "once").items():
        for other in ("parts", "limit"):
            torch.testing.assert_close(weights(tmp_path / other)[name], expected, rtol=1e-4, atol=1e-6)


def test_label_smoothing_is_the_formula():
    recipe = load_recipe("quickstart", {"label_smoothing": 0.1, "weight_decay": 0})
    network = plain_network()
    images, labels = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    log_probabilities = network(images).log_softmax(1).detach()
    true_class = log_probabilities[range(16), labels]
    expected = -(0.9 * true_class + 0.1 * log_probabilities.mean(1)).mean()
    assert take_steps(recipe, network, images, labels, parts=1) == pytest.approx([expected.item()], rel=1e-5)


def test_mixing_smooths_labels_too(tiny_recipe):
    mix = make_mixup(tiny_recipe(mixup=0.2, cutmix=1.0, label_smoothing=0.1), num_classes=10, device_batch=4)
    _, target = mix(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(target.sum(1), torch.ones(4))
    assert target.min() == pytest.approx(0.01)
    with pytest.raises(ValueError, match="must be even, got 3"):
        make_mixup(tiny_recipe(mixup=0.2), num_classes=10, device_batch=3)


def test_some_batches_can_be_left_unmixed(tiny_recipe):
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    mix = make_mixup(tiny_recipe(mixup=1.0, mix_probability=0.0), 4, 4)
    mixed, targets = mix(images.clone(), labels)
    assert torch.equal(mixed, images)
    assert torch.equal(targets.argmax(1), labels)
    with pytest.raises(ValueError, match="mix_probability must be between 0 and 1, got 2"):
        tiny_recipe(mix_probability=2.0)


def test_evaluation_after_some_epochs_only(tiny_recipe, tmp_path):
    train(tiny_recipe(epochs=5), tmp_path / "each")
    train(tiny_recipe(epochs=5, evaluate_epochs=2), tmp_path / "some")
    rows = read_metrics(tmp_path / "some", "epoch")
    assert [row["epoch"] for row in rows] == [2.0, 4.0, 5.0]
    losses = [row["train_loss"] for row in read_metrics(tmp_path / "each", "epoch")]
    assert rows[0]["train_loss"] == pytest.approx((losses[0] + losses[1]) / 2)
    assert_same_weights(weights(tmp_path / "each"), weights(tmp_path / "some"))


def test_weight_decay_spares_norms_and_biases(tiny_recipe):
    recipe = tiny_recipe(weight_decay=0.5, momentum=0.0, nesterov=False)
    model = make_model(recipe, 10)
    norms = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for name, _ in module.named_parameters(recurse=False)
    }
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(recipe, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    spared = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert spared == norms | {"head.fc.bias"}
    decayed = dict(model.named_parameters())["stem.conv.weight"]
    torch.testing.assert_close(decayed.detach(), before["stem.conv.weight"] * (1 - recipe.peak_lr * 0.5))


def test_clipping(tiny_recipe):
    network = plain_network()
    before = [parameter.detach().clone() for parameter in network.parameters()]
    recipe = tiny_recipe(clip_grad=1e-3, lr=1.0, weight_decay=0, momentum=0.0, nesterov=False)
    take_steps(recipe, network, torch.randn(8, 3, 8, 8), torch.randint(10, (8,)), parts=1)
    moved = torch.stack([(new - old).norm() for new, old in zip(network.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=1e-2)


def test_frozen_batch_norm_keeps_its_statistics(tiny_recipe, tmp_path):
    train(tiny_recipe(steps=3, freeze_bn=True, lr=0.01), tmp_path / "run")
    after = weights(tmp_path / "run")
    means = [tensor for name, tensor in after.items() if name.endswith("running_mean")]
    assert means
    assert all(mean.eq(0).all() for mean in means)


def test_the_moving_average_is_what_is_evaluated(tiny_recipe, tmp_path):
    recipe = tiny_recipe(steps=8, ema=0.5)
    train(recipe, tmp_path / "run")
    average = load_file(tmp_path / "run" / "last" / "ema.safetensors")
    assert_same_weights(weights(tmp_path / "run", "best"), average)
    name = "head.fc.weight"
    assert not torch.equal(average[name], weights(tmp_path / "run")[name])


def test_a_run_leaves_everything_that_describes_it(tiny_recipe, tmp_path):
    run = tmp_path / "run"
    result = train(tiny_recipe(epochs=2, seed=5), run)
    (session,) = json.loads((run / "environment.json").read_text())
    assert (session["seed"], session["torch"]) == (5, torch.__version__)
    assert {"gsanet", "command", "platform", "python"} <= session.keys()
    assert json.loads((run / "classes.json").read_text()) == [str(digit) for digit in range(10)]
    assert load_recipe(str(run / "recipe.yaml")) == tiny_recipe(epochs=2, seed=5)
    rows = read_metrics(run, "epoch")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[-1]["top1"] == result.progress.evaluation["top1"]
    assert list((run / "tensorboard").iterdir())
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="already holds a run"):
        train(tiny_recipe(epochs=2), run)


class StoppedError(Exception):
    """What ends a run in these tests."""


def stop_at(step):
    """To be called before each step."""

    def check(done):
        if done == step:
            raise StoppedError

    return check


def test_a_run_directory_in_which_no_step_was_saved_is_taken_again(tiny_recipe, tmp_path):
    run, recipe = tmp_path / "run", tiny_recipe(steps=3)
    with pytest.raises(StoppedError):
        train(tiny_recipe(steps=3, seed=1), run, before_step=stop_at(2))
    (run / "notes.txt").write_text("mine")
    train(recipe, run)
    train(recipe, tmp_path / "other")
    assert_same_weights(weights(run), weights(tmp_path / "other"))
    assert load_recipe(str(run / "recipe.yaml")) == recipe
    assert len(json.loads((run / "environment.json").read_text())) == 2
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["last", "last.previous", "best"])
def test_a_run_directory_with_a_step_or_with_what_cannot_be_read_is_left_alone(tiny_recipe, tmp_path, name):
    run = tmp_path / "run"
    with pytest.raises(StoppedError):
        train(tiny_recipe(steps=3), run, before_step=stop_at(0))
    (run / name).mkdir(exist_ok=True)
    for manifest in ('{"state": {"step": 1}, "files": {}}', "half of on"):
        (run / name / "checkpoint.json").write_text(manifest)
        with pytest.raises(ValueError, match="already holds a run"):
            train(tiny_recipe(steps=3), run)
    (run / name / "checkpoint.json").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        train(tiny_recipe(steps=3), run)


@pytest.mark.skipif(os.name != "posix", reason="needs locks of files")
def test_a_run_that_has_not_saved_a_step_yet_is_not_taken_from_its_process(tiny_recipe, tmp_path):
    def start_again(done):
        with pytest.raises(ValueError, match="already holds a run"):
            train(tiny_recipe(steps=1), tmp_path / "run")
        raise StoppedError

    with pytest.raises(StoppedError):
        train(tiny_recipe(steps=1), tmp_path / "run", before_step=start_again)
    train(tiny_recipe(steps=1), tmp_path / "run")  # nobody holds it any more


def test_too_few_images_for_a_batch_in_parts(tiny_recipe, tmp_path):
    with pytest.raises(ValueError, match="fewer than one batch of 2000: `--set batch_size=256` takes smaller batches"):
        train(tiny_recipe(batch_size=2000, accumulation=2), tmp_path / "run")


def test_a_run_is_a_function_of_its_seed(tiny_recipe, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tiny_recipe(steps=3, seed=seed, mixup=0.2), tmp_path / name)
    assert_same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not torch.equal(weights(tmp_path / "a")["head.fc.weight"], weights(tmp_path / "c")["head.fc.weight"])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_weights(tiny_recipe, tmp_path):
    run = tmp_path / "run"
    recipe = tiny_recipe(steps=40, lr=1e18, warmup_epochs=0, checkpoint_steps=1)
    with pytest.raises(DivergedError, match=r"at step \d+: stopped. The last good weights are in .*last") as caught:
        train(recipe, run)
    named = int(str(caught.value).split("at step ")[1].split(":")[0])
    found, damage = checkpoint.load(run / "last")
    assert damage == []
    assert all(torch.isfinite(tensor).all() for tensor in found.tensors["model"].values())
    assert found.state["step"] < named <= 40


def test_the_step_whose_loss_is_nan_is_the_one_that_is_named(tiny_recipe, tmp_path, monkeypatch):
    from gsanet.train import engine

    real, calls = engine.train_step, []

    def nan_at_step_5(*arguments):
        calls.append(1)
        return real(*arguments) * (math.nan if len(calls) == 5 else 1)

    monkeypatch.setattr(engine, "train_step", nan_at_step_5)
    with pytest.raises(DivergedError, match="the loss became nan at step 5: stopped"):
        train(tiny_recipe(steps=40), tmp_path / "run")
    assert len(calls) <= 8  # noticed soon, though it is read late


def test_a_disk_that_fills_up_on_the_way(tiny_recipe, tmp_path, monkeypatch):
    import errno

    run, write = tmp_path / "run", checkpoint.write_durably

    def fail_after_step_4(file, content):
        if file.name == "checkpoint.json" and json.loads(content)["state"]["step"] > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    recipe = tiny_recipe(steps=10, checkpoint_steps=2)
    monkeypatch.setattr(checkpoint, "write_durably", fail_after_step_4)
    with pytest.raises(checkpoint.CheckpointError, match=r"No space left on device; .*last is unharmed"):
        train(recipe, run)
    assert checkpoint.load(run / "last")[0].state["step"] == 4
    monkeypatch.undo()
    train(recipe, run, resume=True)
    train(recipe, tmp_path / "whole")
    assert_same_weights(weights(run), weights(tmp_path / "whole"))


def test_a_truncated_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(tiny_recipe, tmp_path, capsys):
    run, recipe = tmp_path / "run", tiny_recipe(steps=12, checkpoint_steps=5)
    train(recipe, run)
    expected = weights(run)
    file = run / "last" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    capsys.readouterr()
    train(recipe, run, resume=True)
    said = capsys.readouterr().out
    assert f"checkpoint file {file} is damaged: it has 100 bytes" in said
    assert "step 10 of 12" in said
    assert_same_weights(weights(run), expected)


def test_ctrl_c_saves_and_says_how_to_go_on(tiny_recipe, tmp_path, monkeypatch, capsys):
    run, recipe, push = tmp_path / "run", tiny_recipe(steps=30), StepLog.push
    before = signal.getsignal(signal.SIGINT)

    def press_at_step_7(self, step, *arguments, **options):
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        push(self, step, *arguments, **options)

    monkeypatch.setattr(StepLog, "push", press_at_step_7)
    result = train(recipe, run)
    assert result.stopped_by == signal.SIGINT
    assert 7 <= result.progress.step <= 10
    assert f"To go on: gsanet train --resume {run}" in capsys.readouterr().out
    assert checkpoint.load(run / "last")[0].state["step"] == result.progress.step
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is before
    train(recipe, run, resume=True)
    train(recipe, tmp_path / "whole")
    assert_same_weights(weights(run), weights(tmp_path / "whole"))
    # The metrics too are those of one run.
    for kind, key in (("epoch", "train_loss"), ("epoch", "top1")):
        rows = [[row[key] for row in read_metrics(folder, kind)] for folder in (run, tmp_path / "whole")]
        assert rows[0] == rows[1]


def test_a_time_limit_saves_and_the_run_goes_on(tiny_recipe, tmp_path, capsys):
    recipe = tiny_recipe(epochs=1)
    result = train(recipe, tmp_path / "run", stop_after=0.0)
    assert result.stopped_by == signal.SIGALRM
    assert 0 < result.progress.step < 22
    assert f"To go on: gsanet train --resume {tmp_path / 'run'}" in capsys.readouterr().out
    result = train(recipe, tmp_path / "run", resume=True, stop_after=600)
    assert (result.stopped_by, result.progress.step) == (None, 22)


def test_other_data_cannot_be_resumed(tiny_recipe, image_folder, tmp_path):
    recipe = tiny_recipe(**{"steps": 2, "batch_size": 4, "data.path": str(image_folder), "data.workers": 0})
    train(recipe, tmp_path / "run")
    added = image_folder / "train" / "dark" / "moving.gif"
    Image.new("RGB", (8, 8)).save(added)
    with pytest.raises(ValueError, match=r"started on 24 training images and there are now 25: .* \.gif") as error:
        train(recipe, tmp_path / "run", resume=True)
    assert f"or start a new run with --weights {tmp_path / 'run' / 'last'}" in str(error.value)
    train(replace(recipe, weights=str(tmp_path / "run" / "last")), tmp_path / "new")
    added.unlink()
    assert train(recipe, tmp_path / "run", resume=True).progress.step == 2


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_runs_on_a_tiny_folder(name, image_folder, tmp_path):
    small = {"batch_size": 4, "steps": 3, "img_size": 32, "data.path": str(image_folder), "data.workers": 0}
    model = {} if name in ("quickstart", "cifar100-scratch") else {"model": "gsa_resnet26", "model_kwargs.width": 0.125}
    result = train(load_recipe(name, {**small, **model}), tmp_path / "run")
    assert result.progress.step == 3
    assert result.progress.evaluation["images"] == 12


def test_torch_compile_trains_the_same_network(tiny_recipe, tmp_path, monkeypatch, capsys):
    compiler, compiled = torch.compile, []

    def trace_only(network):
        """All of torch.compile but the code generation, which takes a minute."""
        compiled.append(compiler(network, backend="eager"))
        return compiled[0]

    monkeypatch.setattr(torch, "compile", trace_only)
    with use_backend("torch"):  # others are not traced
        train(tiny_recipe(steps=2, compile=True), tmp_path / "compiled")
        assert capsys.readouterr().out.count("compiling the network: the first steps take a minute or two\n") == 1
        train(tiny_recipe(steps=2), tmp_path / "eager")
        assert "compiling" not in capsys.readouterr().out
    assert len(compiled) == 1
    assert_same_weights(weights(tmp_path / "compiled"), weights(tmp_path / "eager"))


def test_cross_entropy_without_smoothing_is_what_evaluation_reports(tiny_recipe, tmp_path):
    from gsanet.train.data import open_data
    from gsanet.train.evaluate import evaluate

    recipe = tiny_recipe(steps=1)
    accelerator = make_accelerator(recipe)
    data = open_data("digits", recipe.data_settings, batch_size=64, seed=0, device=accelerator.device)
    model = make_model(recipe, 10)
    found = evaluate(model, data.val, accelerator)
    with torch.no_grad():
        pairs = [(model(images), labels) for images, labels in data.val.batches()]
    logits, labels = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    top5 = [label in row.topk(5).indices for row, label in zip(logits, labels, strict=True)]
    assert found.images == 360
    assert found.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item(), abs=1e-4)
    assert found.top5 == pytest.approx(100 * sum(top5) / 360, abs=1e-4)
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_on_a_cpu(precision, tiny_recipe, tmp_path):
    """In training and in evaluation; `precision` is a GPU's."""
    seen = set()

    def note(module, _, out):
        if isinstance(module, nn.Conv2d):
            seen.add(out.dtype)

    with register_module_forward_hook(note):
        result = train(tiny_recipe(steps=3, precision="bf16", cpu_precision=precision), tmp_path / "run")
    assert seen == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert all(one.dtype == torch.float32 for one in weights(tmp_path / "run").values() if one.is_floating_point())
    assert result.progress.step == 3


def test_images_that_overflow_are_wrong_and_have_no_part_in_the_loss(tiny_recipe):
    from gsanet.train.data import open_data
    from gsanet.train.evaluate import evaluate, overflow_words

    class Overflows(torch.nn.Module):
        """Right about every image, but with infinity or no number for the others than the first of each batch."""

        def forward(self, images):
            logits = torch.full((len(images), 10), math.nan)
            logits[::2] = math.inf
            logits[0] = 0.0
            return logits

    recipe = tiny_recipe(steps=1)
    accelerator = make_accelerator(recipe)
    data = open_data("digits", recipe.data_settings, batch_size=64, seed=0, device=accelerator.device)
    found = evaluate(Overflows(), data.val, accelerator)
    batches = len([labels for _, labels in data.val.batches()])
    assert found.overflowed == 360 - batches
    assert found.loss == pytest.approx(math.log(10))
    assert found.top5 <= 100 * batches / 360
    assert overflow_words(found.overflowed) == f"{360 - batches} images without a finite output"
    assert overflow_words(0) == ""


def test_a_run_that_dies_in_an_evaluation_evaluates_when_it_goes_on(tiny_recipe, tmp_path, monkeypatch):
    from gsanet.train import engine

    def die(*arguments):
        raise OSError("the machine is gone")

    run, recipe = tmp_path / "run", tiny_recipe(steps=6, checkpoint_steps=2)
    monkeypatch.setattr(engine, "evaluate", die)
    with pytest.raises(OSError, match="gone"):
        train(recipe, run)
    monkeypatch.undo()
    assert checkpoint.load(run / "last")[0].state["step"] == 4
    result = train(recipe, run, resume=True)
    assert result.progress.evaluation["images"] == 360
    assert len(read_metrics(run, "epoch")) == 1
