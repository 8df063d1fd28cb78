"""Networks for inference: the same outputs, fewer layers."""

import copy
import shutil

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from functional.fused import host
from fused_networks import assert_same, check, create, trained
from helpers import relative_error
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import gsanet
from gsanet import GlobalSelfAttention, fuse_for_inference
from gsanet.functional import fused, global_self_attention_map, use_backend
from gsanet.functional.backends import BACKENDS, Backend
from gsanet.functional.fused import axis_ops, module_ops
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.plan import Machine
from gsanet.inference import InferenceSelfAttention

needs_compiler = pytest.mark.skipif(shutil.which(host.COMPILER) is None, reason="no C++ compiler")


def norms(model):
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


@pytest.mark.parametrize("name", gsanet.list_models())
def test_every_network(name):
    check(create(name), (2, 3, 32, 32))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v2", "densenet121"])
def test_networks_of_others(name):
    model = trained(getattr(torchvision.models, name)()).eval()
    check(model, (2, 3, 32, 32))
    left = norms(fuse_for_inference(model))
    assert not left if name != "densenet121" else len(left) < len(norms(model))


@pytest.mark.parametrize("name", ["gsa_resnet50", "gsa_resnet26_tiny", "conv_resnet50"])
def test_no_norm_is_left(name):
    model = gsanet.create_model(name)
    folded = fuse_for_inference(model)
    assert not norms(folded)
    assert type(folded) is type(model)
    attention = [module for module in folded.modules() if isinstance(module, InferenceSelfAttention)]
    assert len(attention) == sum(isinstance(module, GlobalSelfAttention) for module in model.modules())
    assert all(module.ends_in_relu for module in attention)


@pytest.mark.parametrize(
    "options",
    [
        {"content": False},
        {"column": False},
        {"row": False, "column": False},
        {"reach": 2},
        {"keep_reach": True},
        {"stem": "3x3/1", "groups": (3, 4)},
        {"act_layer": "silu"},
    ],
    ids=str,
)
def test_options(options):
    model = create("gsa_resnet26", **options)
    check(model, (2, 3, 32, 32))
    check(model, (1, 3, 32, 24))  # the middle of the tables
    folded = fuse_for_inference(model.float())
    assert not norms(folded)
    if "keep_reach" in options:
        check(model, (2, 3, 48, 40))
    elif "reach" not in options and options.get("row", True):
        with pytest.raises(ValueError, match="larger than the"):
            folded(torch.randn(1, 3, 96, 96))


def test_methods_of_the_network_stay():
    model = create("gsa_resnet26", drop_path_rate=0.5, drop_rate=0.5).train()
    model.set_grad_checkpointing()
    folded = fuse_for_inference(model)
    model.eval()
    assert not any(module.training for module in folded.modules())
    assert not any(isinstance(module, (nn.Dropout, timm.layers.DropPath)) for module in folded.modules())
    assert model.grad_checkpointing
    assert not folded.grad_checkpointing
    x = torch.randn(1, 3, 64, 48)
    model.set_input_size((64, 48))
    folded.set_input_size((64, 48))
    with torch.no_grad():
        for ours, theirs in zip(folded.forward_intermediates(x)[1], model.forward_intermediates(x)[1], strict=True):
            assert relative_error(ours, theirs) < 1e-5
    assert gsanet.count_flops(folded) == gsanet.count_flops(model)
    features = trained(timm.create_model("gsa_resnet26", features_only=True, img_size=(64, 48))).eval()
    with torch.no_grad():
        for ours, theirs in zip(fuse_for_inference(features)(x), features(x), strict=True):
            assert relative_error(ours, theirs) < 1e-5


def test_tables_with_zeros_around_them_are_kept():
    attention = GlobalSelfAttention(16, feat_size=6, num_heads=2, reach=2).eval()
    folded = fuse_for_inference(attention)
    x = torch.randn(1, 16, 6, 6)
    with torch.inference_mode():
        folded(x)
    kept = dict(folded._fitted)
    assert sorted(kept) == [("rel_column", 6), ("rel_row", 6)]
    with torch.no_grad():
        folded(x)
    assert all(folded._fitted[key][1] is table for key, (_, table) in kept.items())
    other = GlobalSelfAttention(16, feat_size=6, num_heads=2, reach=2).eval()
    folded.load_state_dict(fuse_for_inference(other).state_dict())
    assert_same(folded, other, x)
    with torch.no_grad():
        assert relative_error(folded.double()(x.double()), other(x)) < 1e-6


class Block(nn.Module):
    """What can stand in the way."""

    def __init__(self):
        super().__init__()
        self.attention = GlobalSelfAttention(16, feat_size=8, num_heads=2, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.used_twice = nn.Conv2d(16, 16, 1)
        self.norm_of_one = nn.BatchNorm2d(16)
        self.read = nn.Conv2d(16, 16, 1, bias=False)
        self.norm_of_read = nn.BatchNorm2d(16)
        self.branching = nn.Conv2d(16, 16, 3, padding="same", padding_mode="reflect", groups=2)
        self.norm_of_branch = nn.BatchNorm2d(16)
        self.plain = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm_of_plain = nn.BatchNorm2d(16, affine=False)
        self.of_the_batch = nn.BatchNorm2d(16, track_running_stats=False)

    def forward(self, x, extra=None):
        x = self.relu(self.norm(self.attention(x)))
        x = self.norm_of_one(self.used_twice(x)) + self.used_twice(x)
        x = self.norm_of_read(self.read(x)) + F.conv2d(x, self.read.weight)
        branch = self.branching(x)
        x = self.relu(self.norm_of_branch(branch) + branch)
        x = self.relu(self.norm_of_plain(self.plain(x)))
        return self.of_the_batch(x if extra is None else x + extra)


def test_only_what_can_be_folded():
    model = trained(Block()).eval()
    check(model, (2, 16, 8, 8))
    folded = fuse_for_inference(model.float())
    assert norms(folded) == ["norm_of_one", "norm_of_read", "norm_of_branch", "of_the_batch"]
    assert folded.attention.ends_in_relu
    assert isinstance(folded.relu, nn.ReLU)  # it has other uses
    assert vars(folded).keys() == vars(model).keys()

    model.plain.register_forward_hook(lambda *_: None)
    assert "norm_of_plain" in norms(fuse_for_inference(model))

    attention = GlobalSelfAttention(16, feat_size=8, num_heads=2)
    in_order = nn.Sequential(
        attention, nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
    )
    in_order = trained(in_order).eval()
    check(in_order, (2, 16, 8, 8))
    kinds = [type(module) for module in fuse_for_inference(in_order)]
    assert kinds == [InferenceSelfAttention, nn.Identity, nn.Identity, nn.Identity, nn.Conv2d, nn.Identity]

    shared = nn.Sequential(attention, nn.GELU(), attention, nn.BatchNorm2d(16), nn.GELU())
    shared = trained(shared).eval()
    check(shared, (2, 16, 8, 8))
    assert norms(fuse_for_inference(shared)) == ["3"]

    grouped = GlobalSelfAttention(16, feat_size=8, num_heads=2, norm_layer=lambda dim, **_: nn.GroupNorm(2, dim))
    assert type(fuse_for_inference(grouped)) is GlobalSelfAttention


def test_state_dict_and_copies(tmp_path):
    model = create("gsa_resnet26")
    folded = fuse_for_inference(model)
    x = torch.randn(1, 3, 32, 32)
    other = fuse_for_inference(create("gsa_resnet26"))
    other.load_state_dict(folded.state_dict())
    assert_same(other, model, x)
    assert_same(copy.deepcopy(folded), model, x)
    torch.save(folded, tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=False), model, x)
    assert_same(folded.to(memory_format=torch.channels_last), model, x.to(memory_format=torch.channels_last))
    assert_same(fuse_for_inference(folded), model, x)


def test_other_dtypes_keep_the_scales():
    model = create("gsa_resnet26")
    folded = fuse_for_inference(model)
    scales = {name: value for name, value in folded.named_buffers() if name.endswith(("norm", "finish"))}
    assert len(scales) == 2 * 5
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)
        for dtype in (torch.bfloat16, torch.float16):
            converted = copy.deepcopy(folded).to(dtype)
            assert all(parameter.dtype == dtype for parameter in converted.parameters())
            buffers = dict(converted.named_buffers())
            assert all(torch.equal(buffers[name], value) for name, value in scales.items())
            out = converted(x.to(dtype))
            assert out.dtype == dtype
            assert relative_error(out, expected) < 0.05
            assert all(value.dtype == torch.float32 for value in converted.float().buffers())
        with torch.autocast("cpu", torch.bfloat16):
            assert relative_error(folded(x), expected) < 0.05
    assert all(value.is_meta for value in copy.deepcopy(folded).half().to("meta").buffers())
    assert {value.dtype for value in fuse_for_inference(model.bfloat16()).buffers()} == {torch.float32}


def test_not_for_training():
    model = create("gsa_resnet26")
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    folded = fuse_for_inference(model)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in folded.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        folded(torch.randn(1, 3, 32, 32)).sum().backward()
    # What the image contributes can still be asked.
    gradients = []
    x = torch.randn(1, 3, 32, 32, requires_grad=True)
    for network in (model, folded):
        gradients += torch.autograd.grad(network(x).square().sum(), x)
    assert relative_error(*gradients) < 1e-5


def test_compile_and_export():
    model = create("gsa_resnet26_tiny", reach=3)
    folded = fuse_for_inference(model)
    x = torch.randn(2, 3, 32, 32)
    assert_same(torch.compile(folded, fullgraph=True, backend="aot_eager"), model, x)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(folded, (x,), dynamic_shapes=({0: batch},))
    assert_same(exported.module(), model, torch.randn(5, 3, 32, 32))
    assert_same(fuse_for_inference(torch.compile(model)), model, x)


@pytest.fixture
def on_host(monkeypatch):
    """The backend `fused` on CPU tensors, through the stand-in; the entries of launched kernels are given."""
    launched = []

    def launch(plan, values, device):
        kernel = plan.kernel
        launched.append(kernel.entry)
        constants = dict(kernel.constants)
        host.launch(kernel.source, kernel.entry, constants, plan.grid, plan.threads, plan.shared_bytes, values)

    def refuses(operation, *tensors, **settings):
        return fused._refuses_map(*tensors, **settings) if operation == "global_self_attention_map" else "only maps"

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(launching, "machine", lambda device: Machine(3, 227 * 1024, 228 * 1024))
    backend = Backend("fused", fused.content_attention, fused.positional_attention, refuses, fused.attention_map)
    monkeypatch.setitem(BACKENDS, "fused", backend)
    return launched


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "heads", "key", "value", "stride", "content", "finish"),
    [
        ((6, 8), 4, 8, 8, 1, True, True),
        ((6, 8), 4, 8, 8, 2, True, True),
        ((6, 8), 4, 8, 8, 2, False, True),
        ((5, 7), 4, 8, 16, 1, False, False),
        ((6, 4), 8, 9, 9, 2, True, True),  # M-ResNet-50's heads
        ((4, 70), 2, 8, 8, 2, True, True),  # longer than a gradient's kernel takes
    ],
)
def test_operator(on_host, dtype, size, heads, key, value, stride, content, finish):
    height, width = size
    x = torch.randn(2, 24, height, width).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(heads * (key * (2 if content else 1) + value), 24).div(5).to(dtype)
    tables = [torch.randn(2 * length - 1, key).div((key * length) ** 0.5).to(dtype) for length in size]
    norm, end = torch.randn(2, 2, heads * value)
    arguments = x, weight, *tables, norm, end if finish else None
    out = module_ops.attention_map_inference(*arguments, heads, heads * key, content, stride)
    assert out.is_contiguous(memory_format=torch.channels_last)
    *maps, norm, end = (None if tensor is None else tensor.double() for tensor in arguments)
    with use_backend("reference"):
        expected = global_self_attention_map(
            *maps, norm, finish=end, num_heads=heads, dim_key=heads * key, content=content, stride=stride
        )
    assert out.shape == expected.shape
    assert relative_error(out, expected) < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert on_host.count("line_forward") == 2
    assert len(on_host) <= 4
    assert ("context_partial" in on_host) == content


@needs_compiler
def test_a_module_is_one_operator(on_host):
    block = nn.Sequential(GlobalSelfAttention(32, feat_size=8, num_heads=4, stride=2), nn.BatchNorm2d(32), nn.ReLU())
    block = trained(block).eval()
    folded = fuse_for_inference(block)
    x = torch.randn(2, 32, 6, 8)
    with torch.no_grad(), use_backend("reference"):
        expected = block(x)
    with use_backend("fused"):
        out = folded(x)
        assert on_host == ["context_partial", "line_forward", "line_forward"]
        assert relative_error(out, expected) < 1e-5
        assert relative_error(folded(x.requires_grad_()), expected) < 1e-5
        assert len(on_host) == 3  # layer by layer, for the gradient
        with torch.no_grad():
            compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
            assert relative_error(compiled(x), expected) < 1e-5
            exported = torch.export.export(folded, (x.detach(),))
            assert relative_error(exported.module()(x), expected) < 1e-5
            with torch.autocast("cpu", torch.bfloat16):
                assert relative_error(folded(x), expected) < 0.02
            assert relative_error(folded.bfloat16()(x.bfloat16()), expected) < 0.02
        assert len(on_host) == 5 * 3
    torch.library.opcheck(
        module_ops.attention_map_inference,
        (
            x.detach(),
            torch.randn(96, 32),
            torch.randn(11, 8),
            torch.randn(15, 8),
            *torch.randn(2, 2, 32),
            4,
            32,
            True,
            2,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"row": False}, {"column": False, "content": False}, {"column": False, "row": False}], ids=str
)
def test_a_module_with_one_axis_is_one_operator(on_host, dtype, options):
    module = GlobalSelfAttention(32, feat_size=8, num_heads=4, stride=2, **options)
    block = trained(nn.Sequential(module, nn.BatchNorm2d(32), nn.ReLU())).eval()
    folded = fuse_for_inference(block).to(dtype)
    x = torch.randn(2, 32, 6, 8)
    with torch.no_grad(), use_backend("reference"):
        expected = block.double()(x.double())
    kernels = ["context_partial", "line_forward"] if module.content else ["line_forward"]
    with use_backend("fused"), torch.no_grad():
        assert relative_error(folded(x.to(dtype)), expected) < {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
        assert on_host == kernels
        compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x.to(dtype)), expected) < {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
        assert on_host == 2 * kernels


@needs_compiler
def test_the_operator_has_no_gradient(on_host):
    x = torch.randn(1, 16, 4, 4, requires_grad=True)
    tables = torch.randn(2, 7, 8)
    out = module_ops.attention_map_inference(x, torch.randn(48, 16), *tables, *torch.randn(2, 2, 16), 2, 16, True, 1)
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.sum().backward()
    out, *_ = axis_ops.attention_map(x, torch.randn(48, 16), tables[0], torch.randn(2, 16), "row", 2, 16, True, 1)
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.sum().backward()


def test_what_the_kernels_refuse(on_host):
    x, weight, table = torch.randn(1, 16, 4, 4), torch.randn(48, 16), torch.randn(7, 8)
    norm = torch.randn(2, 16)
    settings = {"num_heads": 2, "dim_key": 16, "content": True, "reach": None, "stride": 1}

    def reason(x=x, columns=table, rows=table, norm=norm, **changes):
        return fused._refuses_map(x, weight, columns, rows, norm, **{**settings, **changes})

    assert reason() is None
    assert reason(finish=norm) is None
    assert "no gradient" in reason(x=x.clone().requires_grad_())
    assert "float32" in reason(norm=norm.double())
    assert "pools 2 x 2" in reason(stride=3)
    assert "heads of" in reason(num_heads=8, dim_key=16)
    assert "up to" in reason(x=torch.randn(1, 16, 4, 400))
    assert "empty" in reason(x=x[:0])
    assert "only where" in reason(norm=nn.BatchNorm2d(16), finish=norm)
    assert reason(x=x.clone().requires_grad_(), columns=None) is None
    assert reason(finish=norm, columns=None) is None
    assert "no gradient" in reason(x=x.clone().requires_grad_(), columns=None, finish=norm)
    assert "float32" in reason(columns=None, finish=norm.double())
    assert "nothing to attend by" in reason(columns=None, rows=None, content=False)
    arguments = {"num_heads": 2, "dim_key": 16}
    with pytest.raises(ValueError, match=r"finish must hold a scale and a shift for each channel, \(2, 16\)"):
        global_self_attention_map(x, weight, table, table, norm, finish=norm[:1], **arguments)
    with pytest.raises(TypeError, match="norm must be float32 or float64"):
        global_self_attention_map(x, weight, table, table, norm.half(), **arguments)
