"""Where attention joins the ResNets that keep their convolutions, and clips; the rest is in test_networks.py."""

import copy
import itertools
import json

import pytest
import timm
import torch
from helpers import losses_on_one_batch
from torch.testing import assert_close

import gsanet
from gsanet.layers import (
    CompactNonLocal,
    CrissCrossAttention,
    DETRTransformer,
    DoubleAttention,
    EfficientAttention,
    NonLocal,
    VideoTransformer,
)
from gsanet.layers.attention import Attention, Combination
from gsanet.models.cost import stage_costs
from gsanet.models.inserted_resnet import NETWORKS, InsertedSettings

SMALL = {"num_classes": 10, "depths": (1, 1, 1, 1)}
AT_THE_END = {
    "ccnet_resnet50": CrissCrossAttention,
    "detr_resnet50": DETRTransformer,
    "videobert_resnet50": VideoTransformer,
}
# The papers' residual groups are counted from res2: group 1 here.
PLACES = {
    "nonlocal_resnet50": (NonLocal, {1: [2, 5], 2: [2, 5, 8]}),
    "a2_resnet50": (DoubleAttention, {1: [2, 5], 2: [2, 5, 8]}),
    "cgnl_resnet50": (CompactNonLocal, {2: [5]}),
    "ea_resnet50": (EfficientAttention, {0: [3], 1: [4]}),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_between_residual_blocks(name):
    kind, places = PLACES[name]
    model = timm.create_model(name)
    found = {
        group: inserted
        for group, stage in enumerate(model.stages)
        if (inserted := [number for number, block in enumerate(stage) if isinstance(block, kind)])
    }
    assert found == places
    assert sum(isinstance(module, Attention) for module in model.modules()) == sum(map(len, places.values()))
    assert kind.properties.combination is Combination.INSERTED


@pytest.mark.parametrize("name", AT_THE_END)
def test_places_at_the_end(name):
    model = timm.create_model(name, **SMALL)
    kind = AT_THE_END[name]
    assert [type(module) for module in model.modules() if isinstance(module, Attention)] == [kind]
    assert not any(isinstance(module, Attention) for module in model.stages.modules())
    assert kind.properties.combination is Combination.AT_THE_END


@pytest.mark.parametrize("name", PLACES)
def test_starts_as_the_plain_resnet(name):
    """A pretrained ResNet keeps its output when blocks that start as the identity are inserted."""
    model = timm.create_model(name, num_classes=10).eval()
    plain = timm.create_model("conv_resnet50", num_classes=10).eval()
    weights = [v for k, v in model.state_dict().items() if not isinstance(attention_of(model, k), Attention)]
    plain.load_state_dict(dict(zip(plain.state_dict(), weights, strict=True)))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert_close(model(x), plain(x))


def attention_of(model, key):
    """The block that a key of the state belongs to."""
    return model.get_submodule(".".join(key.split(".")[:3])) if key.startswith("stages") else None


def test_places_are_open():
    model = timm.create_model("cgnl_resnet50", depths=(1, 2, 1), after={2: (1, 2)}, num_groups=4, num_classes=10)
    assert [type(block).__name__ for block in model.stages[1]] == [
        "CompiledBottleneckBlock",
        "CompactNonLocal",
        "CompiledBottleneckBlock",
        "CompactNonLocal",
    ]
    assert model.stages[1][1].num_groups == 4
    at_the_end = timm.create_model("nonlocal_resnet50", depths=(1, 1), after={}, num_classes=10)
    assert isinstance(at_the_end.final_conv, NonLocal)
    assert at_the_end(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_two_readings_of_efficient_attention_give_the_printed_figures():
    """All arrangements of equal modules: which print 26.2 M parameters and 9.9 G operations?"""
    plain = gsanet.create_model("conv_resnet50")
    params, flops = gsanet.count_parameters(plain), gsanet.count_flops(plain)
    maps = [(256, 56**2), (512, 28**2), (1024, 14**2), (2048, 7**2)]
    found = []
    for fraction, heads in itertools.product([1, 2, 4, 8], [1, 2, 4, 8, 16]):
        extra = []
        for channels, pixels in maps:
            inner = channels // fraction
            weights = 4 * channels * inner
            extra.append((weights + 3 * inner + channels, 2 * pixels * (weights + 2 * inner**2 // heads)))
        for numbers in itertools.product(*(range(depth + 1) for depth in (3, 4, 6, 3))):
            p = params + sum(n * e[0] for n, e in zip(numbers, extra, strict=True))
            f = flops + sum(n * e[1] for n, e in zip(numbers, extra, strict=True))
            if (round(p / 1e6, 1), round(f / 1e9, 1)) == (26.2, 9.9):
                found.append((fraction, heads, numbers, p, f))
    assert {(fraction, numbers) for fraction, _, numbers, *_ in found} == {(2, (1, 1, 0, 0)), (4, (2, 2, 0, 0))}
    model = gsanet.create_model("ea_resnet50")
    assert (2, 8, (1, 1, 0, 0), gsanet.count_parameters(model), gsanet.count_flops(model)) in found


@pytest.mark.parametrize("name", NETWORKS)
def test_costs_by_stage_add_up(name):
    model = gsanet.create_model(name)
    stages = stage_costs(model)
    assert sum(stage.params for stage in stages) == gsanet.count_parameters(model)
    assert sum(stage.flops for stage in stages) == gsanet.count_flops(model)
    assert [stage.blocks for stage in stages if stage.name.startswith("stages")] == [3, 4, 6, 3]
    labels = {module.label for module in model.modules() if isinstance(module, Attention)}
    assert labels <= {stage.operation for stage in stages}


def test_info(command):
    report = json.loads(command("info", "ccnet_resnet50", "--img-size", "160x96", "--json"))
    assert report["stages"][-2]["shape"] == [512, 5, 3]


@pytest.mark.parametrize("name", ["nonlocal_resnet50", "ccnet_resnet50", "detr_resnet50", "videobert_resnet50"])
def test_compile(name):
    torch._dynamo.reset()
    options = {"after": {2: (1,)}} if name == "nonlocal_resnet50" else {}
    model = timm.create_model(name, **SMALL, **options).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_drop_path_and_dropout_reach_the_network():
    model = timm.create_model("ea_resnet50", drop_path_rate=0.5, drop_rate=0.2, num_classes=10)
    assert max(m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath") == pytest.approx(0.5)
    clips = timm.create_model("videobert_resnet50", drop_rate=0.2, dropout=0.3, **SMALL)
    assert clips.head.drop.p == 0.2
    assert clips.head.transformer.dropout.p == 0.3


@pytest.fixture(scope="module")
def clips():
    torch.manual_seed(0)
    return timm.create_model("videobert_resnet50", zero_init_last=False, depth=2, **SMALL).eval()


def test_an_image_is_a_clip_of_one_frame(clips):
    x = torch.randn(2, 3, 48, 32)
    with torch.no_grad():
        assert_close(clips(x[:, None]), clips(x))


def test_clips(clips):
    x = torch.randn(2, 5, 3, 48, 32)
    with torch.no_grad():
        logits = clips(x)
        assert logits.shape == (2, 10)
        # Frames meet only in the transformer: each passes the ResNet by itself.
        vectors = torch.stack([clips.head.global_pool(clips.forward_features(frame)) for frame in x.unbind(1)], dim=1)
        assert_close(clips.head.fc(clips.head.transformer.encode(vectors)[:, 0]), logits)
        # The order of the frames matters, and clips do not see each other.
        assert not torch.allclose(clips(x.flip(1)), logits, atol=1e-6)
        assert_close(clips(x.flip(0)), logits.flip(0))
        final, intermediates = clips.forward_intermediates(x)
        assert final.shape == (10, 2048, 2, 1)
        assert len(intermediates) == 5
        assert clips.forward_head(final, pre_logits=True, frames=5).shape == (2, 512)


def test_clips_learn_through_all_frames(clips):
    x = torch.randn(2, 4, 3, 32, 32, requires_grad=True)
    model = copy.deepcopy(clips).train()
    model.set_grad_checkpointing()
    model(x).square().sum().backward()
    assert (x.grad.flatten(2).abs().sum(2) > 0).all()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_clip_head_can_be_reset(clips):
    model = copy.deepcopy(clips)
    x = torch.randn(2, 3, 3, 32, 32)
    with torch.no_grad():
        model.reset_classifier(7, "max")
        assert model(x).shape == (2, 7)
        model.reset_classifier(0)
        assert model(x).shape == (2, model.head_hidden_size)
        model.reset_classifier(0, "")
        assert model(x).shape == (6, 2048, 1, 1)
    assert timm.create_model("videobert_resnet50", **{**SMALL, "num_classes": 0})(x).shape == (2, 512)


def test_videoberts_own_size():
    """BERT-large: 24 layers of 1024 channels, 12 * 1024 ** 2 weights each."""
    with torch.device("meta"):
        transformer = VideoTransformer(2048, 1024, num_heads=16, depth=24)
    assert gsanet.count_parameters(transformer.encoder) == pytest.approx(24 * 12 * 1024**2, rel=2e-3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: timm.create_model("nonlocal_resnet50", depths=(1, 1, 1, 1)), r"group 2 has 1, got \(2, 4\)"),
        (lambda: timm.create_model("nonlocal_resnet50", after={5: (1,)}), "residual groups from 1 to 4, got 5"),
        (lambda: InsertedSettings(after={1: (0,)}), r"blocks that exist: group 1 has 3, got \(0,\)"),
        (
            lambda: timm.create_model("detr_resnet50", after={2: (1,)}),
            "DETRTransformer makes 256 channels of 512: it goes at the end",
        ),
        (lambda: timm.create_model("detr_resnet50", num_heads=3), "divisible by the number of heads, got 256 for 3"),
        (
            lambda: timm.create_model("videobert_resnet50", **SMALL)(torch.randn(3, 32, 32)),
            r"must be a clip \(batch, time, 3, height, width\) or an image .*, got \(3, 32, 32\)",
        ),
        (
            lambda: timm.create_model("videobert_resnet50", **SMALL)(torch.randn(1, 0, 3, 32, 32)),
            "a clip needs at least one frame",
        ),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_few_steps_learn(name):
    """One batch is learnt by heart: every part of the network takes part."""
    torch.manual_seed(1)
    options = {"after": {2: (1,)}} if name in PLACES else {"dim_out": 64}
    if name in ("detr_resnet50", "videobert_resnet50"):
        options |= {"depth": 2, "dropout": 0.0}
    model = timm.create_model(
        name, depths=(1, 1, 1), widths=(16, 32, 64), stem="3x3/1", num_classes=10, **options
    ).train()
    losses = losses_on_one_batch(model, 20)
    assert losses[-1] < 0.5 * losses[0]
