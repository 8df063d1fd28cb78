"""What a softmax is taken of: sums of products of queries with keys and with position embeddings."""

import torch
from torch import Tensor


def add_scores(first: Tensor, *others: Tensor) -> Tensor:
    """The sum of the parts of a score, in float32 at least: a softmax is steep, and 16 bits are coarse.

    With `torch.compile` the width decides more than the last digits. There the forward pass takes the softmax of a sum
    that is not rounded yet, and may leave it to the backward pass in its own dtype, beside the largest one, to take the
    softmax again. Rounded to 16 bits a score of 1,000 may be 2 above the largest one, and its weight exp(2); one of
    30,000 is 64 above. So gradients would explode, and soon be no numbers, where scores are large.
    """
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for other in others:
        total = total + other
    return total
