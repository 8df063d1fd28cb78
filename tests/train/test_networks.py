"""Every network trains through the engine, the rivals as well as our own."""

import pytest

import gsanet
from gsanet.train.engine import train
from gsanet.train.recipe import load_recipe

# Deeper or wider members of a family whose smaller one is here.
LARGER = {"gsa_resnet50", "gsa_resnet101", "conv_resnet50", "conv_resnet101", "aa_resnet101", "lr_resnet101"}


@pytest.mark.parametrize("name", [name for name in gsanet.list_models() if name not in LARGER])
def test_trains_a_step(name, image_folder, tmp_path):
    small = {"model": name, "batch_size": 4, "steps": 1, "img_size": 32, "lr": 0.01, "warmup_epochs": 0}
    narrow = {} if name.startswith("san") else {"width": 0.25}
    overrides = {**small, "model_kwargs": narrow, "data.path": str(image_folder), "data.workers": 0}
    result = train(load_recipe("tinyimagenet", overrides), tmp_path / "run")
    assert result.progress.step == 1
    assert result.progress.evaluation["images"] == 12


def test_options_that_a_network_does_not_take(image_folder, tmp_path):
    recipe = load_recipe("tinyimagenet", {"model": "resnet18", "batch_size": 4, "data.path": str(image_folder)})
    with pytest.raises(ValueError, match=r"resnet18 does not take all of model_kwargs .*'stem'.*--set model_kwargs="):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
