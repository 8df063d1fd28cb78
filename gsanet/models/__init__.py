"""Networks, registered with timm."""

from gsanet.models import attention_resnet, san  # noqa: F401 (they register their networks)
from gsanet.models.cost import count_flops, count_parameters
from gsanet.models.fit import fit_state_dict
from gsanet.models.gsa_resnet import GSAResNet, ResNetSettings
from gsanet.models.inserted_resnet import ClipResNet, InsertedResNet, InsertedSettings
from gsanet.models.registry import create_model, list_models

__all__ = [
    "ClipResNet",
    "GSAResNet",
    "InsertedResNet",
    "InsertedSettings",
    "ResNetSettings",
    "count_flops",
    "count_parameters",
    "create_model",
    "fit_state_dict",
    "list_models",
]
