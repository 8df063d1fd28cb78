"""A residual block around a GSA module as one operator, and its convolutions by the kernel of few pixels."""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from functional.fused.graphs import both_ways, capture, replay
from functional.fused.test_kernels import BF16, check_close, normal
from helpers import relative_error
from timm.models.byobnet import SelfAttnBlock
from torch import nn

import gsanet
from gsanet.functional import convolution, fused, use_backend
from gsanet.functional.backends import BACKENDS
from gsanet.functional.convolution import fused_convolution_relu, fused_pointwise_convolution
from gsanet.functional.fused import block_ops, module_ops, pointwise
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import plan_product
from gsanet.functional.fused.plan import product as product_plans
from gsanet.functional.fused.plan.product import cut_product
from gsanet.inference import attention_block
from gsanet.inference.attention_block import AttentionBlock, AttentionBlocks
from gsanet.inference.blocks import PointwiseConvolution

# Of one block: the convolution before attention, projection, context vectors, columns, rows, the last convolution.
BRANCH = ["product", "product", "context_partial", "line_forward", "line_forward", "product"]


@pytest.fixture(autouse=True)
def _wanted(monkeypatch):
    monkeypatch.setattr(pointwise, "wanted", True)


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The operators take tensors of a CPU too; there is no cuDNN there."""
    monkeypatch.setitem(BACKENDS, "fused", replace(fused.BACKEND, refuses=lambda *arguments, **settings: None))
    monkeypatch.setattr(convolution, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(convolution, "_may_use_cudnn", lambda: False)


@pytest.fixture
def device(kernels, request):
    """Where the kernels run."""
    if kernels.device == "cpu":
        request.getfixturevalue("as_on_gpu")
    return kernels.device


def make_blocks():
    """Two blocks as networks have them: one with a convolution in its shortcut, and one without."""
    torch.manual_seed(0)
    model = gsanet.create_model("gsa_resnet26_tiny", img_size=32, num_classes=4).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    blocks = nn.Sequential(*(model.stages[1][i] for i in range(2)))
    assert all(isinstance(block, SelfAttnBlock) for block in blocks)
    return blocks


@pytest.fixture(scope="module")
def blocks():
    original = make_blocks()
    channels = next(module.in_channels for module in original.modules() if isinstance(module, nn.Conv2d))
    return original, gsanet.fuse_for_inference(original).to(BF16), channels


def test_what_becomes_a_block(blocks):
    _, folded, _ = blocks
    assert type(folded) is AttentionBlocks
    assert [type(block) for block in folded] == [AttentionBlock, AttentionBlock]
    assert type(folded[0].shortcut.conv) is PointwiseConvolution
    network = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet26", img_size=32, num_classes=4))
    assert type(network.stages) is AttentionBlocks
    assert all(type(stage) is AttentionBlocks for stage in network.stages)
    mixed = gsanet.fuse_for_inference(
        nn.Sequential(make_blocks(), nn.Sequential(nn.Conv2d(256, 8, 1)), nn.Sequential())
    )
    assert [type(child) for child in mixed] == [AttentionBlocks, nn.Sequential, nn.Sequential]
    assert type(mixed) is nn.Sequential


def early(plans):
    return [
        constants.get("EARLY_WEIGHT", constants.get("EARLY_TABLE"))
        for constants in (dict(plan.kernel.constants) for plan in plans)
    ]


def test_block(kernels, device, blocks):
    original, folded, channels = blocks
    network = copy.deepcopy(folded).to(device)
    x = normal(1, channels, 8, 8, dtype=BF16).to(device, memory_format=torch.channels_last)
    with torch.no_grad(), use_backend("reference"):
        expected = copy.deepcopy(original).double()(x.double().cpu())
    with torch.inference_mode(), kernels.running():
        out = network(x)
        launched = [plan.kernel.entry for plan in kernels.launched]
        assert launched == ["product", *BRANCH, *BRANCH]
        # The first kernels of the operator wait for what may have written their weights: two, as they may be beside
        # each other. All others know that it is there.
        assert early(kernels.launched) == [0, 0, 1, None, 1, 1, 1, 1, 1, None, 1, 1, 1]
        check_close("output", out, expected, BF16)
        assert out.is_contiguous(memory_format=torch.channels_last)
        kernels.launched.clear()
        # Someone looks on: block by block, or layer by layer where it is inside of one, by the same kernels, none of
        # which knows what was before the operator.
        watched = {network[1]: [0, 1, None, 1, 1, 1], network[1].self_attn: [0, 0, None, 1, 1, 0]}
        for module, expected in watched.items():
            handle = module.register_forward_hook(lambda *_: None)
            assert torch.equal(network(x), out)
            assert early(kernels.launched) == [0, 0, 1, None, 1, 1, 1, *expected]
            assert [plan.kernel.entry for plan in kernels.launched] == launched
            handle.remove()
            kernels.launched.clear()


def test_what_goes_layer_by_layer(planned, as_on_gpu, blocks, monkeypatch):
    """And never wrong: other devices, dtypes, backends, sizes of a batch, and gradients."""
    _, folded, _ = blocks
    called = []
    monkeypatch.setattr(
        attention_block, "attention_blocks", lambda *arguments: called.append(arguments) or arguments[0]
    )
    block = folded[1]
    channels = block.conv1_1x1.conv.in_channels
    x = normal(2, channels, 4, 4, dtype=BF16).to(memory_format=torch.channels_last)

    def counts(x, block=block):
        called.clear()
        with torch.no_grad(), planned.running(poison=False):
            block(x)
        return len(called)

    assert counts(x) == 1
    with use_backend("torch"), torch.no_grad():
        called.clear()
        block(x)
        assert not called
    assert counts(x.float(), copy.deepcopy(block).float()) == 0
    assert counts(x[:1].expand(9, -1, -1, -1)) == 0
    pruned = copy.deepcopy(block)
    pruned.self_attn.activation = nn.Tanh()
    assert counts(x, pruned) == 0
    changed = copy.deepcopy(block)
    changed.conv2_kxk = nn.Conv2d(changed.self_attn.dim, changed.self_attn.dim, 1, dtype=BF16)
    assert counts(x, changed) == 0
    called.clear()
    with planned.running(poison=False):
        block(x.clone().requires_grad_())
    assert not called


def test_compiled_and_registered(kernels, device, blocks):
    _, folded, channels = blocks
    network = copy.deepcopy(folded).to(device)
    x = normal(1, channels, 4, 4, dtype=BF16).to(device, memory_format=torch.channels_last)
    with torch.no_grad(), kernels.running():
        expected = network(x)
        kernels.launched.clear()
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        torch._dynamo.reset()
        assert [plan.kernel.entry for plan in kernels.launched] == ["product", *BRANCH, *BRANCH]
        tests = ("test_schema", "test_faketensor")
        arguments = []
        with mock.patch.object(attention_block, "attention_blocks", lambda *given: arguments.append(given) or x):
            network(x)
        torch.library.opcheck(block_ops.attention_blocks, arguments[0], test_utils=tests)
        weight = network[0].shortcut.conv.weight
        torch.library.opcheck(fused_pointwise_convolution, (x, weight, None, (2, 2)), test_utils=tests)


def test_all_kernels_are_compiled_ahead(planned, as_on_gpu, blocks, monkeypatch):
    """Those that blocks launch, and no others."""
    _, folded, channels = blocks
    found = []
    on_gpu = torch.device("cuda", 0)
    ahead = block_ops._compile_ahead.__wrapped__
    monkeypatch.setattr(block_ops, "_compile_ahead", lambda device, *rest: ahead(on_gpu, *rest))
    monkeypatch.setattr(launching, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(launching, "compile_all", lambda kernels, architecture: found.append(set(kernels)))
    x = normal(1, channels, 8, 8, dtype=BF16).to(memory_format=torch.channels_last)
    with torch.no_grad(), planned.running(poison=False):
        folded(x)
    assert found == [{plan.kernel for plan in planned.launched}]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions(kernels, device, residual, stride):
    x = normal(1, 32, 7, 5, dtype=BF16).to(device, memory_format=torch.channels_last)
    weight = (normal(64, 32, 1, 1, seed=1) * 32**-0.5).to(BF16).to(device)
    bias = normal(64, dtype=BF16, seed=2).to(device)
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), stride)
    added = normal(*expected.shape, dtype=BF16, seed=3).to(device, memory_format=torch.channels_last)
    settings = (stride, stride), (0, 0), (1, 1)
    with kernels.running():
        if residual:
            out = fused_convolution_relu(x, weight, bias, added, *settings)
            expected = (expected + added.double()).relu()
        else:
            out = fused_pointwise_convolution(x, weight, bias, settings[0])
        assert kernels.entries == {"product"}
        assert out.is_contiguous(memory_format=torch.channels_last)
        check_close("output", out, expected, BF16)
        kernels.launched.clear()
        spatial = weight.expand(-1, -1, 3, 3).contiguous()
        fused_convolution_relu(x, spatial, bias, None, (1, 1), (1, 1), (1, 1))
        fused_convolution_relu(x, weight, bias, None, (1, 1), (1, 1), (1, 1))  # zeros around the map
        assert not kernels.launched
    with use_backend("torch"):
        fused_convolution_relu(x, weight, bias, None, *settings)
    assert not kernels.launched


@pytest.fixture
def other_way():
    """A function that has products made by cuDNN and cuBLAS from then on."""

    def clear():
        cut_product.cache_clear()
        plan_product.cache_clear()

    with contextlib.ExitStack() as stack:

        def change():
            stack.enter_context(mock.patch.object(product_plans, "MOST_BLOCKS", 0))
            clear()

        yield change
    clear()


def test_projection_of_few_pixels(kernels, other_way):
    """Of a module alone; its columns then come behind a kernel of ours."""
    x = normal(1, 32, 6, 8, dtype=BF16).to(kernels.device, memory_format=torch.channels_last)
    weight = (normal(96, 32, seed=1) * 32**-0.5).to(BF16).to(kernels.device)
    tables = [normal(2 * length - 1, 8, dtype=BF16).div(8).to(kernels.device) for length in (6, 8)]
    arguments = x, weight, *tables, torch.ones(2, 32, device=kernels.device), None, 4, 32, True, 1
    entries = ["context_partial", "line_forward", "line_forward"]
    with kernels.running():
        out = module_ops.attention_map_inference(*arguments)
        assert [plan.kernel.entry for plan in kernels.launched] == ["product", *entries]
        assert early(kernels.launched) == [0, None, 1, 1]
        kernels.launched.clear()
        other_way()
        usual = module_ops.attention_map_inference(*arguments)
        assert [plan.kernel.entry for plan in kernels.launched] == entries
        assert early(kernels.launched) == [None, 0, 1]
    check_close("output", out, usual.double(), BF16)


# --- On a GPU: the whole network.


@pytest.mark.parametrize("images", [1, 3])
def test_network_on_gpu(gpu, other_way, images):
    """The same bits early and as usual, with weights that were just written; and close to the other way."""
    torch.manual_seed(0)
    network = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet50")).to("cuda", BF16)
    network = network.to(memory_format=torch.channels_last)
    parameters = [parameter for parameter in network.parameters() if parameter.dtype == BF16]
    kept = [parameter.clone() for parameter in parameters]
    x = normal(images, 3, 224, 224, dtype=BF16).cuda().to(memory_format=torch.channels_last)

    def run():
        for parameter, values in zip(parameters, kept, strict=True):
            parameter.zero_()
            torch.mul(values, 1, out=parameter)
        return network.forward_features(x)

    with torch.no_grad(), gpu.running(poison=False):
        run()
        products = [plan for plan in gpu.launched if plan.kernel.entry == "product"]
        assert len(products) > 40
        assert sum(dict(plan.kernel.constants)["EARLY_WEIGHT"] for plan in products) == len(products) - 2
        pairs = both_ways(lambda: capture(run))
        for seed in range(10):
            x.copy_(normal(*x.shape, dtype=BF16, seed=seed).cuda())
            graphs = replay(pairs)
            called, usual = both_ways(run)
            for other in (*graphs, called):
                assert torch.equal(other, usual)
        other_way()
        gpu.launched.clear()
        assert relative_error(usual, network.forward_features(x)) < 0.03  # roundings of 16 blocks
        assert "product" not in gpu.entries
