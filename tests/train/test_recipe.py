import math
from pathlib import Path

import pytest
import yaml

from gsanet.train.recipe import load_recipe, make_recipe, parse_overrides, recipe_names, recipe_text
from gsanet.train.schedule import learning_rate


def test_the_five_recipes():
    assert recipe_names() == ["cifar100", "cifar100-scratch", "imagenet", "quickstart", "tinyimagenet"]


@pytest.mark.parametrize("name", recipe_names())
def test_a_resolved_recipe_reads_back_as_itself(name, tmp_path):
    recipe = load_recipe(name, {"seed": 3, "data.path": "digits"})
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    assert load_recipe(str(file)) == recipe


def test_imagenet_is_section_4():
    recipe = load_recipe("imagenet")
    assert (recipe.epochs, recipe.batch_size, recipe.momentum, recipe.weight_decay) == (90, 2048, 0.9, 1e-4)
    assert (recipe.label_smoothing, recipe.image_size, recipe.schedule) == (0.1, (224, 224), "cosine")
    assert recipe.peak_lr == pytest.approx(0.8)
    assert load_recipe("imagenet", {"batch_size": 256}).peak_lr == pytest.approx(0.1)


def test_cifar100_is_appendix_a():
    recipe = load_recipe("cifar100")
    assert (recipe.steps, recipe.batch_size, recipe.momentum, recipe.weight_decay) == (10_000, 128, 0.9, 1e-4)
    assert (recipe.peak_lr, recipe.image_size, recipe.label_smoothing) == (5e-3, (224, 224), 0.0)


# Computed by hand: cos 0 = 1, cos pi/3 = 1/2, cos pi/2 = 0, cos 2pi/3 = -1/2.
@pytest.mark.parametrize(
    ("name", "steps_per_epoch", "step", "expected"),
    [
        # 1,281,167 images in batches of 2048: 625 steps an epoch, 56,250 in all, 3,125 of warm-up.
        ("imagenet", 625, 0, 0.8 / 3125),
        ("imagenet", 625, 624, 0.8 / 5),
        ("imagenet", 625, 3124, 0.8),
        ("imagenet", 625, 3125, 0.8),
        ("imagenet", 625, 3125 + 53125 // 5, 0.4 * (1 + (1 + math.sqrt(5)) / 4)),  # cos pi/5
        ("imagenet", 625, 3125 + 53125 * 2 // 5, 0.4 * (1 + (math.sqrt(5) - 1) / 4)),  # cos 2pi/5
        ("cifar100", 390, 0, 5e-3),
        ("cifar100", 390, 2999, 5e-3),
        ("cifar100", 390, 3000, 5e-4),
        ("cifar100", 390, 6000, 5e-5),
        ("cifar100", 390, 9999, 5e-6),
        # 100,000 images in batches of 512: 195 steps an epoch, 1,950 in all, 195 of warm-up.
        ("tinyimagenet", 195, 0, 0.2 / 195),
        ("tinyimagenet", 195, 194, 0.2),
        ("tinyimagenet", 195, 195 + 585, 0.15),
        ("tinyimagenet", 195, 195 + 1170, 0.05),
        # 50,000 images in batches of 1,024: 48 steps an epoch, 9,600 in all, 240 of warm-up.
        ("cifar100-scratch", 48, 239, 0.8),
        ("cifar100-scratch", 48, 240 + 3120, 0.6),
        ("cifar100-scratch", 48, 240 + 6240, 0.2),
        # 1,437 scans in batches of 64: 22 steps an epoch, 264 in all, 22 of warm-up.
        ("quickstart", 22, 10, 0.05),
        ("quickstart", 22, 22, 0.1),
        ("quickstart", 22, 22 + 121, 0.05),
    ],
)
def test_learning_rate(name, steps_per_epoch, step, expected):
    recipe = load_recipe(name)
    total = recipe.steps or recipe.epochs * steps_per_epoch
    assert learning_rate(recipe, step, steps_per_epoch, total) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_stays_positive_and_ends_near_zero():
    recipe = load_recipe("tinyimagenet")
    rates = [learning_rate(recipe, step, 195, 1950) for step in range(1950)]
    assert 0 < rates[-1] < 1e-6
    assert rates[195:] == sorted(rates[195:], reverse=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"btach_size": 3}, "did you mean 'batch_size'"),
        ({"learning_rate": 3}, "did you mean 'lr'"),
        ({"data.paddding": 3}, "did you mean 'data.padding'"),
        ({"zzz": 3}, "one of model, "),
        ({"batch_size": "many"}, "batch_size must be a whole number, got 'many'"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"nesterov": 1}, "nesterov must be true or false"),
        ({"schedule": "linear"}, "schedule must be cosine or step, got 'linear'"),
        ({"data.augment": "blur"}, "augment"),
        ({"data.flip": 2}, "flip must be from 0 to 1, got 2"),
        ({"data.policy": "random"}, "data.policy must be none or trivial, got 'random'"),
        ({"data.erase": 1.5}, "erase must be from 0 to 1, got 1.5"),
        ({"data.erase": "often"}, "data.erase must be a number, got 'often'"),
        ({"img_size": [8]}, "img_size must be a whole number or a list of 2"),
        ({"epochs": 1, "steps": 2}, "either epochs or steps, got both"),
        ({"epochs": None}, "either epochs or steps, got neither"),
        ({"epochs": 0}, "epochs must be more than 0"),
        ({"lr": float("nan")}, "lr must be more than 0, got nan"),
        ({"label_smoothing": 1}, "label_smoothing must be at least 0 and less than 1"),
        ({"schedule": "step"}, "schedule: step needs it"),
        ({"accumulation": 5}, "batch_size 64 cannot be divided into 5 equal parts"),
        ({"model_kwargs": 3}, "model_kwargs must be a section of keys"),
        ({"model_kwargs.num_classes": 3}, "num_classes is no option of model_kwargs: the data set says how many"),
        ({"model_kwargs.features_only": True}, "features_only is no option of model_kwargs: training needs"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_recipe("quickstart", overrides)


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="the recipe lacks batch_size, img_size"):
        make_recipe({"model": "gsa_resnet50", "epochs": 1, "lr": 0.1})


def test_unknown_recipes(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'imagenet'"):
        load_recipe("imagnet")
    with pytest.raises(FileNotFoundError, match=r"no recipe file nowhere\.yaml"):
        load_recipe("nowhere.yaml")
    with pytest.raises(IsADirectoryError, match="is a folder, not a recipe file"):
        load_recipe(f"{tmp_path}/")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        load_recipe(str(broken))


def test_settings_of_the_command_line():
    pairs = ["lr=1e-3", "steps=7", "data.flip=0.25", "model_kwargs.depths=[1, 2]", "img_size=[8, 12]", "clip_grad=null"]
    recipe = load_recipe("quickstart", parse_overrides(pairs))
    assert (recipe.lr, recipe.steps, recipe.epochs, recipe.clip_grad) == (1e-3, 7, None, None)
    assert (recipe.data_settings.flip, recipe.data_settings.img_size) == (0.25, (8, 12))
    assert recipe.model_kwargs["depths"] == (1, 2)
    with pytest.raises(ValueError, match="key=value"):
        parse_overrides(["lr"])
    with pytest.raises(ValueError, match=r"--set img_size=\[8,: '\[8,' is not a value") as caught:
        parse_overrides(["img_size=[8,"])
    assert "\n" not in str(caught.value)


def test_a_users_recipe_is_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    values = {**yaml.safe_load(recipe_text("quickstart")), "lr": 0.03}
    file.write_text(yaml.safe_dump(values))
    assert load_recipe(str(file)).lr == 0.03


@pytest.mark.parametrize(
    ("world_size", "accumulation", "limit", "parts"),
    [(1, 1, 256, 8), (8, 1, 256, 1), (3, 1, None, None), (2, 4, 256, 4), (1, 1, 300, 8)],
)
def test_the_batch_is_reached_on_any_number_of_devices(world_size, accumulation, limit, parts):
    recipe = load_recipe("imagenet", {"accumulation": accumulation, "max_device_batch": limit})
    if parts is None:
        with pytest.raises(ValueError, match="divided equally among 3 processes"):
            recipe.micro_steps(world_size)
    else:
        assert recipe.micro_steps(world_size) == parts


@pytest.mark.parametrize("name", recipe_names())
def test_the_documentation_says_what_the_recipe_does(name):
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    recipe = load_recipe(name)
    assert (f"{recipe.epochs} epochs" if recipe.epochs else f"{recipe.steps:,} steps") in row
    assert f"| {recipe.batch_size} | {recipe.lr:g}" in row
    assert f"{recipe.image_size[0]}x{recipe.image_size[1]}" in row
