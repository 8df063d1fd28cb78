"""What the blocks of a kernel left of a parameter's gradient, added up: `kernels/table.cu`."""

import torch
from torch import Tensor

from gsanet.functional.fused import arguments
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import plan_table


def sum_parts(parts: Tensor, like: Tensor) -> Tensor:
    """The gradient of a parameter, such as a table of embeddings, in its dtype.

    Args:
        parts: (blocks, ...) in float32, contiguous, as many numbers for each block as the parameter has.
        like: The parameter.
    """
    out = torch.empty_like(like)
    values = arguments.Table(partial=parts.data_ptr(), out=out.data_ptr(), blocks=parts.shape[0], columns=out.numel())
    launching.start(plan_table(like.dtype, out.numel()), values, parts)
    return out
