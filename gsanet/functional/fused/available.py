"""Whether the kernels run where a tensor is, and take what it holds."""

import torch
from torch import Tensor

from gsanet.functional.backends import may_use
from gsanet.functional.fused.compiler import unavailable
from gsanet.functional.fused.plan import SCALARS
from gsanet.functional.transforms import is_transformed


def take(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that they run on, of a dtype that they know, and nothing else is asked for."""
    return runs_on_device(x) and x.dtype in SCALARS and may_use("fused") and not is_transformed()


def runs_on_device(x: Tensor) -> bool:
    """Whether the kernels run where a tensor is."""
    return x.is_cuda and reason_against(x.device.index or 0) is None


@torch.compiler.assume_constant_result
def reason_against(index: int) -> str | None:
    """Why the kernels cannot run on a GPU, or None."""
    return unavailable(torch.device("cuda", index))
