import pytest
import torch

from gsanet.functional import native
from gsanet.functional.native.compiler import unavailable


@pytest.fixture
def kernels(monkeypatch):
    """The backend takes small maps too, and memory that nobody has written to is full of NaN."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(native, "FEW", 1)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
