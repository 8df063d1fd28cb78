"""A finished run and a benchmark as files of results."""

import json

RUN = {
    "run": "gsa38-seed0",
    "model": "gsa_resnet38",
    "model_kwargs": {"img_size": 64, "num_classes": 200, "stem": "7x7/2"},
    "recipe": "tinyimagenet",
    "dataset": "tinyimagenet",
    "seed": 0,
    "top1": 49.73,
    "command": "gsanet train --recipe tinyimagenet",
    "commit": "abc1234",
}
BENCH = {
    "kind": "bench",
    "setting": {"dtype": "float32", "img_size": "224x224"},
    "environment": {"device": "a machine"},
    "networks": [
        {"model": "gsa_resnet38", "model_kwargs": {}, "latency_ms": 3.25},
        {"model": "conv_resnet38", "model_kwargs": {}, "latency_ms": None},
    ],
}


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder
