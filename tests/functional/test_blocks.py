"""The convolution over blocks of pixels is the convolution with stride 2."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import gsanet
from gsanet.functional import blocks, convolution
from gsanet.functional.blocks import convolve_blocks, pays, to_blocks
from gsanet.layers import block_convolution
from gsanet.layers.block_convolution import BlockConv2d

# height, width, channels, kernel, padding
SHAPES = [
    (224, 224, 3, (7, 7), (3, 3)),
    (63, 65, 3, (7, 7), (3, 3)),
    (17, 30, 1, (5, 5), (2, 2)),
    (16, 16, 3, (3, 3), (1, 1)),
    (9, 12, 4, (3, 5), (0, 1)),
    (32, 31, 3, (7, 6), (2, 3)),
    (7, 7, 3, (7, 7), (0, 0)),
]


@pytest.mark.parametrize(("height", "width", "channels", "kernel", "padding"), SHAPES)
def test_it_is_the_convolution_with_its_gradients(height, width, channels, kernel, padding):
    x = torch.randn(2, channels, height, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, channels, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(x, weight, bias, 2, padding)
    out = convolve_blocks(x, weight, bias, padding)
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(o, (x, weight, bias), gradient) for o in (out, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_blocks_of_an_image_have_sixteen_channels_in_channels_last():
    image, weight = to_blocks(torch.randn(2, 3, 224, 224), torch.randn(64, 3, 7, 7), (3, 3))
    assert image.shape == (2, 16, 115, 115)
    assert weight.shape == (64, 16, 4, 4)
    assert image.is_contiguous(memory_format=torch.channels_last)


class OnGpu:
    """What `pays` looks at, of an image on a GPU."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, channels=3, dtype=torch.bfloat16):
        self.shape, self.dtype = (1, channels, 32, 32), dtype

    def dim(self):
        """Of an image."""
        return len(self.shape)


def test_it_pays_for_images_in_sixteen_bits_on_a_gpu(monkeypatch):
    seven = torch.empty(64, 3, 7, 7)
    usual = (2, 2), (3, 3), (1, 1)
    assert pays(OnGpu(), seven, *usual)
    assert not pays(torch.empty(1, 3, 32, 32, dtype=torch.bfloat16), seven, *usual)
    assert not pays(OnGpu(dtype=torch.float32), seven, *usual)
    with monkeypatch.context() as autocast:
        autocast.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert pays(OnGpu(dtype=torch.float32), seven, *usual) == (torch.get_autocast_dtype("cuda") in blocks.DTYPES)
    assert not pays(OnGpu(channels=64), torch.empty(64, 64, 7, 7), *usual)
    assert not pays(OnGpu(), seven, (1, 1), (3, 3), (1, 1))
    assert not pays(OnGpu(), seven, (2, 2), (3, 3), (2, 2))
    assert not pays(OnGpu(), torch.empty(64, 3, 1, 1), *usual)
    assert not pays(OnGpu(), torch.empty(64, 1, 7, 7), *usual, groups=3)
    monkeypatch.setattr(blocks, "is_exporting", lambda: True)
    assert not pays(OnGpu(), seven, *usual)


@pytest.mark.parametrize("stem", ["7x7/2+maxpool", "7x7/2"])
def test_a_network_is_the_same_with_it(stem, monkeypatch):
    plain = gsanet.create_model("gsa_resnet26", stem=stem, img_size=32, num_classes=5).double()
    over_blocks = gsanet.create_model("gsa_resnet26", stem=stem, img_size=32, num_classes=5).double()
    over_blocks.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    wanted = _output_and_gradient(plain, images)
    used = []
    monkeypatch.setattr(block_convolution, "pays", lambda *arguments: used.append(1) or True)
    for mine, theirs in zip(_output_and_gradient(over_blocks, images), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    assert used


def _output_and_gradient(network, images):
    out = network(images)
    out.square().sum().backward()
    (convolution,) = (module for module in network.modules() if isinstance(module, BlockConv2d))
    return out, convolution.weight.grad


def test_it_takes_parameters_over():
    plain = nn.Conv2d(3, 8, 7, 2, 3)
    over_blocks = BlockConv2d.take_over(plain)
    assert over_blocks.weight is plain.weight
    assert over_blocks.bias is plain.bias
    x = torch.randn(1, 3, 15, 16)
    assert torch.equal(plain(x), over_blocks(x))


def test_torch_fx_follows_it():
    network = nn.Sequential(BlockConv2d(3, 8, 7, 2, 3))
    traced = fx.symbolic_trace(network)
    x = torch.randn(1, 3, 15, 16)
    assert torch.equal(traced(x), network(x))


def test_the_convolution_with_relu_goes_over_blocks_too(monkeypatch):
    x, weight, bias = torch.randn(2, 3, 20, 21), torch.randn(8, 3, 7, 7), torch.randn(8)
    monkeypatch.setattr(convolution, "_is_for_operator", lambda *arguments: True)
    monkeypatch.setattr(convolution, "_may_use_cudnn", lambda: False)
    monkeypatch.setattr(convolution, "pays", lambda *arguments: True)
    seen = []
    in_steps = convolution._in_steps
    monkeypatch.setattr(convolution, "_in_steps", lambda x, *rest: seen.append(tuple(x.shape)) or in_steps(x, *rest))
    out = convolution.convolution_relu(x, weight, bias, None, (2, 2), (3, 3))
    torch.testing.assert_close(out, F.conv2d(x, weight, bias, 2, 3).relu(), rtol=1e-4, atol=1e-4)
    assert seen == [(2, 16, 13, 14)]
