"""The non-local block of "Non-local Neural Networks" (Wang et al., 2018), in its embedded Gaussian form.

    y_i = x_i + BN(W_z sum over j of softmax_j(theta(x_i) phi(x_j)) g(x_j))

The block is timm's `NonLocalAttn`. It divides the scores by sqrt(dim), a constant that theta could hold as well; the
authors' code divides too, because the softmax would start saturated. The paper's optional max-pooling of phi and g is
left out. Memory: the scores of all pairs of pixels, pixels x pixels an image, once before and once after the softmax.
"""

import torch
from timm.layers import NonLocalAttn
from torch import Tensor, nn

from gsanet.functional.checks import check_feature_map
from gsanet.layers.attention import Attention, Combination, Properties


class NonLocal(Attention):
    """Non-local block: softmax attention between all pixels, added to its input.

    Args:
        dim: Channels.
        dim_inner: Channels of theta, phi and g. Default: half of dim, as in the paper.
        zero_init_last: Start as the identity, as in the paper: the scale of the last normalisation is zero.
        device: Where the parameters are made.
        dtype: Of the parameters.
    """

    label = "non-local"
    properties = Properties(everywhere=True, content=True, positional=False, combination=Combination.INSERTED)

    def __init__(
        self,
        dim: int,
        dim_inner: int | None = None,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.dim, self.zero_init_last = dim, zero_init_last
        self.block = NonLocalAttn(dim, rd_channels=dim_inner or dim // 2, device=device, dtype=dtype)
        # Three biases of timm's have no effect: phi's adds the same to all scores of a pixel, and those of g and W_z
        # move all pixels alike, which the normalisation takes back.
        self.block.p.bias = self.block.g.bias = self.block.z.bias = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as timm does; the identity only where it is wanted."""
        self.block.reset_parameters()
        if not self.zero_init_last:
            nn.init.ones_(self.block.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, dim, height, width) to the same shape."""
        check_feature_map(x, self.dim)
        return self.block(x) if x.shape[0] else x  # timm's block does not take an empty batch
