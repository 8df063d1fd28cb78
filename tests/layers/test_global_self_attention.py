import copy
import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import brute_global, relative_error
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import gsanet
import gsanet.layers.relative as relative
from gsanet import GlobalSelfAttention, functional

TABLE_4 = [row for row in itertools.product((True, False), repeat=3) if any(row)]


def make(dim=16, feat_size=(6, 5), num_heads=2, **kwargs):
    return GlobalSelfAttention(dim, feat_size=feat_size, num_heads=num_heads, **kwargs)


def test_is_the_papers_equations():
    """Appendix B from the first equation to the last: three projections, both branches, batch norm, fusion."""
    module = make(dim=6, dim_out=8, dim_key=4, feat_size=(4, 3), dtype=torch.float64).train()
    x = torch.randn(2, 6, 4, 3, dtype=torch.float64)
    queries, keys, values = module.qkv.weight.flatten(1).split((4, 4, 8))

    def project(weight):  # W_dnk X_xyd, then n heads
        return torch.einsum("bdxy,cd->bxyc", x, weight).unflatten(-1, (2, -1))

    def batch_norm(feature_map):  # of the statistics of this batch, each channel by itself
        mean = feature_map.mean(dim=(0, 2, 3), keepdim=True)
        variance = feature_map.var(dim=(0, 2, 3), unbiased=False, keepdim=True)
        return (feature_map - mean) / (variance + 1e-5).sqrt()

    expected = brute_global(
        project(queries), project(keys), project(values), module.rel_column, module.rel_row, batch_norm, None
    )
    assert_close(module(x), expected.flatten(3).permute(0, 3, 1, 2))


@pytest.mark.parametrize(("content", "column", "row"), TABLE_4)
def test_all_rows_of_table_4(backend, content, column, row):
    module = make(content=content, column=column, row=row)
    x = torch.randn(2, 16, 6, 5)
    out = module(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    assert module.qkv.out_channels == 16 * (3 if content else 2)
    assert (module.rel_column is None, module.rel_row is None) == (not column, not row)
    assert (module.norm is not None) == (column and row)
    # Column reaches pixels of the same column only, row of the same row only, both together and content all of them.
    module.eval()
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module(x)[0, :, 2, 3].sum(), x)
    seen = grad[0].abs().sum(0) > 0
    assert seen[2, 3]
    everything = content or (column and row)
    assert bool(seen[:, 3].all()) == (everything or column)
    assert bool(seen[2, :].all()) == (everything or row)
    assert bool(seen.all()) == everything


def test_other_sizes_of_channels():
    module = make(dim=12, dim_out=20, dim_key=8, num_heads=4)
    assert module.rel_column.shape == (11, 2)
    assert module.rel_row.shape == (9, 2)
    assert module(torch.randn(1, 12, 6, 5)).shape == (1, 20, 6, 5)


@pytest.mark.parametrize("size", [(6, 4), (5, 7), (1, 1)])
def test_stride_is_average_pooling_after_the_module(size):
    plain, strided = make(feat_size=(7, 7)).eval(), make(feat_size=(7, 7), stride=2).eval()
    strided.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, *size)
    out = strided(x)
    assert out.shape[-2:] == (-(-size[0] // 2), -(-size[1] // 2))  # as a strided convolution rounds
    # The last window of an odd size is cut by the border: repeating the border gives it its average.
    padded = F.pad(plain(x), (0, size[1] % 2, 0, size[0] % 2), mode="replicate")
    assert_close(out, F.avg_pool2d(padded, 2))


def test_reach_bounds_what_is_seen():
    module = make(feat_size=(9, 9), content=False, reach=2).eval()
    assert module.rel_column.shape[0] == 5
    x = torch.randn(1, 16, 9, 9, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x)[0, :, 4, 4].sum(), x)
    seen = grad[0].abs().sum(0) > 0
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[2:7, 2:7] = True
    assert torch.equal(seen, expected)


def test_with_a_reach_any_size_works():
    module = GlobalSelfAttention(16, reach=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in ((2, 9), (20, 4)):
            assert module(torch.randn(2, 16, *size)).shape == (2, 16, *size)


def test_initialisation_starts_with_branches_alike():
    """Behind batch norm and ReLU: a sum over a line is as large as one q v, and content about as large as position."""
    for dim, size in ((64, (56, 40)), (128, (14, 14))):
        module = GlobalSelfAttention(dim, feat_size=size, num_heads=8)
        x = torch.randn(4, *size, dim).relu()
        projected = F.linear(x, module.qkv.weight.flatten(1))
        q, k, v = projected.unflatten(-1, (24, -1)).chunk(3, dim=3)
        product = (q.square().mean() * v.square().mean()).item()
        for rel, axis in ((module.rel_column, "column"), (module.rel_row, "row")):
            out = functional.positional_attention(q, v, rel, axis)
            assert out.square().mean().item() == pytest.approx(product, rel=0.3)
        positional = functional.global_self_attention(q, None, v, module.rel_column, module.rel_row, module.norm)
        content = functional.content_attention(q, k, v)
        assert 0.5 < (content.std() / positional.std()).item() < 2


def test_smaller_map_uses_the_middle_of_the_table():
    large, small = make(feat_size=(9, 8)).eval(), make(feat_size=(5, 4)).eval()
    state = large.state_dict()
    state["rel_column"], state["rel_row"] = state["rel_column"][4:-4], state["rel_row"][4:-4]
    small.load_state_dict(state)
    x = torch.randn(2, 16, 5, 4)
    assert torch.equal(large(x), small(x))


def test_larger_map_must_be_allowed():
    module = make(feat_size=(4, 4))
    with pytest.raises(ValueError, match=r"a map of 4x6 is larger than the 4x4.*resize_tables\(\(4, 6\)\).*keep_reach"):
        module(torch.randn(1, 16, 4, 6))
    make(feat_size=(4, 4), row=False)(torch.randn(1, 16, 4, 6))  # no table along the row: nothing to refuse
    GlobalSelfAttention(16, column=False, row=False)(torch.randn(1, 16, 4, 6))


def test_keeping_the_reach_says_so_once(monkeypatch):
    monkeypatch.setattr(relative, "_mentioned", False)
    module = make(feat_size=(4, 4), keep_reach=True).eval()
    same = make(feat_size=(9, 9), reach=3).eval()
    same.load_state_dict(module.state_dict())
    x = torch.randn(1, 16, 9, 9)
    with pytest.warns(UserWarning, match="larger than the 4x4.*beyond the trained reach"):
        out = module(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)
    assert torch.equal(out, same(x))


def test_resized_tables():
    module = make(feat_size=(4, 4)).eval()
    before = module.rel_column.detach().clone()
    module.resize_tables((7, 4))
    assert module.rel_column.shape == (13, 8)
    assert module.rel_row.shape == (7, 8)
    assert module.rel_column.requires_grad
    scale = 4 / 7  # seven pixels are summed where four were
    assert_close(module.rel_column[[0, 6, 12]], before[[0, 3, 6]] * scale)  # ends and middle stay where they are
    assert_close(module.rel_column[::2], before * scale)
    module(torch.randn(1, 16, 7, 4))
    module.resize_tables((4, 4))
    assert module.rel_column.shape == (7, 8)
    assert_close(module.rel_column[1::2], before[2:5] * scale)  # the middle of the longer table


def test_a_smooth_scene_at_twice_the_resolution_gives_the_same_output():
    """What resizing is for: columns of a constant scene, twice as many pixels, the same sums."""
    module = make(dim=8, feat_size=(8, 8), content=False, row=False).double().eval()
    with torch.no_grad():
        module.rel_column.copy_(1 - torch.linspace(-1, 1, 15, dtype=torch.float64).abs()[:, None].expand(15, 4))
    x = torch.randn(1, 8, 1, 1, dtype=torch.float64)
    small = module(x.expand(1, 8, 8, 8))[0, :, 4, 4]
    module.resize_tables((16, 16))
    large = module(x.expand(1, 8, 16, 16))[0, :, 8, 8]
    assert_close(large, small, rtol=0.03, atol=0)


class Trace(TorchDispatchMode):
    """Every operation with the storages it reads."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
        self.calls.append((func.overloadpacket.__name__, read))
        return out


@pytest.mark.parametrize("stride", [1, 2])
def test_channels_last_in_channels_last_out_without_a_copy(backend, stride):
    module = make(stride=stride).eval()
    x = torch.randn(2, 16, 6, 5).to(memory_format=torch.channels_last)
    with torch.no_grad(), Trace() as trace:
        out = module(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    source = x.untyped_storage().data_ptr()
    copies = {"clone", "copy_", "_to_copy", "contiguous", "_reshape_copy"}
    assert not [name for name, read in trace.calls if source in read and name in copies]
    # Contiguous maps give the same numbers.
    assert_close(module(x.contiguous()), out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_whole_module_in_other_precisions(device, dtype):
    module = make(dim=32, feat_size=(8, 8)).to(device, torch.float64).eval()
    x = torch.randn(2, 32, 8, 8, dtype=torch.float64, device=device)
    expected = module(x)
    assert relative_error(copy.deepcopy(module).to(dtype)(x.to(dtype)), expected) < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(backend, device, dtype):
    module = make(dim=32, feat_size=(8, 8)).to(device).train()
    x = torch.randn(2, 32, 8, 8, device=device, requires_grad=True)
    with torch.autocast(device, dtype=dtype):
        out = module(x)
    assert out.dtype == dtype
    assert relative_error(out, module(x)) < 3e-2
    out.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_is_one_graph_equal_to_eager_and_made_once(device, compiler):
    torch._dynamo.reset()
    module = make(stride=2).to(device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    for _ in range(2):
        x = torch.randn(2, 16, 6, 5, device=device, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = compiled(x)
            out.square().sum().backward()
        grad, x.grad = x.grad, None
        expected = reference(x)
        expected.square().sum().backward()
        assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert_close(grad, x.grad, rtol=1e-3, atol=1e-4)
        for (name, got), want in zip(module.named_parameters(), reference.parameters(), strict=True):
            assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_compile_follows_autocast_and_the_backend():
    torch._dynamo.reset()
    module = make().eval()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 16, 6, 5)
    assert compiled(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(compiled(x), module(x))
    with functional.use_backend("reference"):
        assert_close(compiled(x), module(x))


def test_export_with_dynamic_batch():
    module = make(stride=2).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, (torch.randn(2, 16, 6, 5),), dynamic_shapes={"x": {0: batch}})
    for size in (1, 5):
        x = torch.randn(size, 16, 6, 5)
        assert_close(program.module()(x), module(x))


def test_deep_copy_pickle_and_safetensors(tmp_path):
    module = make(reach=2).eval()
    x = torch.randn(1, 16, 6, 5)
    expected = module(x)
    save_file(module.state_dict(), tmp_path / "module.safetensors")
    fresh = make(reach=2).eval()
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(load_file(tmp_path / "module.safetensors"))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), fresh):
        assert torch.equal(twin(x), expected)


def test_drops_into_a_byobnet_of_the_users_own():
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    cfg = ByoModelCfg(
        blocks=(ByoBlockCfg("bottle", d=1, c=32, s=2), ByoBlockCfg("self_attn", d=2, c=64, s=2, br=0.5)),
        stem_chs=16,
        self_attn_layer=GlobalSelfAttention,
        self_attn_kwargs={"num_heads": 4},
        fixed_input_size=True,
    )
    network = ByobNet(cfg, num_classes=7, img_size=64)
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert sum(isinstance(m, GlobalSelfAttention) for m in network.modules()) == 2


class LowRank(nn.Module):
    """A layer with an update of low rank beside it, as fine-tuning puts them into networks."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Conv2d(layer.in_channels, 2, 1, bias=False)
        self.up = nn.Conv2d(2, layer.out_channels, 1, bias=False)

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("options", [{}, {"content": False, "stride": 2}, {"row": False, "reach": 2}], ids=str)
def test_another_projection_is_called(options):
    module, x = make(**options).double().eval(), torch.randn(2, 16, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        plain = module(x)
        seen = []
        handle = module.qkv.register_forward_hook(lambda layer, inputs, output: seen.append(output))
        assert_close(module(x), plain)
        handle.remove()
    assert len(seen) == 1
    module.qkv = LowRank(module.qkv).double()
    module(x).square().sum().backward()
    assert module.qkv.up.weight.grad.abs().sum() > 0
    merged = make(**options).double().eval()
    state = {name: tensor for name, tensor in module.state_dict().items() if "qkv" not in name}
    low_rank = torch.einsum("or...,ri...->oi...", module.qkv.up.weight, module.qkv.down.weight)
    merged.load_state_dict({**state, "qkv.weight": module.qkv.weight + low_rank})
    assert_close(module(x), merged(x))
    network = nn.Sequential(module, nn.BatchNorm2d(16)).double().eval()
    assert_close(gsanet.fuse_for_inference(network)(x), network(x))


def test_pruning_goes_on_while_it_trains():
    module, x = make(), torch.randn(2, 16, 6, 5)
    prune.l1_unstructured(module.qkv, "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        before = module.qkv.weight_orig.detach().clone()
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (module.qkv.weight == 0).float().mean() == pytest.approx(0.5, abs=0.01)
        assert not torch.equal(module.qkv.weight_orig, before)


def test_other_normalisations():
    assert isinstance(make(norm_layer=nn.InstanceNorm2d).norm, nn.InstanceNorm2d)
    assert make(norm_layer=nn.InstanceNorm2d)(torch.randn(2, 16, 6, 5)).shape == (2, 16, 6, 5)


def test_whole_numbers_of_numpy_become_pythons():
    numbers = {"dim": 16, "dim_out": 8, "stride": 2, "num_heads": 2, "dim_key": 4, "reach": 3, "feat_size": 6}
    module = make(**{name: np.int64(number) for name, number in numbers.items()})
    assert {name: getattr(module, name) for name in numbers} == {**numbers, "feat_size": (6, 6)}
    assert {type(getattr(module, name)) for name in numbers} == {int, tuple}
    assert {type(length) for length in module.feat_size} == {int}
    module.resize_tables((np.int64(9), np.int64(8)))
    assert repr(module) == repr(make(**{**numbers, "feat_size": (9, 8)}))
    assert module(torch.randn(1, 16, 9, 8)).shape == (1, 8, 5, 4)


def test_repr_tells_what_it_is():
    assert "content+column, feat_size=(6, 5), reach=2" in repr(make(row=False, reach=2))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make(dim=15), ValueError, "dim_out must be divisible by the number of heads, got 15 for 2 heads"),
        (lambda: make(dim_key=7), ValueError, "dim_key must be divisible by the number of heads, got 7"),
        (lambda: make(num_heads=0), ValueError, "num_heads must be 1 or more, got 0"),
        (lambda: make(dim=-8), ValueError, "dim must be 1 or more, got -8"),
        (lambda: make(content=False, column=False, row=False), ValueError, "needs at least one"),
        (lambda: make(reach=-1), ValueError, "reach must be 0 or more.*got -1"),
        (lambda: make(stride=0), ValueError, "stride must be 1 or more, got 0"),
        (lambda: make(stride=1.5), TypeError, r"stride must be a whole number, got 1\.5"),
        (lambda: make(stride=True), TypeError, "stride must be a whole number, got True"),
        (lambda: make(dim="16"), TypeError, "dim must be a whole number, got '16'"),
        (lambda: make().resize_tables(None), ValueError, "feat_size is None: tables are resized to"),
        (lambda: make()(torch.randn(2, 16, 0, 5)), ValueError, r"at least one pixel, got \(2, 16, 0, 5\)"),
        (lambda: make()(torch.randn(2, 16, 6, 5).double()), TypeError, "same dtype, got x torch.float64, weight"),
        (lambda: make(feat_size=None), ValueError, "feat_size is None.*or a reach"),
        (lambda: make(feat_size=(4, 0)), ValueError, r"positive whole numbers.*got \(4, 0\)"),
        (lambda: make(feat_size=(4, 4.0)), ValueError, r"positive whole numbers.*got \(4, 4\.0\)"),
        (lambda: make(feat_size=(4, 4, 4)), ValueError, r"one or two positive.*got \(4, 4, 4\)"),
        (lambda: make()(torch.randn(16, 6, 5)), ValueError, r"\(batch, 16, height, width\), got \(16, 6, 5\)"),
        (lambda: make()(torch.randn(1, 8, 6, 5)), ValueError, "must have 16 channels, got 8"),
        (
            lambda: make()(torch.randn(1, 6, 5, 16)),
            ValueError,
            r"got 6 in .*: they come second, x\.permute",
        ),
        (lambda: make()(torch.ones(1, 16, 6, 5, dtype=torch.uint8)), TypeError, r"floating-point .*got torch\.uint8"),
        (lambda: make()([1.0]), TypeError, "must be a tensor, got list"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
