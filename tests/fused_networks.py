"""Small networks whose norms matter, and whether their copies for inference compute the same."""

import copy

import timm
import torch
from helpers import relative_error
from torch.nn.modules.batchnorm import _BatchNorm

from gsanet import fuse_for_inference

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}


def trained(model):
    """Statistics and factors as training might leave them; some factors are negative."""
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                if norm.running_mean is not None:
                    norm.running_mean.normal_(0, 0.2)
                    norm.running_var.uniform_(0.5, 2)
                if norm.weight is not None:
                    norm.weight.uniform_(0.3, 1).mul_((torch.rand_like(norm.weight) > 0.3) * 2 - 1)
                    norm.bias.normal_(0, 0.2)
    return model


def create(name, **kwargs):
    """A network of few blocks, whose norms all matter."""
    depths = {"tiny": (1, 2, 1), "san": (1, 2, 1)}
    options = {"depths": next((d for key, d in depths.items() if key in name), (1, 2, 1, 1))}
    options |= {"nonlocal": {"after": {2: (1, 2)}}, "a2": {"after": {2: (1,), 3: (1,)}}}.get(name.split("_")[0], {})
    options |= {"ea": {"after": {1: (1,), 2: (2,)}}, "cgnl": {"after": {3: (1,)}}}.get(name.split("_")[0], {})
    options |= {"num_classes": 10, "img_size": 32, **kwargs}
    return trained(timm.create_model(name, **options)).eval()


@torch.no_grad()
def assert_same(fused_model, model, x):
    expected, found = model(x), fused_model(x)
    assert found.dtype == expected.dtype
    assert relative_error(found, expected) < LIMITS[x.dtype]


def check(model, shape):
    """In float64 and in float32; the network given stays as it was."""
    before = copy.deepcopy(model.state_dict())
    for dtype in LIMITS:
        model = model.to(dtype)
        assert_same(fuse_for_inference(model), model, torch.randn(shape, dtype=dtype))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
