"""The commands as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from gsanet.train.engine import train
from gsanet.train.recipe import load_recipe
from gsanet.train.run_directory import read_run

SMALL = ["--set", "model_kwargs.width=0.125", "--set", "model_kwargs.depths=[1, 1]", "--set", "epochs=1"]


@pytest.fixture
def gsanet(gsanet):
    """The command with what it printed and what it complained as one text."""

    def run(*arguments):
        code, out, complaint = gsanet(*arguments)
        return code, out + complaint

    return run


def test_train_then_evaluate_then_resume(gsanet, tmp_path):
    run = tmp_path / "run"
    code, said = gsanet("train", "--recipe", "quickstart", "--out", run, *SMALL)
    assert code == 0
    for file in ("last", "best", "curves.png", "metrics.jsonl"):
        assert str(run / file) in said
        assert (run / file).exists()

    code, said = gsanet("eval", "--run", run)
    assert code == 0
    figures = json.loads((run / "eval-best.json").read_text())
    assert (figures["images"], figures["holdout"]) == (360, 0.0)
    assert f"{figures['top1']:.2f}" in said
    state = json.loads((run / "best" / "checkpoint.json").read_text())["state"]
    assert figures["top1"] == pytest.approx(state["evaluation"]["top1"])
    code, said = gsanet("eval", "--run", run, "--checkpoint", "last", "--json")
    assert json.loads(said)["top1"] == figures["top1"]

    (run / "eval-last.json").unlink()
    (run / "eval-last.json").mkdir()  # cannot be written: what was measured is printed all the same
    code, said = gsanet("eval", "--run", run, "--checkpoint", "last")
    assert code == 2
    assert f"{figures['top1']:.2f}" in said
    assert "cannot write" in said

    weights = run / "best" / "model.safetensors"
    code, said = gsanet("eval", "--recipe", "quickstart", "--weights", weights, *SMALL, "--json")
    assert json.loads(said)["top1"] == figures["top1"]
    same = ["--set", "img_size=8", "--set", "data.mean=[0.5, 0.5, 0.5]", "--set", "data.std=[0.5, 0.5, 0.5]"]
    code, said = gsanet(
        *("eval", "--model", "gsa_resnet26_tiny", "--weights", weights, "--data", "digits", *SMALL, *same, "--json")
    )
    assert json.loads(said)["top1"] == figures["top1"]
    assert json.loads((run / "best" / "model.eval.json").read_text())["loss"] == pytest.approx(figures["loss"])

    code, said = gsanet("train", "--resume", run)
    assert code == 0
    assert "Done: 22 steps" in said


def test_training_takes_stronger_augmentation(gsanet, tmp_path):
    stronger = ["--set", "data.policy=trivial", "--set", "data.erase=0.25"]
    code, said = gsanet("train", "--recipe", "quickstart", "--out", tmp_path / "run", *SMALL, *stronger)
    assert code == 0
    assert "Done: 22 steps" in said


def test_preview_shows_what_training_sees(gsanet, tmp_path):
    picture = tmp_path / "preview.png"
    shown = ["--recipe", "quickstart", "--out", picture, "--images", 3, "--epochs", 2]
    code, said = gsanet("preview", *shown, "--set", "data.policy=trivial")
    assert code == 0
    assert str(picture) in said
    with Image.open(picture) as image:
        assert image.size == (3 * (96 + 4), 3 * (96 + 4))  # three digits, each as evaluation and two epochs see it
        pixels = np.asarray(image)[::12, ::12]  # one of each enlarged pixel
    assert gsanet("preview", *shown)[0] == 0
    with Image.open(picture) as image:
        plain = np.asarray(image)[::12, ::12]
    assert np.array_equal(pixels[:, :8], plain[:, :8])
    assert not np.array_equal(pixels, plain)
    code, said = gsanet("preview", "--recipe", "quickstart", "--images", 0)
    assert code == 2
    assert "at least one of images, got 0" in said
    code, said = gsanet("preview", "--recipe", "quickstart", "--out", tmp_path / "nowhere" / "preview.png")
    assert code == 2
    assert "there is no folder" in said


def test_recipes_are_listed_and_shown(gsanet):
    code, said = gsanet("recipes")
    assert code == 0
    assert "tinyimagenet" in said
    code, said = gsanet("recipes", "show", "imagenet")
    assert code == 0
    assert "# " in said
    assert "epochs: 90" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give --recipe NAME and --out DIR"),
        (["train", "--resume", "RUN", "--recipe", "quickstart"], "give no other option"),
        (["train", "--resume", "RUN", "--set", "lr=1"], "but --set of data.max_bad_fraction and data.workers"),
        (["train", "--resume", "RUN"], "is no run directory"),
        (["train", "--recipe", "imagnet", "--out", "RUN"], "did you mean 'imagenet'"),
        (["train", "--recipe", "imagenet", "--out", "RUN"], "no data set is named"),
        (["train", "--recipe", "quickstart", "--out", "RUN", "--set", "bacth_size=3"], "did you mean 'batch_size'"),
        (["train", "--recipe", "quickstart", "--out", "RUN", "--model", "gsa_resnet26_tny"], "'gsa_resnet26_tiny'"),
        (
            ["train", "--recipe", "quickstart", "--out", "RUN", "--model", "gsa_resnet26_tny", "--data", "nowhere"],
            "'gsa_resnet26_tiny'",
        ),
        (
            ["train", "--recipe", "quickstart", "--out", "RUN", "--set", "batch_size=5000"],
            "fewer than one batch of 5000",
        ),
        (["train", "--recipe", "quickstart", "--out", "RUN", "--weights", "nowhere"], "no weights at nowhere"),
        (["train", "--recipe", "quickstart", "--out", "RUN", "--set", "sync_bn=true"], "sync_bn needs GPUs"),
        (["eval"], "give either --run DIR"),
        (["eval", "--run", "RUN"], "is no run directory"),
        (["recipes", "show", "mnist"], "unknown recipe 'mnist'"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(gsanet, tmp_path, arguments, message):
    code, said = gsanet(*(tmp_path / "run" if argument == "RUN" else argument for argument in arguments))
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()  # and the next try may use the same directory


def test_a_run_directory_that_cannot_be_made(gsanet, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = gsanet("train", "--recipe", "quickstart", "--out", tmp_path / "file" / "run", *SMALL)
    assert code == 2
    assert "cannot write the run directory" in said
    assert "Not a directory" in said


def test_a_diverged_run(gsanet, tmp_path):
    run = tmp_path / "run"
    code, said = gsanet("train", "--recipe", "quickstart", "--out", run, *SMALL, "--set", "lr=1e20")
    assert code == 2
    assert "stopped. The last good weights are in" in said
    code, _ = gsanet("eval", "--run", run, "--checkpoint", "last")
    assert code == 0


def folder_options(folder):
    return ["--data", folder, "--set", "batch_size=4", "--set", "data.workers=0", "--set", "img_size=16"]


def test_a_corrupt_jpeg_is_skipped_and_too_many_stop_the_run(gsanet, image_folder, tmp_path):
    images = sorted((image_folder / "train" / "dark").iterdir())
    images[0].write_bytes(images[0].read_bytes()[:40])
    start = ["train", "--recipe", "quickstart", *SMALL, *folder_options(image_folder)]
    code, said = gsanet(*start, "--set", "data.max_bad_fraction=0.1", "--out", tmp_path / "some")
    assert code == 0
    assert f"1 image could not be decoded and was skipped: {images[0]}" in said
    damaged = sorted((image_folder / "val" / "dark").iterdir())[:1]
    damaged[0].write_bytes(b"")
    code, said = gsanet("eval", "--run", tmp_path / "some")
    assert code == 0
    assert f"1 image could not be decoded and was skipped: {damaged[0]}" in said
    code, said = gsanet(*start, "--out", tmp_path / "none")
    assert code == 2
    assert images[0].name in said


def test_a_run_goes_on_in_spite_of_damaged_images(gsanet, image_folder, tmp_path):
    """Once steps are done they cannot be removed: which images a step has depends on how many there are."""
    run = tmp_path / "run"
    values = {
        "data.path": str(image_folder),
        "data.workers": 0,
        "data.in_memory": False,
        "batch_size": 4,
        "img_size": 16,
    }
    recipe = load_recipe(
        "quickstart", {**values, "epochs": 2, "model_kwargs.width": 0.125, "model_kwargs.depths": [1, 1]}
    )
    assert train(recipe, run, stop_after=0.0).stopped_by == signal.SIGALRM
    for file in (image_folder / "train" / "dark").iterdir():
        file.write_bytes(b"")
    code, said = gsanet("train", "--resume", run)
    assert code == 2
    allow = said.partition("allow so many with `")[2].partition("`")[0].split()
    code, said = gsanet("train", "--resume", run, *allow)
    assert code == 2  # one more is damaged than had been met then
    code, said = gsanet("train", "--resume", run, "--set", "data.max_bad_fraction=0.5")
    assert code == 0, said
    assert "Done:" in said
    assert read_run(run).data_settings.max_bad_fraction == 0.5


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_the_same_command_works_once_damaged_images_are_removed(gsanet, image_folder, tmp_path, split, in_memory):
    damaged = sorted((image_folder / split / "dark").iterdir())[:2]
    for file in damaged:
        file.write_bytes(b"")
    run = tmp_path / "run"
    start = ["train", "--recipe", "quickstart", *SMALL, *folder_options(image_folder), "--out", run]
    start += ["--set", f"data.in_memory={str(in_memory).lower()}"]
    code, said = gsanet(*start)
    assert code == 2
    assert damaged[0].name in said
    assert "`--set data.max_bad_fraction=" in said
    for file in damaged:
        file.unlink()
    if split == "train" and not in_memory:
        code, said = gsanet("train", "--resume", run)
        assert code == 2
        assert "no step was done yet, so start it anew with the same --out" in said
    code, said = gsanet(*start)
    assert code == 0, said
    assert "Done:" in said


def test_a_missing_class_folder(gsanet, image_folder, tmp_path):
    (image_folder / "val" / "light").rename(image_folder / "val" / "other")
    start = ["train", "--recipe", "quickstart", "--out", tmp_path / "run", *SMALL, *folder_options(image_folder)]
    code, said = gsanet(*start)
    assert code == 2
    assert "light" in said or "other" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_saves_and_says_how_to_go_on(number, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "gsanet", "train", "--recipe", "quickstart", "--out", str(run), *SMALL]
    process = subprocess.Popen(
        [*command, "--set", "epochs=500"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while not (run / "best").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert f"To go on: gsanet train --resume {run}" in said
    assert json.loads((run / "last" / "checkpoint.json").read_text())["state"]["step"] > 22
