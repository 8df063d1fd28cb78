"""What several test files need: random maps, relative errors, and the paper's equations as explicit loops."""

import itertools

import torch
from torch import nn
from torch.testing import assert_close


def maps(shape, k, v, dtype=torch.float64, device="cpu", grad=False):
    """Random q, k and v of (batch, x, y, head) and k or v channels."""
    widths = (k, k, v)
    return tuple(torch.randn(*shape, w, dtype=dtype, device=device, requires_grad=grad) for w in widths)


def table(length, k, dtype=torch.float64, device="cpu", grad=False):
    return torch.randn(2 * length - 1, k, dtype=dtype, device=device, requires_grad=grad)


def relative_error(value, reference):
    """The norm of the difference over the norm of the reference; infinite if anything is not a finite number."""
    value, reference = value.double().cpu(), reference.double().cpu()
    if not torch.isfinite(value).all():
        return float("inf")
    return ((value - reference).norm() / reference.norm().clamp_min(1e-30)).item()


def gradients(output, inputs, seed=0):
    """Gradients of a fixed random projection of the output with respect to each input."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    return torch.autograd.grad((output * weight).sum(), inputs)


def assert_same_with_gradients(out, expected, inputs):
    """Compare two outputs, and the gradients of both with respect to each input."""
    assert_close(out, expected)
    for grad, wanted in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert_close(grad, wanted)


def brute_content(q, k, v):
    """Equation 1, pixel by pixel: each row of K^T is normalised, gathers one context vector, and q spreads them."""
    batch, height, width, heads, keys = q.shape
    pixels = [(x, y) for x in range(height) for y in range(width)]
    out = torch.zeros_like(v)
    for b in range(batch):
        for n in range(heads):
            contexts = []
            for c in range(keys):
                weights = torch.stack([k[b, x, y, n, c] for x, y in pixels])
                weights = (weights - weights.max()).exp()
                weights = weights / weights.sum()
                contexts.append(sum(w * v[b, x, y, n] for w, (x, y) in zip(weights, pixels, strict=True)))
            for x, y in pixels:
                value = sum(q[b, x, y, n, c] * contexts[c] for c in range(keys))
                out = out.index_put(tuple(torch.tensor(i) for i in (b, x, y, n)), value)
    return out


def brute_positional(q, v, rel, axis, reach):
    """Equation 2: each pixel, each head, each offset that stays inside the map, the table and the reach."""
    batch, height, width, heads, _ = q.shape
    middle = rel.shape[0] // 2
    out = torch.zeros_like(v)
    for b in range(batch):
        for x in range(height):
            for y in range(width):
                for n in range(heads):
                    value = torch.zeros_like(v[0, 0, 0, 0])
                    for delta in range(-middle, middle + 1):
                        i, j = (x + delta, y) if axis == "column" else (x, y + delta)
                        if not (0 <= i < height and 0 <= j < width) or (reach is not None and abs(delta) > reach):
                            continue
                        value = value + (q[b, x, y, n] * rel[middle + delta]).sum() * v[b, i, j, n]
                    out = out.index_put(tuple(torch.tensor(index) for index in (b, x, y, n)), value)
    return out


def brute_global(q, k, v, rel_column, rel_row, norm, reach):
    """Appendix B: Y = Y^C + Y^W, with the norm over the (batch, channels, x, y) map between column and row."""
    content = brute_content(q, k, v)
    column = brute_positional(q, v, rel_column, "column", reach)
    batch, height, width, heads, channels = column.shape
    as_map = column.reshape(batch, height, width, heads * channels).permute(0, 3, 1, 2)
    column = norm(as_map).permute(0, 2, 3, 1).reshape(batch, height, width, heads, channels)
    return content + brute_positional(q, column, rel_row, "row", reach)


def losses_on_one_batch(model, steps):
    """The losses of a few steps of SGD on sixteen random images of 16x16 pixels and ten classes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch_norms(channels):
    """Batch norms whose settings and buffers need no longer be those that they were made with, and words for each."""
    for tracks, missing, momentum, training in itertools.product(
        (True, False),
        ((), ("running_mean", "running_var"), ("num_batches_tracked",)),
        (0.3, None),
        (True, False),
    ):
        norm = nn.BatchNorm2d(channels, momentum=momentum)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        norm.num_batches_tracked.fill_(2)
        norm.track_running_stats = tracks
        for name in missing:
            setattr(norm, name, None)
        words = f"training {training}, track_running_stats {tracks}, momentum {momentum}, without {missing}"
        yield words, norm.train(training)
