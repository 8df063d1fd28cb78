"""Every network: what timm promises of a model, and what the paper says of this one."""

import copy
import math
import pickle
import warnings

import pytest
import timm
import torch
from helpers import losses_on_one_batch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import gsanet
from gsanet.functional import use_backend
from gsanet.layers import AttentionAugmentedConv, AxialAttention, PatchwiseAttention
from gsanet.models import fit_state_dict
from gsanet.models.gsa_resnet import ResNetSettings

NAMES = gsanet.list_models()
SMALL = {"num_classes": 10, "img_size": 64}
# One of each kind, for what is told by a few blocks.
SHALLOW = ("aa_resnet50", "lr_resnet50", "sasa_resnet50", "axial_deeplab_s", "san19_pairwise", "san19_patchwise")

# Counted with torch.utils.flop_counter when the networks were first made; the paper's figures are in tests/paper.
COUNTS = {
    "gsa_resnet26": (10_352_600, 4.619),
    "gsa_resnet38": (14_202_728, 5.895),
    "gsa_resnet50": (18_052_856, 7.170),
    "gsa_resnet101": (30_398_392, 12.179),
    "gsa_m_resnet50": (12_825_906, 6.052),
    "axial_resnet50": (18_052_856, 7.312),
    "conv_resnet26": (13_696_552, 4.685),
    "conv_resnet38": (19_626_792, 6.431),
    "conv_resnet50": (25_557_032, 8.178),
    "conv_resnet101": (44_549_160, 15.603),
    "aa_resnet50": (25_777_392, 8.360),
    "aa_resnet101": (45_354_728, 16.277),
    "lr_resnet50": (23_401_152, 8.620),
    "lr_resnet101": (40_834_618, 15.580),
    "sasa_resnet50": (18_008_072, 7.180),
    "axial_deeplab_s": (11_586_216, 5.686),
    "san19_pairwise": (17_574_608, 7.272),
    "san19_patchwise": (20_497_438, 6.260),
    "nonlocal_resnet50": (32_907_304, 13.784),
    "a2_resnet50": (32_911_400, 13.316),
    "cgnl_resnet50": (27_197_480, 8.821),
    "ea_resnet50": (26_214_312, 9.874),  # Table 3: 26.2 M, 9.9 G
    "ccnet_resnet50": (47_945_384, 10.553),
    "detr_resnet50": (32_180_008, 9.012),
    "videobert_resnet50": (37_943_336, 8.228),
}


def create(name, **kwargs):
    return timm.create_model(name, **{**SMALL, **kwargs})


def narrow(name, **kwargs):
    """A network of few channels, where a name allows it: for what does not depend on their number."""
    return create(name, **({} if name.startswith("san") else {"width": 0.25}), **kwargs)


def shallow(name, *depths, **kwargs):
    """A network of few blocks; attention-augmented convolutions start in the second group."""
    groups = {"groups": tuple(range(2, len(depths) + 1))} if name.startswith("aa_") else {}
    return create(name, **{"depths": depths, **groups, **kwargs})


@pytest.mark.parametrize("name", NAMES)
def test_forward_backward_and_every_gradient(name):
    # The last norm of a block starts at zero and hides the block from the gradient: not here.
    model = create(name, zero_init_last=False).train()
    out = model(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 10)
    torch.nn.functional.cross_entropy(out, torch.tensor([1, 7])).backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not without


@pytest.mark.parametrize("name", NAMES)
def test_other_inputs_and_heads(name):
    model = narrow(name, img_size=(160, 96), in_chans=1).eval()
    x = torch.randn(1, 1, 160, 96)
    with torch.no_grad():
        assert model(x).shape == (1, 10)
        model.reset_classifier(5)
        assert model(x).shape == (1, 5)
        assert model.num_classes == 5
        model.reset_classifier(0)
        assert model(x).shape == (1, model.head_hidden_size)
        assert model(x[..., :64, :96]).shape == (1, model.head_hidden_size)  # smaller than it was made for


FEATURE_CLASSES = ("list", "dict", "hook", "getter", "fx")  # timm's ways to get at the maps of a network


@pytest.mark.parametrize("name", ["gsa_resnet50", "nonlocal_resnet50", "detr_resnet50", "videobert_resnet50", *SHALLOW])
def test_features_are_the_same_in_every_way(name):
    after = {"after": {1: (1,)}} if name == "nonlocal_resnet50" else {}
    options = {"img_size": 32, "width": 0.25, **after} if not name.startswith("san") else {"img_size": 32}
    expected, x = None, torch.randn(2, 3, 32, 32)
    for kind in FEATURE_CLASSES:
        torch.manual_seed(0)
        features = shallow(name, 1, 1, features_only=True, feature_cls=kind, **options).eval()
        with torch.no_grad():
            maps = features(x=x)
            fused = gsanet.fuse_for_inference(features)(x)
        for found in (maps, fused):
            found = list(found.values()) if isinstance(found, dict) else found
            expected = expected or found
            assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_features(name):
    features = narrow(name, features_only=True, img_size=(64, 96)).eval()
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        maps = features(x)
    channels, reductions = features.feature_info.channels(), features.feature_info.reduction()
    layouts = {"tiny": [1, 2, 4], "sasa": [4, 8, 16, 32], "san19": [1, 2, 4, 8, 16, 32]}
    assert reductions == next((layout for key, layout in layouts.items() if key in name), [2, 4, 8, 16, 32])
    for feature, channel, reduction in zip(maps, channels, reductions, strict=True):
        assert feature.shape == (1, channel, 64 // reduction, 96 // reduction)

    model = narrow(name, img_size=(64, 96)).eval()
    with torch.no_grad():
        final, intermediates = model.forward_intermediates(x)
        assert_close(final, model.forward_features(x))
    assert [tuple(i.shape) for i in intermediates] == [tuple(m.shape) for m in maps]
    assert_close(intermediates[-1], final)


# Few blocks are enough where there are many.
CHECKPOINTED = {
    "gsa_resnet26": {},
    "gsa_resnet26_tiny": {},
    "axial_resnet50": {"depths": (1, 2, 1)},
    "conv_resnet26": {},
    "nonlocal_resnet50": {"depths": (1, 1, 2), "after": {2: (1,), 3: (1, 2)}},
    "ccnet_resnet50": {"depths": (1, 1, 1)},
    "detr_resnet50": {"depths": (1, 1, 1), "depth": 2},
    "videobert_resnet50": {"depths": (1, 1, 1), "depth": 2},
    **{name: {"depths": (1, 2, 1)} for name in SHALLOW},
    "aa_resnet50": {"depths": (1, 2, 1), "groups": (2, 3)},
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(name):
    model = create(name, zero_init_last=False, img_size=32, **CHECKPOINTED[name]).train()
    x = torch.randn(2, 3, 32, 32)
    grads = []
    for enable in (False, True):
        twin = copy.deepcopy(model)
        twin.set_grad_checkpointing(enable)
        torch.manual_seed(0)  # for dropout
        twin(x).square().sum().backward()
        grads.append([p.grad for p in twin.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        assert_close(checkpointed, plain)


@pytest.mark.parametrize("name", ["gsa_resnet26", *SHALLOW])
def test_drop_path(name):
    model = create(name, depths=(1, 2, 1, 1), drop_path_rate=0.5, zero_init_last=False)
    rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.5)
    model.train()
    x = torch.randn(2, 3, 64, 64)
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    with torch.device("meta"):  # weights do not count
        model = gsanet.create_model(name)
    params, flops = COUNTS[name]
    assert gsanet.count_parameters(model) == params
    assert gsanet.count_flops(model) / 1e9 == pytest.approx(flops, abs=5e-4)


def test_tiny_is_compact_and_keeps_the_map_large():
    model = gsanet.create_model("gsa_resnet26_tiny")
    assert gsanet.count_parameters(model) <= 3_000_000
    assert model.num_classes == 100
    assert model.settings.map_sizes(32)[0] == (32, 32)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)


def test_flops_do_not_depend_on_the_backend():
    from torch.utils.flop_counter import FlopCounterMode

    model = create("gsa_resnet26").eval()
    counts = {gsanet.count_flops(model)}
    for backend in ("reference", "torch"):
        with use_backend(backend):
            counts.add(gsanet.count_flops(model))
            with torch.no_grad(), FlopCounterMode(display=False) as counter:  # as a user would count
                model(torch.randn(1, 3, 64, 64))
            counts.add(counter.get_total_flops())
    assert len(counts) == 1


def test_flops_follow_the_size():
    model = gsanet.create_model("conv_resnet26")
    assert gsanet.count_flops(model) == gsanet.count_flops(model, 224)
    assert gsanet.count_flops(model, (112, 224)) < gsanet.count_flops(model)


def test_twin_is_torchvisions_resnet():
    """The convolutional twin computes exactly what torchvision's ResNet-50 computes."""
    import torchvision

    ours, theirs = gsanet.create_model("conv_resnet50").eval(), torchvision.models.resnet50().eval()
    weights = [v for k, v in theirs.state_dict().items() if "downsample" not in k]
    shortcuts = [v for k, v in theirs.state_dict().items() if "downsample" in k]
    state = ours.state_dict()
    for key in state:
        state[key] = (shortcuts if ".shortcut." in key else weights).pop(0)
    ours.load_state_dict(state)
    assert not weights
    assert not shortcuts
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [(), (4,), (3, 4), (2, 3, 4), (1, 2, 3, 4)])
def test_groups_of_table_5(groups):
    model = create("gsa_resnet26", groups=groups)
    for number, stage in enumerate(model.stages, start=1):
        attends = any(isinstance(m, gsanet.GlobalSelfAttention) for m in stage.modules())
        kernels = {m.kernel_size for m in stage.modules() if isinstance(m, torch.nn.Conv2d)}
        assert attends == (number in groups)
        assert ((3, 3) in kernels) == (number not in groups)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_components_and_reach_reach_the_modules():
    model = create("gsa_resnet26", content=False, row=False, reach=2, num_heads=4)
    modules = [m for m in model.modules() if isinstance(m, gsanet.GlobalSelfAttention)]
    assert len(modules) == 8
    assert all(not m.content and m.rel_row is None and m.reach == 2 and m.num_heads == 4 for m in modules)


def test_pooling_follows_the_first_module_of_later_groups():
    model = create("gsa_resnet38", img_size=224)
    for number, stage in enumerate(model.stages):
        attention = [block.self_attn for block in stage]
        assert [m.stride for m in attention] == [2 if number else 1] + [1] * (len(attention) - 1)
        large = 56 // 2 ** max(number - 1, 0)
        assert attention[0].feat_size == (large, large)
        assert attention[-1].feat_size == (56 // 2**number, 56 // 2**number)


def test_axial_network_has_no_3x3_convolutions():
    model = create("axial_resnet50", depths=(1, 1, 1, 1))
    assert sum(isinstance(m, AxialAttention) for m in model.modules()) == 4
    positional = create("axial_resnet50", depths=(1, 1, 1, 1), content=False)
    assert not any(isinstance(m, AxialAttention) for m in positional.modules())
    assert all(not m.content for m in positional.modules() if isinstance(m, gsanet.GlobalSelfAttention))


@pytest.mark.parametrize(("stem", "first"), [("7x7/2+maxpool", 4), ("7x7/2", 2), ("3x3/1", 1)])
def test_stems(stem, first):
    model = create("gsa_resnet26", stem=stem, img_size=32).eval()
    x = torch.randn(1, 3, 32, 32)
    assert model.stem(x).shape == (1, 64, 32 // first, 32 // first)
    features = create("gsa_resnet26", stem=stem, img_size=32, features_only=True).eval()
    for feature, reduction in zip(features(x), features.feature_info.reduction(), strict=True):
        assert feature.shape[-1] == 32 // reduction


@pytest.mark.parametrize("stem", ["7x7/2+maxpool", "7x7/2", "3x3/1"])
@pytest.mark.parametrize("size", [(50, 37), (33, 64)])
def test_odd_sizes_have_exact_tables(stem, size):
    model = create("gsa_resnet26", stem=stem, img_size=size, depths=(1, 2, 1, 1)).eval()
    with torch.no_grad():
        for stage, wanted in zip(model.stages, model.settings.map_sizes(size), strict=False):
            assert stage[0].self_attn.feat_size == wanted
        assert model(torch.randn(1, 3, *size)).shape == (1, 10)
        with pytest.raises(ValueError, match="larger than"):
            model(torch.randn(1, 3, size[0] + 32, size[1]))


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("stem", ["7x7/2+maxpool", "3x3/1"])
def test_output_stride(stride, stem):
    stride = stride if stem != "3x3/1" else stride // 4
    model = create("gsa_resnet26", output_stride=stride, stem=stem).eval()
    assert model.forward_features(torch.randn(1, 3, 64, 64)).shape[-1] == 64 // stride


def test_depth_and_width():
    half = create("gsa_resnet50", width=0.5, depths=(1, 1, 2, 1))
    assert [len(stage) for stage in half.stages] == [1, 1, 2, 1]
    assert [stage[0].self_attn.dim for stage in half.stages] == [32, 64, 128, 256]
    three = create("gsa_resnet50", depths=(1, 1, 1), widths=(16, 32, 64), expansion=2, num_heads=4)
    assert three.num_features == 128


def test_another_input_size_after_creation():
    model = create("gsa_resnet26", depths=(1, 2, 1, 1)).eval()
    x = torch.randn(1, 3, 96, 80)
    with pytest.raises(ValueError, match="set_input_size"):
        model(x)
    fresh = create("gsa_resnet26", depths=(1, 2, 1, 1), img_size=(96, 80)).eval()
    fresh.load_state_dict(fit_state_dict(model.state_dict(), fresh))
    model.set_input_size((96, 80))
    assert model.img_size == (96, 80)
    if hasattr(timm.models, "get_model_input_config"):  # from version 1.0.31 on timm knows it too
        assert timm.models.get_model_input_config(model)["input_size"] == (3, 96, 80)
    with torch.no_grad():
        assert_close(fresh(x), model(x))


@pytest.mark.filterwarnings("ignore:a map of")
def test_keep_reach_accepts_larger_images():
    model = create("gsa_resnet26", depths=(1, 1, 1, 1), keep_reach=True).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 128, 96)).shape == (1, 10)


def test_round_trips(tmp_path):
    model = create("gsa_resnet26", groups=(3, 4)).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        fresh = create("gsa_resnet26", groups=(3, 4)).eval()
        fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
            assert torch.equal(twin(x), expected)
        again = create("gsa_resnet26", groups=(3, 4), checkpoint_path=str(tmp_path / "model.safetensors")).eval()
        assert torch.equal(again(x), expected)


def test_compile_and_export_a_network():
    torch._dynamo.reset()
    model = create("gsa_resnet26", depths=(1, 1, 1, 1), img_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x), model(x))
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(x)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        larger = torch.randn(3, 3, 32, 32)
        assert_close(program.module()(larger), model(larger))


def ways_in(name):
    """All ways to give images to a network of this kind."""
    few = {"windows": (3, 3)} if name.startswith("san") else {}
    model = shallow(name, 1, 1, img_size=32, **few).eval()
    return {
        "forward": model,
        "forward_features": model.forward_features,
        "forward_intermediates": model.forward_intermediates,
        "fused": gsanet.fuse_for_inference(model),
        **{
            f"features_only, {kind}": shallow(name, 1, 1, img_size=32, features_only=True, feature_cls=kind, **few)
            for kind in FEATURE_CLASSES
        },
    }


@pytest.mark.parametrize(
    "name", ["gsa_resnet50", "conv_resnet50", "san19_pairwise", "detr_resnet50", "videobert_resnet50"]
)
def test_input_that_is_no_batch_of_images(name):
    images = torch.randn(2, 3, 32, 32)
    wrong = {
        "a batch": (images[0], ValueError, r"\(batch, 3, height, width\), got \(3, 32, 32\)"),
        "dimensions": (images[None, None], ValueError, r"\(batch, 3, height, width\), got \(1, 1, 2, 3, 32, 32\)"),
        "channels": (images[:, :1], ValueError, r"3.* got .*\(2, 1, 32, 32\)"),
        "their order": (images.permute(0, 2, 3, 1), ValueError, r"3.* got .*\(2, 32, 32, 3\)"),
        "numbers": (images.to(torch.uint8), TypeError, r"floating-point numbers, got torch\.uint8: .* divided by 255"),
        "tensors": (images.numpy(), TypeError, "must be a tensor, got ndarray"),
        "precision": (
            images.double(),
            TypeError,
            r"is torch\.float64, the network torch\.float32: .* x\.to\(torch\.float32\)",
        ),
    }
    for way, call in ways_in(name).items():
        for what, (given, error, words) in wrong.items():
            for arguments, named in (((given,), {}), ((), {"x": given})):
                with pytest.raises(error, match=words) as caught:
                    call(*arguments, **named)
                assert "\n" not in str(caught.value), (way, what)


def test_traces_do_not_see_that_the_input_is_checked():
    model = shallow("conv_resnet50", 1, 1, img_size=32).eval()
    x = torch.randn(2, 3, 32, 32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        assert_close(torch.jit.trace(model, x)(x), model(x))
    traced = torch.fx.symbolic_trace(model)
    assert_close(traced(x), model(x))


@pytest.mark.parametrize("name", SHALLOW)
def test_compile_shallow(name):
    torch._dynamo.reset()
    few = {"windows": (3, 3)} if name.startswith("san") else {}
    model = shallow(name, 1, 1, img_size=32, **few).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


@pytest.mark.parametrize("name", SHALLOW)
def test_odd_sizes_and_another_after_creation(name):
    model = shallow(name, 1, 1, 1, img_size=(50, 37)).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 50, 37)).shape == (1, 10)
        model.set_input_size((96, 81))
        assert model.img_size == (96, 81)
        assert model(torch.randn(1, 3, 96, 81)).shape == (1, 10)
        fresh = shallow(name, 1, 1, 1, img_size=(64, 48)).eval()
        fresh.load_state_dict(fit_state_dict(model.state_dict(), fresh))
        assert fresh(torch.randn(1, 3, 64, 48)).shape == (1, 10)


@pytest.mark.parametrize("name", SHALLOW)
def test_shallow_output_stride(name):
    model = create(name, depths=(1, 1, 1, 1), output_stride=8).eval()
    with torch.no_grad():
        assert model.forward_features(torch.randn(1, 3, 64, 64)).shape[-1] == 8


@pytest.mark.parametrize("name", SHALLOW)
def test_other_systems_learn(name):
    """A few steps on one batch bring its loss down."""
    model = shallow(name, 1, 1, img_size=32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_where_attention_stands():
    """The layouts of the systems' own papers."""
    aa = create("aa_resnet50", img_size=224)
    modules = [[m for m in stage.modules() if isinstance(m, AttentionAugmentedConv)] for stage in aa.stages]
    assert [len(group) for group in modules] == [0, 4, 6, 3]
    assert [{m.downsample for m in group} for group in modules[1:]] == [{2}, {1}, {1}]
    assert {len(m.rel_column) for m in modules[1]} == {27}  # a map of 14x14
    san19 = create("san19_patchwise")
    windows = [{m.window for m in stage.modules() if isinstance(m, PatchwiseAttention)} for stage in san19.stages]
    assert windows == [{3}, {7}, {7}, {7}, {7}]
    for name in ("lr_resnet50", "sasa_resnet50", "axial_deeplab_s", "san19_pairwise"):
        kernels = {m.kernel_size for m in create(name).modules() if isinstance(m, torch.nn.Conv2d)}
        assert kernels <= {(1, 1), (7, 7)}, name  # (7, 7): the stem of Axial-DeepLab
        assert ((7, 7) in kernels) == (name == "axial_deeplab_s")


def test_no_second_norm_behind_normalised_attention():
    block = create("axial_deeplab_s", depths=(1, 1)).stages[0][0]
    assert isinstance(block.post_attn, torch.nn.ReLU)
    assert not isinstance(create("lr_resnet50", depths=(1, 1)).stages[0][0].post_attn, torch.nn.ReLU)


def test_options_of_other_modules():
    model = shallow("aa_resnet50", 1, 1, 1, num_heads=4, value_ratio=0.25, downsample=1)
    modules = [m for m in model.modules() if isinstance(m, AttentionAugmentedConv)]
    assert [(m.num_heads, m.downsample, m.dim_value) for m in modules] == [(4, 1, 32), (4, 1, 64)]
    model = create("san19_pairwise", depths=(1, 1), widths=(32, 64), windows=(3, 5))
    assert model.num_features == 64
    with pytest.raises(ValueError, match=r"multiples of 32, got \(40, 64\)"):
        create("san19_pairwise", depths=(1, 1), widths=(40, 64))


def test_flops_of_conv_stem():
    """Stand-alone self-attention with a convolutional stem."""
    model = gsanet.create_model("sasa_resnet50", stem="7x7/2+maxpool")
    assert gsanet.count_flops(model) / 1e9 == pytest.approx(6.966, abs=5e-4)


def test_one_step_learns():
    """A few steps on one batch bring its loss down: the whole network is connected."""
    torch.manual_seed(1)
    model = create("gsa_resnet26_tiny", img_size=16, depths=(1, 1, 1)).train()
    losses = losses_on_one_batch(model, 15)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gsanet.create_model("gsa_resnet5"), "unknown model 'gsa_resnet5': did you mean 'gsa_resnet50'"),
        (lambda: gsanet.create_model("gsaresnet38"), "did you mean 'gsa_resnet38'"),
        (lambda: gsanet.create_model("zzz"), "unknown model 'zzz': one of .*axial_resnet50"),
        (lambda: gsanet.create_model("gsa_resnet50", stem="5x5"), "stem must be one of .* got '5x5'"),
        (lambda: gsanet.create_model("gsa_resnet50", groups=(0, 5)), r"groups must be among 1 to 4, got \(0, 5\)"),
        (lambda: gsanet.create_model("gsa_resnet50", depths=()), r"depths must be 2 to 4 numbers of blocks, got \(\)"),
        (lambda: gsanet.create_model("conv_resnet50", depths=(3,)), r"depths must be 2 to 4 .* got \(3,\)"),
        (lambda: gsanet.create_model("san19_pairwise", depths=(3,)), r"depths must be 2 to 5 .* got \(3,\)"),
        (lambda: gsanet.create_model("gsa_resnet50", groups=2), r"several numbers, such as \(2, 3, 4\), got 2"),
        (lambda: gsanet.create_model("gsa_resnet50", expansion=0), "expansion must be 1 or more, got 0"),
        (lambda: gsanet.create_model("gsa_resnet50", width=0), "width must be a positive factor, got 0"),
        (lambda: ResNetSettings(widths=(60, 64), depths=(1, 1)), r"multiples of 8, got \(60, 64\)"),
        (lambda: gsanet.create_model("gsa_resnet50", num_heads=3), "divisible by the number of heads, got 64 for 3"),
        (lambda: gsanet.create_model("gsa_resnet50", in_chans=0), "in_chans must be 1 or more, got 0"),
        (
            lambda: gsanet.create_model("gsa_resnet50", num_classes=-1),
            "num_classes must be 0, for no classifier",
        ),
        (lambda: gsanet.create_model("gsa_resnet50", drop_path_rate=1.5), "drop_path_rate must be .* below 1, got 1.5"),
        (lambda: gsanet.create_model("san19_pairwise", drop_rate=-0.1), "drop_rate must be a share .* got -0.1"),
        (lambda: gsanet.create_model("gsa_resnet50", img_size="224"), "img_size must be one or two .* got '224'"),
        (lambda: gsanet.create_model("gsa_resnet50", img_size=0), "img_size must be one or two positive.* got 0"),
        (lambda: gsanet.create_model("san19_pairwise", img_size=(8, 8, 8)), r"img_size must be .* got \(8, 8, 8\)"),
        (
            lambda: gsanet.create_model("gsa_resnet50", content=False, column=False, row=False),
            "all False: a GSA module needs",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_unknown_option():
    with pytest.raises(TypeError, match="unknown option 'conten' of a network: did you mean 'content'"):
        gsanet.create_model("gsa_resnet50", conten=False)
    with pytest.raises(TypeError, match="unknown option 'row' of a network"):  # the axial module has no such choice
        gsanet.create_model("axial_resnet50", row=False)


def test_listing():
    assert set(COUNTS) < set(NAMES)
    assert gsanet.list_models("gsa_m*") == ["gsa_m_resnet50"]
    assert set(NAMES) <= set(timm.list_models())
    assert gsanet.list_models(pretrained=True) == ["gsa_resnet35_tiny"]


def test_names_do_not_shadow_timms():
    """Registering printed no warning of a name that timm had already."""
    import subprocess
    import sys

    code = "import warnings; warnings.simplefilter('error'); import gsanet"
    assert subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=False).returncode == 0


def test_convolutions_can_start_as_pytorch_does():
    torch.manual_seed(0)
    he, pytorch = (create("gsa_resnet26", conv_init=init) for init in ("he", "pytorch"))
    for name, other in pytorch.named_parameters():
        one, (count, *rest) = he.get_parameter(name), other.shape
        if "conv" in name and other.dim() == 4:
            fan_in = other[0].numel()
            assert other.abs().max() <= fan_in**-0.5  # uniform, not normal
            if other.numel() > 4096:
                assert other.var().item() == pytest.approx(1 / (3 * fan_in), rel=0.1)
                assert one.var().item() == pytest.approx(2 / (count * math.prod(rest[1:])), rel=0.1)
        elif "self_attn" in name and other.numel() > 4096:  # the module's own
            assert other.std().item() == pytest.approx(one.std().item(), rel=0.1)
    with pytest.raises(ValueError, match="conv_init must be he or pytorch, got 'xavier'"):
        create("gsa_resnet26", conv_init="xavier")


@pytest.mark.parametrize("stem", ["7x7/2+maxpool", "7x7/2", "3x3/1", "attention/4", "relation/2+maxpool"])
def test_the_first_convolution_is_that_of_the_stem(stem):
    """timm adapts its weights to images of other channels."""
    model = gsanet.create_model("gsa_resnet26", stem=stem, img_size=64)
    first = model.get_submodule(model.pretrained_cfg["first_conv"])
    assert isinstance(first, nn.Conv2d)
    assert first.in_channels == 3
    assert first is next(module for module in model.modules() if isinstance(module, nn.Conv2d))
