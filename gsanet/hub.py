"""Networks in folders and on the Hugging Face Hub, by timm's conventions: `config.json` and `model.safetensors`.

A folder that is written here is read by timm too, once this package is imported:
`timm.create_model("local-dir:FOLDER", pretrained=True)`, or `"hf-hub:USER/NAME"` after it is published.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors.torch
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from timm.models._hub import generate_readme, save_config_for_hf
from torch import Tensor, nn

from gsanet.models import count_flops, count_parameters, create_model
from gsanet.words import first_line

__all__ = ["check_repository", "from_pretrained", "publish", "save_pretrained"]

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
# Versions of huggingface_hub differ in the library that speaks HTTP: without a connection, in what is raised.
HUB_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    *(error for error in HfHubHTTPError.__mro__ if issubclass(error, Exception) and error.__name__ == "HTTPError"),
)


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    class_names: list[str] | None = None,
    license: str = "apache-2.0",
    model_args: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
) -> None:
    """Write a network to a folder from which `from_pretrained` makes it again, identical.

    `config.json` has the name of the network, its options, the number and names of the classes, the preprocessing and
    the licence; `model.safetensors` the weights; `README.md` a model card.

    Args:
        model: A network made by `gsanet.create_model` or `timm.create_model`.
        folder: Where to write; it is made if need be.
        class_names: Names of the classes, in the order of the logits.
        license: Of the weights, as the Hub spells it.
        model_args: The options that the network was made with. Networks of this package know their own.
        card: More for the model card, as in timm's `generate_readme`: `description`, `details`, ...
    """
    network: Any = getattr(model, "_orig_mod", model)
    config = getattr(network, "pretrained_cfg", None)
    if not config or not hasattr(network, "num_classes"):
        raise TypeError(
            f"{type(network).__name__} was not made by create_model: timm does not know how to make it again"
        )
    if getattr(network, "model_args", {}).get("features_only"):
        raise ValueError("a network with features_only=True has no classifier: save the one with it")
    if class_names is not None and len(class_names) != network.num_classes:
        raise ValueError(f"{len(class_names)} class names for a network of {network.num_classes} classes")
    options = _options(network) if model_args is None else dict(model_args)
    channels = getattr(network, "in_chans", 3)
    described = {**config, "license": license, "num_classes": network.num_classes}
    described["input_size"] = (channels, *(getattr(network, "img_size", None) or config["input_size"][1:]))
    if channels != 3:
        # timm adapts the first convolution of networks for three channels; this one's fits already.
        described["first_conv"] = None
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    _check_same(config["architecture"], {**options, "num_classes": network.num_classes}, tensors)
    folder = _make_folder(Path(folder))
    own, network.pretrained_cfg = network.pretrained_cfg, described
    try:
        more = {} if class_names is None else {"label_names": list(class_names)}
        save_config_for_hf(network, folder / CONFIG, model_config=more, model_args=options)
    finally:
        network.pretrained_cfg = own
    safetensors.torch.save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CARD).write_text(_card(network, config["architecture"], folder.name, license, options, card or {}))


def from_pretrained(source: str | Path, **kwargs: Any) -> nn.Module:
    """Make a network from a folder or from the Hub, with its weights.

    Args:
        source: A folder written by `save_pretrained` (or by timm), or `USER/NAME` on the Hub, `@REVISION` if wanted.
            A folder of that name goes first.
        kwargs: As in `create_model`, over the stored options: `num_classes` for a new head, `img_size` (the tables of
            relative positions are resized), `features_only`, ...
    """
    folder = Path(source)
    if (folder / CONFIG).is_file():
        return create_model(f"local-dir:{folder}", pretrained=True, **kwargs)
    if folder.is_dir():
        raise FileNotFoundError(f"{folder} holds no network: it has no {CONFIG}")
    if "/" not in str(source):  # the Hub would be asked for several times, where it is out of reach
        raise FileNotFoundError(f"there is no folder {source}, and it is no USER/NAME of the Hub either")
    try:
        return create_model(f"hf-hub:{source}", pretrained=True, **kwargs)
    except HFValidationError:
        raise FileNotFoundError(f"there is no folder {source}, and it is no USER/NAME of the Hub either") from None
    except HUB_ERRORS as error:
        reason = first_line(error)
        raise FileNotFoundError(f"there is no folder {source}, and the Hub gives nothing: {reason}") from error


def publish(
    run: Path,
    repo: str,
    folder: Path | None = None,
    license: str = "apache-2.0",
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Publish the best network of a run on the Hub, or write what would be published.

    Args:
        run: The run directory.
        repo: `USER/NAME` on the Hub; it is made if need be.
        folder: Write the files here and upload nothing.
        license: Of the weights.
        report: Called with a line about each step.

    Returns:
        Where it is: the folder, or the address on the Hub.
    """
    from tempfile import TemporaryDirectory

    from gsanet.train.run_directory import read_run

    check_repository(repo)
    read_run(run)  # what is no run is said first
    if folder is not None:
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty: choose another --folder")
        _make_folder(folder)  # before the work
        _write_run(run, folder, repo, license, report)
        return str(folder)
    api = _api()
    with TemporaryDirectory() as temporary:
        place = Path(temporary) / repo.partition("/")[2]
        _write_run(run, place, repo, license, report)
        report(f"Uploading to {repo}")
        try:
            api.create_repo(repo, exist_ok=True)
            address = api.upload_folder(repo_id=repo, folder_path=place, commit_message="Add the network")
        except HUB_ERRORS as error:
            raise ConnectionError(f"the Hub does not take it: {first_line(error)}") from error
    return str(address)


def check_repository(repo: str) -> None:
    """Refuse what is no name of a repository on the Hub."""
    user, slash, name = repo.partition("/")
    try:
        huggingface_hub.utils.validate_repo_id(repo)
    except HFValidationError:
        slash = ""
    if not (user and slash and name):
        raise ValueError(f"a repository is named USER/NAME, got {repo!r}")


def _make_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder}: {error.strerror or error}") from None
    return folder


def _api() -> huggingface_hub.HfApi:
    """Access to the Hub; refused before anything is written if it cannot work."""
    api = huggingface_hub.HfApi(library_name="gsanet")
    instead = "--folder DIR writes the files only"
    try:
        api.whoami()
    except LocalTokenNotFoundError:
        raise ConnectionError(f"not logged in to the Hub: run `hf auth login` or set HF_TOKEN; {instead}") from None
    except HUB_ERRORS as error:
        raise ConnectionError(f"the Hub cannot be used: {first_line(error)}; {instead}") from error
    return api


def _write_run(run: Path, folder: Path, repo: str, license: str, report: Callable[[str], None]) -> None:
    from gsanet.train.data.sources import data_name, evaluated_on
    from gsanet.train.run_directory import read_evaluation
    from gsanet.train.run_network import load_run_network

    report(f"Reading the best weights of {run}")
    found = load_run_network(run)
    recipe = found.recipe
    details: dict[str, Any] = {"Data": data_name(recipe.data_path)}  # where it lies says nothing to others
    if figures := read_evaluation(run, "best"):
        details["Evaluated on"] = evaluated_on(figures["data"], figures["images"], figures["holdout"])
        details["Top-1 (%)"] = f"{figures['top1']:.2f}"
        details["Top-5 (%)"] = f"{figures['top5']:.2f}"
    report(f"Writing {folder}")
    model_args = None if hasattr(found.model, "model_args") else recipe.model_kwargs
    save_pretrained(
        found.model,
        folder,
        class_names=found.class_names or None,
        license=license,
        model_args=model_args,
        card={"details": details, "name": repo},
    )


def _options(network: Any) -> dict[str, Any]:
    """The options of a network of this package as JSON can hold them, as they are now."""
    options = {
        name: value
        for name, value in getattr(network, "model_args", {}).items()
        if value is not None and name not in ("num_classes", "img_size")
    }
    if getattr(network, "img_size", None):
        options["img_size"] = network.img_size  # set_input_size may have changed it
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError:
            raise TypeError(f"option {name}={value!r} of this network cannot be stored in a {CONFIG}") from None
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise TypeError(f"option {name}={value!r} of this network cannot be stored: JSON has only text for keys")
    return options


def _check_same(architecture: str, options: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that would not fit the network that is made from what is stored."""
    with torch.device("meta"):
        made = create_model(architecture, **options).state_dict()
    for name in sorted({*made, *tensors}):
        if name not in made or name not in tensors or made[name].shape != tensors[name].shape:
            raise ValueError(
                f"{architecture} with {options} is not this network: {name} differs. Save a network as it was created, "
                "not one that was fused or changed"
            )


def _card(
    network: nn.Module, name: str, folder: str, license: str, options: dict[str, Any], more: Mapping[str, Any]
) -> str:
    given: dict[str, Any] = dict(more)
    repo = given.pop("name", "USER/NAME")
    details = {
        "Network": f"`{name}`" + (f", options `{json.dumps(options)}`" if options else ""),
        "Params (M)": f"{count_parameters(network) / 1e6:.2f}",
        "FLOPs (G)": f"{count_flops(network) / 1e9:.2f}",
        "Paper": "Global Self-Attention Networks for Image Recognition, https://arxiv.org/abs/2010.03019",
        **given.pop("details", {}),
    }
    usage = f'```python\nimport gsanet\n\nmodel = gsanet.from_pretrained("{repo}").eval()\n```'
    card = {
        "tags": ["image-classification", "timm", "gsanet"],
        "library_name": "timm",
        "license": license,
        "description": f"`{name}` of the package gsanet.",
        "details": details,
        "usage": usage,
        **given,
    }
    return generate_readme(card, repo.rpartition("/")[2] if repo != "USER/NAME" else folder)
