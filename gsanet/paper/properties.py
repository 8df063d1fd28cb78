"""Measuring a module's row of Table 1, instead of believing it."""

import inspect

import torch
from torch import Tensor, nn


def small_module(kind: type[nn.Module], dim: int = 16, feat_size: tuple[int, int] = (9, 8)) -> nn.Module:
    """A small module to measure, in float64: of each class those of these arguments that it knows.

    None starts as the identity, as those do that are inserted between residual blocks.
    """
    arguments = {"dim_out": dim, "feat_size": feat_size, "num_heads": 2, "depth": 2, "zero_init_last": False}
    known = inspect.signature(kind.__init__).parameters
    return kind(dim, **{name: value for name, value in arguments.items() if name in known}).double().eval()


def sees_everything(module: nn.Module, x: Tensor) -> bool:
    """Global: every input pixel has a gradient to every output pixel."""
    x = x.detach().requires_grad_()
    out = module(x)
    weight = torch.randn_like(out[0, :, 0, 0])  # a plain sum, of squares too, is constant behind a layer normalisation
    for pixel in out[0].flatten(1).unbind(1):
        (grad,) = torch.autograd.grad((weight * pixel).sum(), x, retain_graph=True)
        if not (grad[0].abs().sum(0) > 0).all():
            return False
    return True


def depends_on_content(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """Content: what one pixel takes from another is not fixed by the weights, so the module is not linear."""
    with torch.no_grad():
        return not torch.allclose(module(2 * x), 2 * module(x), rtol=tolerance, atol=tolerance)


def commutes_with_shuffling(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """No position: shuffling the pixels of the input just shuffles the output."""
    order = torch.randperm(x.shape[2] * x.shape[3])

    def shuffle(feature_map: Tensor) -> Tensor:
        return feature_map.flatten(2)[..., order].view_as(feature_map)

    with torch.no_grad():
        return torch.allclose(module(shuffle(x)), shuffle(module(x)), rtol=tolerance, atol=tolerance)
