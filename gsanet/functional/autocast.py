"""What autocast asks for: each operation of this package is cast as a whole, as a convolution is."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast wants an operation on x, or None."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast does not know the meta device
        return None
    return torch.get_autocast_dtype(kind)


def cast(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does: float64 stays as it is."""
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)
