"""A GSA network as the backbone of transformers' DETR, for images of changing sizes.

transformers makes timm networks by name and hands no options on, so the options and weights of ours are put where timm
looks for both, a folder or a repository on the Hub: `gsanet.save_pretrained(model, FOLDER)` writes one, and
`gsanet publish` that of a run. The backbone is then `local-dir:FOLDER` or `hf-hub:USER/NAME`; a plain `gsa_resnet50`
works as well, for images up to 224x224. `import gsanet` has to come first.

Two things to know:

- DETR freezes batch norms, and its own way of doing so leaves out the ReLU that timm's norms include: with
  `freeze_batch_norm_2d=True` timm freezes them first, rightly, and DETR finds none. The tests compare the maps.
- DETR pads the images of a batch to the largest and changes size with every batch: `keep_reach=True` takes each as it
  is, where resizing the tables of relative positions for every batch would change what the optimizer trains.

Run it: pip install 'gsanet[examples]' && python examples/detr.py
"""

import tempfile
from pathlib import Path

import timm
import torch
from timm.models import FeatureListNet
from torch import nn
from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig

import gsanet


def make_detector(folder: Path, **options: object) -> DetrForObjectDetection:
    """A DETR over the network in a folder, with its weights.

    Args:
        folder: Written by `gsanet.save_pretrained`.
        options: Of `DetrConfig`.
    """
    source = f"local-dir:{folder}"
    backbone = TimmBackboneConfig(backbone=source, out_indices=[1, 2, 3, 4], freeze_batch_norm_2d=True)
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **options))
    # transformers makes the network and leaves its weights random; frozen norms count no batches.
    trained = timm.create_model(source, pretrained=True, features_only=True).state_dict()
    kept = {name: tensor for name, tensor in trained.items() if not name.endswith("num_batches_tracked")}
    find_network(model).load_state_dict(kept)
    return model


def find_network(model: nn.Module) -> nn.Module:
    """The timm network inside of a detector."""
    return next(module for module in model.modules() if isinstance(module, FeatureListNet))


def main() -> None:
    """One step of training and one of inference with a small network, on random images of several sizes."""
    torch.manual_seed(0)
    network = gsanet.create_model("gsa_resnet26", img_size=64, keep_reach=True, width=0.25, depths=(1, 1, 1, 1))
    small = {"layers": 1, "ffn_dim": 64, "attention_heads": 2}
    options = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in small.items()}
    with tempfile.TemporaryDirectory() as folder:
        gsanet.save_pretrained(network, folder)
        model = make_detector(Path(folder), d_model=32, num_queries=5, num_labels=3, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])} for _ in range(2)]
    loss = model(pixel_values=torch.rand(2, 3, 64, 64), labels=labels).loss
    loss.backward()
    optimizer.step()
    print(f"loss: {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        for size in ((64, 64), (96, 70)):
            found = model(pixel_values=torch.rand(1, 3, *size))
            print(f"image {size}: logits {tuple(found.logits.shape)}, boxes {tuple(found.pred_boxes.shape)}")


if __name__ == "__main__":
    main()
