"""`torch.func` over the operation and the module: maps, weights or both in one batch more, and gradients of each."""

import pytest
import torch
from helpers import relative_error
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    replace_all_batch_norm_modules_,
    stack_module_state,
    vmap,
)

from gsanet import GlobalSelfAttention, create_model, functional, layers
from gsanet.functional import explain_backend, lean

ROUNDING = 1e-12


@pytest.fixture(params=["whole maps", "maps that are cut elsewhere"])
def size(request, monkeypatch):
    """Large maps are cut into pieces on a CPU; here small ones are large."""
    if request.param == "maps that are cut elsewhere":
        monkeypatch.setattr(lean, "LARGE_IMAGE", 1)
        monkeypatch.setattr(lean, "MANY_SCORES", 1)


def layer(**settings):
    return GlobalSelfAttention(8, feat_size=(5, 4), num_heads=2, dtype=torch.float64, **settings).eval()


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert relative_error(value, want[name]) < ROUNDING, name


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 1, None), (None, None, 0)])
@pytest.mark.parametrize("axis", ["column", "row"])
def test_positional_attention_over_any_of_its_tensors(size, axis, mapped):
    shapes = {"q": (3, 5, 4, 2, 4), "v": (3, 5, 4, 2, 3), "rel": (9, 4)}
    several = [torch.randn(3, *shape, dtype=torch.float64) for shape in shapes.values()]
    inputs = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(several, mapped, strict=True)]

    def attend(*tensors):
        return functional.positional_attention(*tensors, axis)

    expected = [attend(*(x[0 if dim is None else i] for x, dim in zip(several, mapped, strict=True))) for i in range(3)]
    assert relative_error(vmap(attend, in_dims=mapped)(*inputs), torch.stack(expected)) < ROUNDING


def test_module_over_a_batch_of_batches(size):
    module, x = layer(stride=2), torch.randn(3, 2, 8, 5, 4, dtype=torch.float64)
    assert relative_error(vmap(module)(x), torch.stack([module(one) for one in x])) < ROUNDING
    assert relative_error(vmap(vmap(module))(x[:, :, None]), vmap(module)(x)[:, :, None]) < ROUNDING


def test_gradients_image_by_image(size):
    module, x = layer(), torch.randn(3, 8, 5, 4, dtype=torch.float64)

    def loss(parameters, image):
        return functional_call(module, parameters, (image[None],)).square().sum()

    parameters = dict(module.named_parameters())
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        assert_same({name: value[i] for name, value in each.items()}, dict(zip(parameters, expected, strict=True)))


def test_several_modules_at_once(size):
    modules = [layer() for _ in range(3)]
    parameters, buffers = stack_module_state(modules)
    x = torch.randn(2, 8, 5, 4, dtype=torch.float64)

    def run(parameters, buffers):
        return functional_call(modules[0], (parameters, buffers), (x,))

    expected = torch.stack([module(x) for module in modules])
    assert relative_error(vmap(run)(parameters, buffers), expected) < ROUNDING


@pytest.mark.parametrize("differentiate", [jacrev, jacfwd])
def test_jacobian(size, differentiate):
    module, x = layer(), torch.randn(1, 8, 5, 4, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(module, x)
    assert relative_error(differentiate(module)(x), expected) < ROUNDING


def test_second_derivatives(size):
    module, x = layer(), torch.randn(1, 8, 2, 3, dtype=torch.float64)
    loss = lambda x: module(x).pow(3).sum()  # noqa: E731
    assert relative_error(hessian(loss)(x), torch.autograd.functional.hessian(loss, x)) < ROUNDING


def test_compiled():
    module, x = layer(), torch.randn(3, 2, 8, 5, 4, dtype=torch.float64)

    def each(x):
        return vmap(lambda batch: grad(lambda image: module(image).square().sum())(batch))(x)

    found = torch.compile(each, fullgraph=True, backend="eager")(x)
    assert relative_error(found, each(x)) < ROUNDING


def test_network_over_a_batch_of_batches():
    network = create_model("gsa_resnet26_tiny", depths=(1, 1, 1), width=0.25, img_size=16).eval()
    x = torch.randn(2, 1, 3, 16, 16)
    assert relative_error(vmap(network)(x), network(x.flatten(0, 1))[:, None]) < 1e-5


LOCAL = {
    "StandAloneAttention": {"window": 3},
    "LocalRelation": {"window": 3, "stride": 2},
    "PairwiseAttention": {"window": 3},
    "PatchwiseAttention": {"window": 3},
}


@pytest.fixture(params=LOCAL)
def local(request):
    """The modules that attend to a window, in evaluation mode."""
    return getattr(layers, request.param)(16, dtype=torch.float64, **LOCAL[request.param]).eval()


def test_local_attention_over_a_batch_of_batches(local):
    x = torch.randn(3, 2, 16, 5, 4, dtype=torch.float64)
    assert relative_error(vmap(local)(x), torch.stack([local(one) for one in x])) < ROUNDING


def test_local_attention_s_gradients_image_by_image(local):
    parameters, x = dict(local.named_parameters()), torch.randn(3, 16, 5, 4, dtype=torch.float64)

    def loss(parameters, image):
        return functional_call(local, parameters, (image[None],)).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, image in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, image), list(parameters.values()))
        assert_same({name: value[i] for name, value in each.items()}, dict(zip(parameters, expected, strict=True)))


@pytest.mark.parametrize("differentiate", [jacrev, jacfwd])
def test_local_attention_s_jacobian(local, differentiate):
    x = torch.randn(1, 16, 3, 3, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(local, x)
    assert relative_error(differentiate(local)(x), expected) < ROUNDING


@pytest.fixture(params=["module", "network"])
def training(request):
    """What has batch norms, in training, and an input of it."""
    if request.param == "module":
        return GlobalSelfAttention(8, feat_size=(5, 4), num_heads=2), torch.randn(2, 8, 5, 4)
    network = create_model("gsa_resnet26_tiny", depths=(1, 1), width=0.25, img_size=8)
    return network, torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("transform", [vmap, lambda call: grad(lambda x: call(x).sum())])
def test_batch_norms_in_training_are_refused_in_one_sentence(training, transform):
    module, x = training
    with pytest.raises(ValueError, match=r"^torch.func cannot follow batch norms in training.* eval\(\)") as complaint:
        transform(module)(x[:, None] if transform is vmap else x)
    assert "\n" not in str(complaint.value)


def test_what_the_sentence_says_works(training):
    module, x = training
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

    def loss(parameters, buffers, x):
        return functional_call(module, (parameters, buffers), (x,)).square().mean()

    expected = torch.autograd.grad(
        loss(parameters, {k: b.clone() for k, b in buffers.items()}, x), [*parameters.values()]
    )
    found = grad(loss)(parameters, {name: buffer.clone() for name, buffer in buffers.items()}, x)
    for value, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(value, wanted)
    replace_all_batch_norm_modules_(module)
    assert relative_error(vmap(module)(x[:, None]), torch.stack([module(one[None]) for one in x])) < 1e-4


def test_other_errors_of_a_transformed_network_stay_what_they_are():
    network = create_model("gsa_resnet26_tiny", depths=(1, 1), width=0.25, img_size=8).eval()
    network.stages.register_forward_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        vmap(network)(torch.randn(1, 2, 3, 8, 8))


def test_kernels_leave_transforms_to_pytorch():
    said = []

    def ask(x):
        said.append(explain_backend("content_attention", x, x, x))
        return x

    vmap(ask)(torch.randn(2, 1, 4, 4, 1, 8))
    assert said == [
        "torch: fused refuses: its operators take no part in torch.func's transforms; "
        "native refuses: its kernels take no part in torch.func's transforms"
    ]
