"""How every attention module here strides: by average pooling after attending."""

import torch.nn.functional as F
from torch import Tensor

from gsanet.functional.checks import check_counts


def average_pool(x: Tensor, stride: int) -> Tensor:
    """A map (batch, channels, height, width) pooled by stride x stride; the last window may be cut by the border."""
    (stride,) = check_counts(stride=stride)
    return F.avg_pool2d(x, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else x
