"""Tensors in, tensors out: the operations of the paper, each behind several backends.

`content_attention`, `positional_attention` and `global_self_attention` are the paper's equations;
`global_self_attention_map` is the whole module as one function. `use_backend` chooses how they are computed.
"""

from gsanet.functional import fused, lean, native, reference
from gsanet.functional.attention import (
    content_attention,
    global_self_attention,
    global_self_attention_map,
    positional_attention,
)
from gsanet.functional.backends import BACKENDS, explain_backend, use_backend

# In the order in which they are tried. The first ones refuse what they cannot do.
BACKENDS.update({backend.name: backend for backend in (fused.BACKEND, native.BACKEND, lean.BACKEND, reference.BACKEND)})

__all__ = [
    "content_attention",
    "explain_backend",
    "global_self_attention",
    "global_self_attention_map",
    "positional_attention",
    "use_backend",
]
