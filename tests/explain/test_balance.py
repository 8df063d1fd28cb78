"""What the branches of GSA modules do over many images."""

import json
import math

import pytest
import torch

import gsanet as package
from gsanet.explain import balance, gsa_modules

NAME = "stages.0.0.self_attn"


def network(**options):
    """Two modules, on maps of 16x12 and 8x6."""
    torch.manual_seed(0)
    settings = {"width": 0.125, "img_size": (16, 12), "depths": (1, 1), "num_classes": 3, **options}
    return package.create_model("gsa_resnet26_tiny", **settings).eval()


@pytest.fixture
def images():
    return torch.randn(11, 3, 16, 12, generator=torch.Generator().manual_seed(0))


def outputs(model, images, name):
    found = []
    hook = dict(model.named_modules())[name].register_forward_hook(lambda *args: found.append(args[2]))
    with torch.no_grad():
        model(images)
    hook.remove()
    return found[0]


def test_sizes_are_those_of_the_branches_alone(images):
    model = network()
    rows = balance(model, images)
    assert [row.module for row in rows] == list(gsa_modules(model))
    assert [row.size for row in rows] == [(16, 12), (16, 12)]  # the second pools behind its attention
    # The branches add up to the module's output, so that without one of them it is the other.
    module = gsa_modules(model)[NAME]
    both = outputs(model, images, NAME)
    with torch.no_grad():
        module.rel_row.zero_()
    content = outputs(model, images, NAME)
    assert rows[0].content == pytest.approx(content.square().mean().sqrt().item(), rel=1e-4)
    assert rows[0].positional == pytest.approx((both - content).square().mean().sqrt().item(), rel=1e-4)
    assert rows[0].ratio == pytest.approx(rows[0].content / rows[0].positional)


def test_how_many_pixels_keys_choose(images):
    model = network()
    module = gsa_modules(model)[NAME]
    keys = module.qkv.weight.data[module.dim_key : 2 * module.dim_key]
    assert 1 / 192 < balance(model, images)[0].seen < 1
    keys.zero_()
    assert balance(model, images)[0].seen == pytest.approx(1.0)
    keys.normal_().mul_(1e6)
    assert balance(model, images)[0].seen == pytest.approx(1 / 192, rel=0.2)


def test_how_far_position_looks(images):
    model = network()
    module = gsa_modules(model)[NAME]
    for table in (module.rel_column, module.rel_row):
        table.data.copy_(torch.randn(table.shape[1]).expand_as(table))
    flat = balance(model, images)[0]  # a flat line: (L² - 1) / (3 L), but queries weigh some pixels more
    assert (flat.column, flat.row) == pytest.approx((255 / 48, 143 / 36), rel=0.1)
    module.rel_column.data[:15].zero_()
    module.rel_column.data[16:].zero_()
    near = balance(model, images)[0]
    assert near.column == pytest.approx(0.0)
    assert near.row == flat.row
    module.reach = 1
    assert balance(model, images)[0].row < 2 / 3


@pytest.mark.parametrize(
    ("options", "off"),
    [
        ({"content": False}, ("content", "seen")),
        ({"row": False}, ("row",)),
        ({"column": False, "row": False}, ("positional", "column", "row")),
    ],
    ids=str,
)
def test_branches_that_are_off(options, off, images):
    row = balance(network(**options), images)[0]
    names = ("content", "positional", "seen", "column", "row")
    assert tuple(name for name in names if getattr(row, name) is None) == off
    assert (row.ratio is None) == ("content" in off or "positional" in off)


def test_batches_do_not_matter(images):
    model = network()
    one, many = balance(model, images[:1]), balance(model, images[:1].expand(11, -1, -1, -1))
    for few, all_ in zip(one, many, strict=True):
        assert few.seen == pytest.approx(all_.seen, rel=1e-5)
        assert few.content == pytest.approx(all_.content, rel=1e-4)


def test_what_is_refused(images):
    with pytest.raises(ValueError, match="no GSA modules"):
        balance(network(groups=()), images)
    with pytest.raises(ValueError, match="call eval"):
        balance(network().train(), images)
    with pytest.raises(ValueError, match="no images"):
        balance(network(), [])


def test_the_command(command, gsanet, digits_run, digit, tmp_path):
    run = digits_run / "gsa_resnet26_tiny"
    shown = command("balance", digit, "--run", run, "--device", "cpu")
    assert "1 image" in shown
    assert "stage 1, block 1" in shown
    rows = json.loads(command("balance", digit.parent, "--run", run, "--device", "cpu", "--most", "3", "--json"))
    assert len(rows) == 3
    assert all(math.isfinite(value) for row in rows for value in (row["ratio"], row["seen"], row["column"], row["row"]))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    code, shown, complaint = gsanet("balance", digit, broken, "--run", run, "--device", "cpu")
    assert code == 0
    assert "1 image" in shown
    assert "1 of 2 images could not be read" in complaint
    code, _, complaint = gsanet("balance", broken, "--run", run, "--device", "cpu")
    assert code == 2
    assert "broken.png" in complaint
    assert "no images to measure with" in complaint
