"""Convolutions with the ReLU and the residual behind them: the operator, the layers, and where networks get them.

Without a GPU stand-ins take the place of cuDNN's fused convolutions; with one these run too.
"""

import copy
import itertools
from collections import Counter
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from fused_networks import assert_same, check, create, trained
from helpers import relative_error
from timm.models.byobnet import BottleneckBlock, LayerFn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.resnet import Bottleneck

from gsanet import GlobalSelfAttention, fuse_for_inference
from gsanet.functional import convolution
from gsanet.functional.convolution import convolution_relu, fused_convolution_relu
from gsanet.functional.projection import has_onednn
from gsanet.inference.attention_block import AttentionBlock
from gsanet.inference.blocks import ConvolutionReLU, InferenceBlock

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def calls(monkeypatch):
    """Every device and dtype goes to the operator, and that to a stand-in; what it was called with is given."""
    made = []

    def relu(x, weight, bias, *settings):
        made.append((x, None))
        return (F.conv2d(x, weight, None, *settings) + bias.view(-1, 1, 1)).clamp(min=0)

    def add_relu(x, weight, residual, factor, bias, *settings):
        made.append((x, residual))
        return (F.conv2d(x, weight, bias, *settings) + factor * residual).clamp(min=0)

    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)
    monkeypatch.setattr(convolution, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "DTYPES", (torch.float32, torch.float64, torch.bfloat16))
    monkeypatch.setattr(convolution, "_refused", set())
    return made


FORMATS = torch.contiguous_format, torch.channels_last

# batch, channels, height, width; channels out, kernel, stride, padding, dilation
SHAPES = [
    ((2, 16, 9, 7), 32, 1, 1, 0, 1),
    ((2, 16, 9, 7), 24, 3, 2, 1, 1),
    ((2, 3, 20, 20), 8, 7, 2, 3, 1),
    ((1, 8, 12, 9), 8, 3, 1, 2, 2),
    ((3, 8, 1, 1), 8, 1, 1, 0, 1),
]


def example(shape, channels, kernel, stride, padding, dilation, residual, **options):
    """The arguments of the operator."""
    x = torch.randn(shape, **options)
    weight = torch.randn(channels, shape[1], kernel, kernel, **options) / (shape[1] * kernel**2) ** 0.5
    settings = (stride, stride), (padding, padding), (dilation, dilation)
    bias = torch.randn(channels, **options)
    return x, weight, bias, torch.randn_like(F.conv2d(x, weight, bias, *settings)) if residual else None, *settings


def in_double(x, weight, bias, residual, *settings):
    out = F.conv2d(x.double(), weight.double(), bias.double(), *settings)
    return F.relu(out if residual is None else out + residual.double())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operator(calls, shape, residual):
    x, weight, bias, added, *settings = example(*shape, residual)
    expected = in_double(x, weight, bias, added, *settings)
    for formats in itertools.product(FORMATS, repeat=3):  # however each of them lies in memory
        x, weight, added = (
            tensor if tensor is None else tensor.contiguous(memory_format=memory_format)
            for tensor, memory_format in zip((x, weight, added), formats, strict=True)
        )
        out = convolution_relu(x, weight, bias, added, *settings)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert relative_error(out, expected) < 1e-6
        arguments = x, weight, bias, added, *settings
        torch.library.opcheck(fused_convolution_relu, arguments, test_utils=("test_schema", "test_faketensor"))
    assert calls
    assert all((given is not None) == residual for _, given in calls)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "shape", [*SHAPES, ((8, 64, 56, 56), 256, 1, 1, 0, 1), ((8, 3, 64, 64), 64, 7, 2, 3, 1)], ids=str
)
def test_operator_on_a_gpu(shape, residual, dtype):
    x, weight, bias, added, *settings = example(*shape, residual, device="cuda", dtype=dtype)
    expected = in_double(x, weight, bias, added, *settings)
    for memory_format in FORMATS:
        arguments = x.to(memory_format=memory_format), weight.to(memory_format=memory_format), bias, added
        out = convolution_relu(*arguments, *settings)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert relative_error(out, expected) < {torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        torch.library.opcheck(
            fused_convolution_relu, (*arguments, *settings), test_utils=("test_schema", "test_faketensor")
        )
    # What networks are made of it does take.
    assert not any((8, 64, 56, 56) in key for key in convolution._refused)


def test_what_goes_to_the_operator(calls, monkeypatch):
    x, weight, bias, added, *settings = example(*SHAPES[0], residual=True)

    def count(*arguments):
        before = len(calls)
        out = convolution_relu(*arguments, *settings)
        assert relative_error(out, in_double(*arguments, *settings)) < 1e-2
        return len(calls) - before

    assert count(x, weight, bias, added) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert count(x.bfloat16(), weight, bias, added) == 0
    assert count(x, weight, bias, added.double()) == 0
    assert count(x, weight, bias, added[:, :, :1, :1]) == 0
    assert count(x.requires_grad_(), weight, bias, added) == 0
    with torch.no_grad():
        assert count(x, weight, bias, added) == 1
    x = x.detach()
    mapped = torch.func.vmap(lambda x, added: convolution_relu(x, weight, bias, added, *settings))
    before = len(calls)
    assert relative_error(mapped(x[None], added[None])[0], in_double(x, weight, bias, added, *settings)) < 1e-6
    assert len(calls) == before
    for name in ("enabled", "deterministic"):
        with torch.backends.cudnn.flags(**{name: name != "enabled"}):
            assert count(x, weight, bias, added) == 0
    monkeypatch.setattr(convolution, "DTYPES", (torch.bfloat16,))
    assert count(x, weight, bias, added) == 0
    assert count(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), added.bfloat16()) == 1
    monkeypatch.setattr(convolution, "_is_on_gpu", lambda x: x.is_cuda)
    assert count(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), added.bfloat16()) == 0
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        fused_convolution_relu(x, weight, bias, added, *settings).sum().backward()


def test_what_cudnn_refuses_is_remembered(calls, monkeypatch):
    tried = []

    def refuse(x, *rest):
        tried.append(tuple(x.shape))
        raise RuntimeError("no engine")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    arguments = example(*SHAPES[0], residual=False)
    for _ in range(2):
        assert relative_error(convolution_relu(*arguments), in_double(*arguments)) < 1e-6
    assert len(tried) == 1
    with_residual = example(*SHAPES[0], residual=True)
    convolution_relu(*with_residual)
    assert len(calls) == 1
    other = example(*SHAPES[1], residual=False)
    assert relative_error(convolution_relu(*other), in_double(*other)) < 1e-6
    assert len(tried) == 2

    def no_room(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        convolution_relu(*with_residual)
    assert len(convolution._refused) == 2


CONVOLUTIONS = ("convolution", "pointwise_convolution")  # PyTorch's, and the operator for few pixels


class Seen(TorchDispatchMode):
    """The operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.biases = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        self.biases += func.overloadpacket.__name__ in CONVOLUTIONS and args[2] is not None
        return func(*args, **(kwargs or {}))


# Network: fused convolutions, with a residual, ReLUs that are left, convolutions that are left, biases among them.
COUNTS = {
    # 49 ReLUs: the stem's, and 3 in each block. One of these is behind attention, on a GPU in its own operator.
    "gsa_resnet50": (33, 16, 16, 4, 0),
    "conv_resnet50": (49, 16, 0, 4, 0),
    "torchvision.resnet50": (49, 16, 0, 4, 0),
    "torchvision.resnet18": (17, 8, 0, 3, 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_every_relu_is_part_of_a_convolution(calls, name):
    if name.startswith("torchvision"):
        model = trained(getattr(torchvision.models, name.split(".")[1])()).eval()
    else:
        model = trained(timm.create_model(name, img_size=32)).eval()
    folded = fuse_for_inference(model)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        with Seen() as seen:
            out = folded(x)
    assert relative_error(out, expected) < 1e-4
    fused, residuals, relus, convolutions, biases = COUNTS[name]
    assert len(calls) == seen.names["convolution_relu"] == fused
    assert sum(residual is not None for _, residual in calls) == residuals
    assert seen.names["relu"] + seen.names["relu_"] == relus
    projections = (
        sum(isinstance(one, GlobalSelfAttention) for one in model.modules()) if has_onednn(torch.float32) else 0
    )
    assert sum(seen.names[one] for one in CONVOLUTIONS) == convolutions + projections
    assert seen.biases == biases
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in calls)


@pytest.mark.parametrize(
    "name", ["gsa_resnet38", "gsa_resnet26_tiny", "conv_resnet38", "nonlocal_resnet50", "sasa_resnet50"]
)
def test_networks_through_the_operator(calls, name):
    model = create(name)
    check(model, (2, 3, 32, 32))
    assert calls


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_networks_call_the_operator(calls, dynamic):
    model = trained(torchvision.models.resnet18()).eval() if dynamic else create("gsa_resnet26", depths=(1, 1, 1, 1))
    folded = fuse_for_inference(model)
    fused = sum(isinstance(module, ConvolutionReLU) for module in folded.modules())
    assert fused == 17 if dynamic else 9
    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3) if dynamic else (2,):
        x = torch.randn(batch, 3, 32, 32)
        calls.clear()
        assert_same(compiled, folded, x)
        assert len(calls) == 2 * fused


def test_exported_networks_do_not(calls):
    folded = fuse_for_inference(create("conv_resnet38"))
    x = torch.randn(2, 3, 32, 32)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(folded, (x,), dynamic_shapes=shapes)
    assert not calls
    assert not [node for node in exported.graph.nodes if str(node.target).startswith("gsanet")]
    assert_same(exported.module(), folded, torch.randn(3, 3, 32, 32))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, 17), (torch.float16, 17), (torch.float32, 0)])
def test_what_a_gpu_would_be_given(dtype, fused):
    folded = fuse_for_inference(torchvision.models.resnet18())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():  # nothing is computed: no GPU is needed
        values = {name: mode.from_tensor(value).to("cuda", dtype) for name, value in folded.state_dict().items()}
        x = torch.empty(2, 3, 64, 64, device="cuda", dtype=dtype)
        with Seen() as seen:
            out = torch.func.functional_call(folded, values, (x,))
    assert (out.device.type, out.dtype, tuple(out.shape)) == ("cuda", dtype, (2, 1000))
    assert seen.names["convolution_relu"] == fused
    assert seen.names["relu_"] == 17 - fused


def test_symbolic_traces_have_one_step():
    folded = fuse_for_inference(trained(torchvision.models.resnet18()).eval())
    traced = torch.fx.symbolic_trace(folded)
    assert sum(node.target is convolution_relu for node in traced.graph.nodes) == 17
    assert_same(traced, folded, torch.randn(1, 3, 32, 32))


@needs_gpu
@pytest.mark.parametrize("name", ["gsa_resnet50", "conv_resnet50"])
def test_networks_on_a_gpu(name):
    model = create(name).cuda()
    folded = fuse_for_inference(model).bfloat16()
    x = torch.randn(4, 3, 32, 32, device="cuda")
    with torch.inference_mode():
        expected = model(x)
        for memory_format in FORMATS:
            network = copy.deepcopy(folded).to(memory_format=memory_format)
            batch = x.bfloat16().to(memory_format=memory_format)
            with Seen() as seen:
                assert relative_error(network(batch), expected) < 0.05
            # Few images: all blocks around GSA modules are one operator, which has their convolutions in it.
            blocks = [each for each in network.modules() if isinstance(each, AttentionBlock)]
            assert seen.names["attention_blocks"] == bool(blocks)
            inside = {each for block in blocks for each in block.modules()}
            outside = [each for each in network.modules() if type(each) is ConvolutionReLU and each not in inside]
            assert seen.names["convolution_relu"] == len(outside)
            assert relative_error(torch.compile(network, fullgraph=True)(batch), expected) < 0.05


def bottleneck(**options):
    """A block of torchvision with a shortcut of its own, in evaluation mode."""
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, stride=2, bias=False), nn.BatchNorm2d(32))
    return trained(Bottleneck(16, 8, stride=2, downsample=shortcut, **options)).eval()


def test_a_block_keeps_names_and_attributes(calls):
    block = bottleneck()
    folded = fuse_for_inference(block)
    assert type(folded) is InferenceBlock
    assert folded.stride == 2
    names = {name for name, _ in block.named_modules()}
    assert {name for name, _ in folded.named_modules()} == names
    assert [name for name, _ in folded.named_parameters()] == [
        *("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "conv3.weight", "conv3.bias"),
        "downsample.0.weight",  # its bias is in the other's
    ]
    x = torch.randn(2, 16, 8, 8)
    assert_same(folded, block, x)
    assert len(calls) == 3
    other = fuse_for_inference(bottleneck())
    other.load_state_dict(folded.state_dict())
    assert_same(other, block, x)
    assert_same(fuse_for_inference(folded), block, x)
    assert_same(copy.deepcopy(folded), block, x)


def hooked(name):
    def change(block):
        block.get_submodule(name).register_forward_hook(lambda module, inputs, out: 2 * out)

    return change


def own_forward(block):
    block.forward = lambda x: Bottleneck.forward(block, x) + 1


def other_relu(block):
    block.relu = nn.SiLU()


def shared(block):
    block.again = block.conv3


# What stands in the way: fused convolutions that are left.
IN_THE_WAY = {
    "relu": (hooked("relu"), 0),
    "conv3": (hooked("conv3"), 0),
    "bn3": (hooked("bn3"), 0),
    "downsample": (hooked("downsample"), 3),
    "downsample.0": (hooked("downsample.0"), 3),
    "bn1": (hooked("bn1"), 2),
    "the block": (hooked(""), 3),
    "forward": (own_forward, 0),
    "silu": (other_relu, 0),
    "shared": (shared, 0),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_stands_in_the_way(name):
    block = bottleneck()
    change, fused = IN_THE_WAY[name]
    change(block)
    if name != "forward":
        check(block, (2, 16, 8, 8))
    folded = fuse_for_inference(block.float())
    assert sum(isinstance(module, ConvolutionReLU) for module in folded.modules()) == fused
    assert isinstance(folded, InferenceBlock) == bool(fused)


@pytest.mark.parametrize("name", ["conv3_1x1", "drop_path", "attn_last", "act", "shortcut"])
def test_what_stands_in_the_way_in_blocks_of_timm(name):
    block = trained(BottleneckBlock(16, 32, stride=2, bottle_ratio=0.25)).eval()
    hooked(name)(block)
    check(block, (2, 16, 8, 8))
    assert isinstance(fuse_for_inference(block.float()), InferenceBlock) == (name == "shortcut")


def test_a_subclass_stays_as_it_is():
    class Own(Bottleneck):
        def forward(self, x):
            return super().forward(x) - 1

    block = bottleneck()
    block.__class__ = Own
    check(block, (2, 16, 8, 8))
    assert type(fuse_for_inference(block.float())) is Own


@pytest.mark.parametrize(
    "options",
    [
        {"linear_out": True},
        {"attn": timm.layers.SEModule, "attn_last": True},
        {"downsample": ""},
        {"act": nn.SiLU},
        {"aa": timm.layers.BlurPool2d, "downsample": "conv1x1"},
    ],
    ids=str,
)
def test_blocks_of_timm_that_end_otherwise(options):
    blur = options.get("aa")
    layers = LayerFn(partial(timm.layers.ConvNormAct, aa_layer=blur), act=options.get("act", nn.ReLU))
    layers.attn = options.get("attn")
    others = {name: value for name, value in options.items() if name not in ("aa", "act", "attn")}
    block = trained(BottleneckBlock(16, 32, stride=2, bottle_ratio=0.25, layers=layers, **others)).eval()
    check(block, (2, 16, 8, 8))
    folded = fuse_for_inference(block.float())
    assert isinstance(folded, InferenceBlock) == (blur is not None)
    if blur is not None:  # a bias before a blur stays there
        assert folded.shortcut.conv.bias is not None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3, groups=2, padding=1),
        nn.Conv2d(16, 16, 3, padding="same"),
        nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect"),
        timm.layers.Conv2dSame(16, 16, 3, stride=2),
    ],
    ids=str,
)
def test_other_convolutions_only_take_their_norms(layer):
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(16), nn.ReLU())).eval()
    check(model, (2, 16, 8, 8))
    assert [type(module) for module in fuse_for_inference(model.float())] == [type(layer), nn.Identity, nn.ReLU]


def test_norms_and_their_relus():
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, dilation=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, padding=1, bias=False), timm.layers.BatchNormAct2d(8)),
        *(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), relu),  # this ReLU has two uses
        *(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), relu),
        *(nn.Conv2d(8, 8, 1), timm.layers.BatchNormAct2d(8, act_layer=nn.SiLU)),
    )
    model = trained(model).eval()
    check(model, (2, 3, 12, 12))
    kinds = [type(module) for module in fuse_for_inference(model.float())]
    assert kinds == [
        *(ConvolutionReLU, nn.Identity, nn.Identity),
        *(ConvolutionReLU, nn.Identity),
        *(nn.Conv2d, nn.Identity, nn.ReLU) * 2,
        *(nn.Conv2d, nn.SiLU),
    ]
    model[4].act.register_forward_hook(lambda *_: None)
    assert type(fuse_for_inference(model)[3]) is nn.Conv2d
