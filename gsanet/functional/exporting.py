"""Whether a network is being exported: an export has PyTorch's own operators, and the layers as they were defined."""

import torch


def is_exporting() -> bool:
    """Whether this is the trace of `torch.export`."""
    # Older versions of PyTorch say so while they compile as well.
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
