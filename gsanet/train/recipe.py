"""Recipes: how a network is trained, as a YAML file that is checked on loading.

A recipe is a flat list of keys, the fields of `Recipe`, with two sections: `data` (see `gsanet.train.data`) and
`model_kwargs` (options of the network). The package's own are in `gsanet/train/recipes/`; a user's is a path.
"""

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
import yaml

from gsanet.train.data import DataSettings
from gsanet.words import first_line, suggest

SECTIONS = ("data", "model_kwargs")
POSITIVE = (
    "img_size", "epochs", "steps", "batch_size", "accumulation", "max_device_batch", "lr", "lr_images", "step_size",
    "step_factor", "clip_grad", "evaluate_epochs", "checkpoint_minutes", "checkpoint_steps", "timeout_minutes",
)  # fmt: skip
FIXED = {"num_classes": "the data set says how many", "features_only": "training needs the classifier"}
OTHER_NAMES = {"learning_rate": "lr", "image_size": "img_size"}  # what others call it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a training run computes.

    Args:
        model: Name of the network, as in `gsanet models`, or any that timm knows.
        model_kwargs: Options of the network.
        weights: Weights to start from: a safetensors file or a run directory. None: from scratch.
        img_size: Height and width of the images, or one number for both.
        epochs: Length of the run in passes over the training set. Either this or `steps`.
        steps: Length of the run in optimizer steps.
        batch_size: Images of one optimizer step, over all devices.
        accumulation: The batch is computed in at least this many parts, one after the other.
        max_device_batch: No device computes more images than this at once: the engine accumulates as needed. None: no
            limit.
        lr: The peak learning rate.
        lr_images: The linear scaling rule: `lr` is for batches of this many images, and the rate used is
            lr * batch_size / lr_images. None: `lr` is used as it is.
        schedule: `cosine` falls to zero over the run; `step` multiplies by `step_factor` after every `step_size` steps.
        warmup_epochs: The rate first rises linearly over this many epochs.
        step_size: Of the schedule `step`.
        step_factor: Of the schedule `step`.
        momentum: Of SGD.
        nesterov: Nesterov's form of it.
        weight_decay: Not applied to norms and biases.
        clip_grad: Largest norm of the gradient. None: no clipping.
        label_smoothing: The share of the target that is spread over all classes.
        mixup: Alpha of mixup, 0 for none.
        cutmix: Alpha of CutMix, 0 for none. With both, each batch gets one of the two.
        mix_probability: The share of batches that are mixed at all.
        ema: Decay of a moving average of the weights, which is then what is evaluated and kept as best; 0 for none.
        freeze_bn: Batch normalisation uses its stored statistics and does not change them.
        sync_bn: Batch normalisation over the batch of all GPUs.
        precision: On GPUs.
        cpu_precision: On CPUs. bf16 is the faster one on processors that have instructions for it, such as AVX-512's.
        compile: Use torch.compile.
        cuda_graphs: On one GPU, launch forward and backward pass as one CUDA graph: where images are small, launching
            kernels one by one takes longer than computing.
        seed: Of the weights, the data order, the augmentation and everything else random.
        evaluate_epochs: The held-out images are evaluated after every so many epochs, and at the end.
        checkpoint_minutes: A checkpoint is written with each evaluation and whenever this much time has passed.
        checkpoint_steps: A checkpoint also after every so many steps. None: by time only.
        timeout_minutes: How long a process waits for the others before it gives up.
        data: Fields of `gsanet.train.data.DataSettings`, and `path`: which data set.
    """

    model: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    img_size: int | tuple[int, int]
    epochs: int | None = None
    steps: int | None = None
    batch_size: int
    accumulation: int = 1
    max_device_batch: int | None = None
    lr: float
    lr_images: int | None = None
    schedule: Literal["cosine", "step"] = "cosine"
    warmup_epochs: float = 0.0
    step_size: int | None = None
    step_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_grad: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    ema: float = 0.0
    freeze_bn: bool = False
    sync_bn: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    cpu_precision: Literal["bf16", "fp32"] = "fp32"
    compile: bool = False
    cuda_graphs: bool = False
    seed: int = 0
    evaluate_epochs: int = 1
    checkpoint_minutes: float = 10.0
    checkpoint_steps: int | None = None
    timeout_minutes: float = 10.0
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            given = "neither" if self.epochs is None else "both"
            raise ValueError(f"a recipe needs either epochs or steps, got {given}")
        for key in POSITIVE:
            value = getattr(self, key)
            if value is not None and not min(value if isinstance(value, tuple) else (value,)) > 0:
                raise ValueError(f"{key} must be more than 0, got {value}")
        for key in ("momentum", "label_smoothing", "ema"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 0 and less than 1, got {getattr(self, key)}")
        for key in ("warmup_epochs", "weight_decay", "mixup", "cutmix", "seed"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be 0 or more, got {getattr(self, key)}")
        if not 0 <= self.mix_probability <= 1:
            raise ValueError(f"mix_probability must be between 0 and 1, got {self.mix_probability}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum of more than 0")
        for key in FIXED.keys() & self.model_kwargs.keys():
            raise ValueError(f"{key} is no option of model_kwargs: {FIXED[key]}")
        if (self.schedule == "step") != (self.step_size is not None):
            raise ValueError("step_size belongs to schedule: step, and schedule: step needs it")
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size {self.batch_size} cannot be divided into {self.accumulation} equal parts")
        _ = self.data_settings  # checks itself

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up, with the linear scaling rule applied."""
        return self.lr if self.lr_images is None else self.lr * self.batch_size / self.lr_images

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size

    @property
    def data_path(self) -> str:
        """Which data set, as `gsanet.train.data.open_data` takes it."""
        if "path" not in self.data:
            raise ValueError("no data set is named: give --data PATH, or data.path in the recipe")
        return self.data["path"]

    @property
    def data_settings(self) -> DataSettings:
        """How the images are read and augmented."""
        return DataSettings(
            img_size=self.image_size, **{key: value for key, value in self.data.items() if key != "path"}
        )

    def precision_on(self, device: torch.device) -> str:
        """In what networks compute there."""
        return self.cpu_precision if device.type == "cpu" else self.precision

    def micro_steps(self, world_size: int) -> int:
        """In how many parts a batch is computed: the fewest that fit `accumulation` and `max_device_batch`."""
        for parts in range(self.accumulation, self.batch_size + 1):
            on_device, rest = divmod(self.batch_size, parts * world_size)
            if not rest and on_device <= (self.max_device_batch or on_device):
                return parts
        raise ValueError(f"batch_size {self.batch_size} cannot be divided equally among {world_size} processes")

    def to_yaml(self) -> str:
        """The recipe as a file that `load_recipe` reads back."""
        values = {key: value for key, value in asdict(self).items() if value not in (None, {})}
        return yaml.safe_dump(_plain(values), sort_keys=False)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """A recipe as it is written, with its comments: one of the package's, or a YAML file's path."""
    if name in recipe_names():
        return (_FOLDER / f"{name}.yaml").read_text()
    if name.endswith((".yaml", ".yml")) or "/" in name:
        try:
            return Path(name).read_text()
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no recipe file {name}") from None
        except IsADirectoryError:
            raise IsADirectoryError(f"{name} is a folder, not a recipe file") from None
    raise ValueError(f"unknown recipe {name!r}: {suggest(name, recipe_names())}")


def load_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read and check a recipe.

    Args:
        name: One of `recipe_names()`, or the path of a YAML file.
        overrides: Values to set over those of the file; keys of sections are dotted, such as `data.padding`.
    """
    try:
        values = yaml.safe_load(recipe_text(name))
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {name} is not YAML: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"recipe {name} must be a list of `key: value` lines")
    return make_recipe(values, overrides)


def make_recipe(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A checked recipe from plain values, with `overrides` as in `load_recipe`."""
    merged = {key: dict(value) if key in SECTIONS and value else value for key, value in values.items()}
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        if name and section in SECTIONS:
            merged[section] = {**(merged.get(section) or {}), name: value}
        else:
            merged[key] = value
    # The length of a run may be given in the other unit than the file's.
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        if overrides and key in overrides and other not in overrides:
            merged.pop(other, None)
    checked = _check(merged, _hints(Recipe), required=_required(Recipe))
    settings = {**_hints(DataSettings), "path": str}
    settings.pop("img_size")
    checked["data"] = _check(checked.get("data", {}), settings, _required(DataSettings) - {"img_size"}, "data.")
    checked["model_kwargs"] = {key: _tuples(value) for key, value in checked.get("model_kwargs", {}).items()}
    return Recipe(**checked)


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """The `key=value` of the command line, values read as YAML."""
    overrides = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes key=value, such as lr=0.05, got {pair!r}")
        try:
            overrides[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(f"--set {pair}: {text!r} is not a value as YAML has them") from None
    return overrides


_FOLDER = files("gsanet.train").joinpath("recipes")


def _hints(settings: type) -> dict[str, Any]:
    hints = get_type_hints(settings)
    return {entry.name: hints[entry.name] for entry in fields(settings)}


def _required(settings: type) -> set[str]:
    return {entry.name for entry in fields(settings) if entry.default is MISSING and entry.default_factory is MISSING}


def _check(values: Mapping[str, Any], hints: Mapping[str, Any], required: set[str], prefix: str = "") -> dict[str, Any]:
    """The values, each converted to its type; every key known, none missing."""
    checked = {}
    for key, value in values.items():
        if key not in hints:
            known = [prefix + name for name in hints]
            hint = suggest(OTHER_NAMES.get(key, prefix + key), known)
            raise ValueError(f"unknown key {prefix}{key} in the recipe: {hint}")
        checked[key] = _convert(value, hints[key], f"{prefix}{key}")
    missing = sorted(required - set(checked))
    if missing:
        raise ValueError(f"the recipe lacks {', '.join(prefix + key for key in missing)}")
    return checked


def _convert(value: Any, hint: Any, key: str) -> Any:
    """A YAML value as the type that `hint` asks for, or a ValueError that says what would be right."""
    wrong = ValueError(f"{key} must be {_describe(hint)}, got {value!r}")
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in args:
            try:
                return _convert(value, option, key)
            except ValueError:
                continue
        raise wrong
    if origin is Literal:
        if value in args:
            return value
        raise wrong
    if origin is tuple:
        kinds = args[:1] * len(value) if isinstance(value, list | tuple) and args[1:] == (...,) else args
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise wrong
        return tuple(_convert(item, kind, key) for item, kind in zip(value, kinds, strict=True))
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong
        return value
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 1e-4, without a point, as text
        except (TypeError, ValueError):
            raise wrong from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise wrong
    return value


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in args)
    if origin is Literal:
        return " or ".join(str(option) for option in args)
    if origin is tuple:
        return f"a list of {'numbers' if args[1:] == (...,) else len(args)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return names.get(hint, "a section of keys")


def _plain(value: Any) -> Any:
    """Tuples as lists, all the way down: what YAML can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
