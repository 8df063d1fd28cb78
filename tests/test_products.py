"""The benchmark of products of few rows, `benchmarks/products.py`."""

from collections import Counter
from functools import partial

import products
import pytest
import torch

import gsanet
from gsanet.functional.fused import calls

KINDS = {"shortcut.conv": "shortcut", "conv1_1x1.conv": "first", "conv3_1x1.conv": "last", "self_attn": "projection"}


def test_products_are_those_of_the_network():
    """As many as there are, of all shapes."""
    model = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet50"))
    found = Counter()

    def count(kind, module, inputs, out):
        side = inputs[0].shape[2] if kind == "projection" else out.shape[2]
        found[side, module.weight.shape[1], module.weight.shape[0], kind] += 1

    for name, module in model.stages.named_modules():
        if (kind := KINDS.get(".".join(name.split(".")[2:]))) is not None:
            module.register_forward_hook(partial(count, kind))
    with torch.no_grad():
        model(torch.zeros(1, 3, 224, 224))
    assert found == {case[:4]: case.times for case in products.CASES}
    assert found.total() == 52


@pytest.mark.parametrize("kind", KINDS.values())
def test_both_ways_do_the_same(monkeypatch, kind):
    def product(x, weight, bias, residual, *, relu, stride, early_weight):
        seen.append(early_weight)
        out = x[:, :: stride[0], :: stride[1]].float() @ weight.float().T
        for added in (bias, residual):
            out = out if added is None else out + added.float()
        return (out.relu() if relu else out).bfloat16()

    seen = []
    monkeypatch.setattr(calls, "product", product)
    torch.manual_seed(0)
    both = products.Products(products.Case(4, 16, 32, kind, 1), 2, "cpu")
    one, other = both.by_others(both.x), both.by_kernel(both.x, early_weight=True)
    assert one.shape == (32, 32)
    assert products.difference(other, one) < 1e-2
    assert seen == [False] + [True] * (products.IN_A_ROW - 1)
    assert both.case.stride == (2 if kind == "shortcut" else 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_they_need_a_gpu(capsys):
    with pytest.raises(SystemExit):
        products.main([])
    assert "the kernel needs a GPU" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_are_compared_on_gpu(capsys):
    products.main(["--seconds", "0.001"])
    printed = capsys.readouterr().out
    assert printed.count("bits the same") == len(products.CASES)
    assert printed.count("the same bits") == 4
    assert "DIFFER" not in printed
    assert "OTHER BITS" not in printed
    products.main(["--seconds", "0.001", "--shapes", "49", "--cuts", "2"])
    assert capsys.readouterr().out.count(" us as planned") == 4
