"""The maps are the module: weights times values give its output back."""

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import gsanet
from gsanet import GlobalSelfAttention
from gsanet.explain import explain, explain_module, gsa_modules
from gsanet.functional import use_backend

COMPONENTS = [
    {},
    {"content": False},
    {"column": False},
    {"row": False},
    {"column": False, "row": False},
    {"content": False, "column": False},
    {"content": False, "row": False},
]


def trained(dtype=torch.float64, norm_layer=nn.BatchNorm2d, **options):
    """A module whose norm has statistics, scales and shifts that matter."""
    module = GlobalSelfAttention(
        **{"dim": 12, "feat_size": (5, 7), "num_heads": 2, "norm_layer": norm_layer, **options}
    )
    if isinstance(module.norm, nn.BatchNorm2d):
        for values in (module.norm.running_mean, module.norm.weight.data, module.norm.bias.data):
            values.normal_()
        module.norm.running_var.uniform_(0.5, 2)
    return module.to(dtype).eval()


def own_output(module, x, pixel):
    """From the equations of the paper, whatever backend the module would use."""
    with use_backend("reference"), torch.no_grad():
        return module(x)[0, :, pixel[0], pixel[1]].view(module.num_heads, -1).numpy()


@pytest.mark.parametrize("options", COMPONENTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_maps_times_values_are_the_output(options, dtype, tolerance):
    module = trained(dtype, **options)
    x = torch.randn(1, 12, 5, 7, dtype=dtype)
    for pixel in [(0, 0), (2, 3), (4, 6), (1, 5)]:
        found = explain_module(module, x, pixel, dtype=dtype)
        expected = own_output(module, x, pixel)
        assert np.abs(found.reconstruct() - expected).max() < tolerance * max(1, np.abs(expected).max())
        assert found.error < tolerance
        assert found.values.dtype == np.dtype(str(dtype).removeprefix("torch."))


def test_another_projection_is_explained_as_well():
    module, x = trained(), torch.randn(1, 12, 5, 7, dtype=torch.float64)
    module.qkv = nn.Sequential(nn.Conv2d(12, 6, 1), nn.Conv2d(6, 36, 1)).double()
    found = explain_module(module, x, (2, 3))
    assert found.error < 1e-10
    assert np.allclose(found.reconstruct(), own_output(module, x, (2, 3)))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"reach": 2}, (5, 7)),
        ({"reach": 2, "feat_size": None}, (9, 4)),
        ({"keep_reach": True, "feat_size": (3, 4)}, (6, 7)),
        ({"dim_out": 24, "dim_key": 8, "num_heads": 4}, (5, 7)),
        ({"num_heads": 1}, (4, 6)),
        ({"num_heads": 12, "feat_size": (1, 9)}, (1, 9)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:a map of")
def test_reach_sizes_and_heads(options, size):
    module = trained(**options)
    x = torch.randn(1, 12, *size, dtype=torch.float64)
    pixel = (size[0] // 2, size[1] - 1)
    found = explain_module(module, x, pixel)
    np.testing.assert_allclose(found.reconstruct(), own_output(module, x, pixel), atol=1e-10)
    assert found.content.shape == found.positional.shape == found.total.shape == (module.num_heads, *size)
    if module.reach is not None:
        far = np.abs(np.arange(size[1]) - pixel[1]) > module.reach
        assert not found.row[:, far].any()


def test_a_module_that_pools_is_explained_before_it_does():
    module = trained(stride=2, feat_size=(4, 6))
    x = torch.randn(1, 12, 4, 6, dtype=torch.float64)
    window = [explain_module(module, x, (down, along)).reconstruct() for down in (2, 3) for along in (0, 1)]
    np.testing.assert_allclose(np.mean(window, axis=0), own_output(module, x, (1, 0)), atol=1e-10)
    assert module.stride == 2


def test_content_weights_of_one_head_sum_to_the_sum_of_the_query():
    module = trained()
    x = torch.randn(1, 12, 5, 7, dtype=torch.float64)
    found = explain_module(module, x, (1, 1))
    query = (module.qkv.weight.flatten(1)[:12] @ x[0, :, 1, 1]).view(2, 6)
    np.testing.assert_allclose(found.content.sum((1, 2)), query.sum(1).detach())


@pytest.mark.parametrize("norm_layer", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_norms_with_fixed_statistics(norm_layer):
    module = trained(norm_layer=norm_layer).train()
    x = torch.randn(1, 12, 5, 7, dtype=torch.float64)
    assert explain_module(module, x, (0, 1)).error < 1e-10
    assert module.training  # as it was


def test_a_frozen_norm():
    module = trained()
    module.norm = FrozenBatchNorm2d(12).double()
    module.norm.bias.normal_()
    assert explain_module(module, torch.randn(1, 12, 5, 7).double(), (0, 1)).error < 1e-10


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels, **kwargs):
        super().__init__(2, channels, **kwargs)


class BatchStatistics(nn.BatchNorm2d):
    def __init__(self, channels, **kwargs):
        super().__init__(channels, track_running_stats=False, **kwargs)


@pytest.mark.parametrize("norm_layer", [GroupNorm, BatchStatistics])
def test_other_norms_are_refused(norm_layer):
    module = GlobalSelfAttention(12, feat_size=(5, 7), num_heads=2, norm_layer=norm_layer)
    with pytest.raises(ValueError, match=f"{norm_layer.__name__}, is not a fixed scale and shift"):
        explain_module(module, torch.randn(1, 12, 5, 7), (0, 0))


def test_wrong_arguments():
    module = trained()
    with pytest.raises(ValueError, match="the map of one image"):
        explain_module(module, torch.randn(2, 12, 5, 7), (0, 0))
    with pytest.raises(ValueError, match=r"must lie on the map of 5x7, got \(5, 0\)"):
        explain_module(module, torch.randn(1, 12, 5, 7), (5, 0))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return gsanet.create_model("gsa_resnet26_tiny", width=0.25, depths=(1, 2, 1), num_classes=3, img_size=(16, 24))


def test_a_network(network):
    image = torch.randn(1, 3, 16, 24)
    names = list(gsa_modules(network))
    assert len(names) == 4
    network.train()
    network.stages[0].eval()
    found = explain(network, image, (15.5, 23.5), names[1])  # before it pools, on the map of the first stage
    assert found.size == (16, 24)
    assert found.pixel == (15, 23)
    assert network.stages[1].training
    assert not network.stages[0].training
    seen = []
    handle = gsa_modules(network)[names[2]].register_forward_hook(lambda module, inputs, out: seen.append(out))
    found = explain(network, image, (3.5, 8.5), names[2])
    handle.remove()
    assert found.size == (8, 12)
    assert found.pixel == (1, 4)
    np.testing.assert_allclose(found.reconstruct().ravel(), seen[0][0, :, 1, 4].detach(), rtol=1e-4, atol=1e-5)
    assert {"content", "column", "row", "positional", "total", "values", "output"} <= set(found.arrays())


def test_wrong_module_or_place(network):
    with pytest.raises(ValueError, match=r"'stem' is no GSA module of the network: stages\.0\.0"):
        explain(network, torch.randn(1, 3, 16, 24), (0, 0), "stem")
    with pytest.raises(ValueError, match="outside of the image of 16x24"):
        explain(network, torch.randn(1, 3, 16, 24), (16, 0), next(iter(gsa_modules(network))))
