"""What a GSA network costs as a backbone beside ResNet-50, at a detector's image size: see docs/backbone.md.

Run it: python examples/backbone_cost.py --size 800x1216
"""

import argparse
import statistics
import time
from typing import Any

import torch

import gsanet

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("conv_resnet50", {}),
    "GSA-ResNet-50": ("gsa_resnet50", {}),
    "GSA-ResNet-50, groups 2 to 4": ("gsa_resnet50", {"groups": (2, 3, 4)}),
}


def main() -> None:
    """Print parameters, operations and the time of a forward pass of each network, without a head."""
    parser = argparse.ArgumentParser(description="What a GSA network costs as a backbone beside ResNet-50.")
    parser.add_argument("--size", default="800x1216", help="height x width")
    parser.add_argument("--runs", type=int, default=3, help="forward passes that are timed, after one that is not")
    arguments = parser.parse_args()
    height, width = map(int, arguments.size.split("x"))
    print(f"{height}x{width}, batch 1, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| backbone | params (M) | FLOPs (G) | forward (s) |\n|---|---:|---:|---:|")
    images = torch.randn(1, 3, height, width).to(memory_format=torch.channels_last)
    for label, (name, options) in NETWORKS.items():
        # Branches that start at zero keep the activations of an untrained network finite.
        options = {"img_size": (height, width), "features_only": True, "zero_init_last": True, **options}
        model = gsanet.create_model(name, **options)
        params, flops = gsanet.count_parameters(model), gsanet.count_flops(model, (height, width))
        fast = gsanet.fuse_for_inference(model).to(memory_format=torch.channels_last)
        seconds = []
        with torch.inference_mode():
            for _ in range(arguments.runs + 1):
                start = time.perf_counter()
                fast(images)
                seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[1:])
        print(f"| {label} | {params / 1e6:.2f} | {flops / 1e9:.1f} | {median:.2f} |", flush=True)


if __name__ == "__main__":
    main()
