"""The examples run as they are, at sizes that change from image to image."""

import pytest
import torch

import gsanet

SMALL = {"width": 0.125, "depths": (1, 1, 1, 1)}
pytestmark = pytest.mark.filterwarnings("ignore:a map of .* is larger")  # what keep_reach=True mentions once


def test_retinanet(capsys):
    import retinanet

    retinanet.main()
    printed = capsys.readouterr().out
    assert "pyramid of 96x64: 256x12x8, 256x6x4, 256x3x2, 256x2x1, 256x1x1" in printed
    assert "losses: classification" in printed


def test_retinanet_trains_every_part_of_the_network():
    import retinanet

    # Residual branches that start at zero would give attention no gradient in the first step.
    model = retinanet.make_detector("gsa_resnet26", num_classes=3, size=64, zero_init_last=False, **SMALL)
    targets = [{"boxes": torch.tensor([[8.0, 8.0, 40.0, 50.0]]), "labels": torch.tensor([1])}]
    sum(model([torch.rand(3, 64, 64)], targets).values()).backward()
    without = [name for name, parameter in model.backbone.named_parameters() if parameter.grad is None]
    assert not without
    assert model.backbone.body.stages_0[0].self_attn.rel_row.grad.abs().sum() > 0


def test_segmentation(capsys):
    pytest.importorskip("segmentation_models_pytorch")
    import segmentation

    segmentation.main()
    assert "image (75, 100): logits (1, 3, 75, 100)" in capsys.readouterr().out


def test_detr(capsys):
    pytest.importorskip("transformers")
    import detr

    detr.main()
    assert "image (96, 70): logits (1, 5, 4), boxes (1, 5, 4)" in capsys.readouterr().out


def test_detr_computes_the_networks_own_maps(tmp_path):
    pytest.importorskip("transformers")
    import detr

    options = {"img_size": 64, "keep_reach": True, **SMALL}
    network = gsanet.create_model("gsa_resnet26", **options).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.bias)  # so that a ReLU left out shows
    gsanet.save_pretrained(network, tmp_path)
    small = {"d_model": 16, "num_queries": 2, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = detr.make_detector(tmp_path, **small, **heads).eval()
    images = torch.rand(2, 3, 80, 64)
    with torch.no_grad():
        found, expected = detr.find_network(model)(images)[-1], network.forward_features(images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_backbone_cost(capsys, monkeypatch):
    import backbone_cost

    monkeypatch.setattr("sys.argv", ["backbone_cost.py", "--size", "32x64", "--runs", "1"])
    backbone_cost.main()
    assert "| ResNet-50 | 23.51 |" in capsys.readouterr().out
