"""Resuming is exact: a run that is killed over and over ends with the weights of the run that never was."""

import json
import multiprocessing
import random
import time

import torch
from safetensors.torch import load_file

from gsanet.train.engine import train
from gsanet.train.report import read_metrics

KILLS = 12


def saved_step(run):
    try:
        return json.loads((run / "last" / "checkpoint.json").read_text())["state"]["step"]
    except FileNotFoundError:  # between two checkpoints, or before the first
        return -1


def test_killed_at_random_steps_and_resumed(tiny_recipe, tmp_path):
    # Everything that draws random numbers or keeps state is on; epochs end on the way, and steps fall between
    # checkpoints.
    recipe = tiny_recipe(
        **{"epochs": 6, "checkpoint_steps": 4, "mixup": 0.2, "cutmix": 1.0, "ema": 0.9, "accumulation": 2},
        **{"model_kwargs.drop_path_rate": 0.2, "model_kwargs.drop_rate": 0.1},
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    total_steps = train(recipe, whole).progress.step

    # Each life is a fork of one process that has imported everything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gsanet.train.engine", "sklearn.datasets", "torch.utils.tensorboard"])
    dice = random.Random(0)
    killed_at = []
    resume = False
    while True:
        life = context.Process(target=train, args=(recipe, run, resume))
        life.start()
        if len(killed_at) < KILLS:
            # Let it save once more, so that each life gets somewhere; then kill it at any moment: in a step, in an
            # evaluation, or while it writes.
            reached = saved_step(run)
            while life.is_alive() and saved_step(run) <= reached:
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.08))
            life.kill()
        life.join(timeout=120)
        resume = (run / "recipe.yaml").exists()
        if life.exitcode == 0:
            break
        assert life.exitcode == -9
        killed_at.append(saved_step(run))

    assert len(killed_at) >= KILLS - 2, killed_at
    assert killed_at[-1] < total_steps
    for file in ("model", "ema", "optimizer"):
        expected, found = (load_file(folder / "last" / f"{file}.safetensors") for folder in (whole, run))
        assert expected.keys() == found.keys()
        for name in expected:
            assert torch.equal(expected[name], found[name]), (file, name)
    for key in ("epoch", "train_loss", "val_loss", "top1"):
        assert [row[key] for row in read_metrics(run, "epoch")] == [row[key] for row in read_metrics(whole, "epoch")]
    rows, expected = (
        [(row["step"], row["loss"], row["lr"]) for row in read_metrics(out, "train")] for out in (run, whole)
    )
    assert rows
    assert rows == expected
