"""Global self-attention networks for image recognition.

`import gsanet` registers the networks with timm; `gsanet.GlobalSelfAttention` is the layer; `gsanet.functional` the
operation.
"""

from gsanet import functional
from gsanet.hub import from_pretrained, save_pretrained
from gsanet.inference import fuse_for_inference
from gsanet.layers import GlobalSelfAttention
from gsanet.models import count_flops, count_parameters, create_model, list_models

__version__ = "0.1.0"

__all__ = [
    "GlobalSelfAttention",
    "__version__",
    "count_flops",
    "count_parameters",
    "create_model",
    "from_pretrained",
    "functional",
    "fuse_for_inference",
    "list_models",
    "save_pretrained",
]
