"""SAN's pairwise and patchwise attention against explicit loops, with batch norm of the batch's statistics."""

import copy

import torch
import torch.nn.functional as F
from helpers import assert_same_with_gradients, batch_norms
from torch.testing import assert_close

from gsanet.layers import PairwiseAttention, PatchwiseAttention


def mirrored(i, length):
    while not 0 <= i < length:
        i = -i if i < 0 else 2 * (length - 1) - i
    return i


def project(module, x):
    widths = (module.dim_relation, module.dim_relation, module.dim_out)
    return (torch.einsum("bdxy,cd->bxyc", x, w) for w in module.maps.weight.flatten(1).split(widths))


def norm_relu(vectors, norm):
    """Batch norm over all but the last dimension, then ReLU."""
    dims = tuple(range(vectors.dim() - 1))
    mean, variance = vectors.mean(dims), vectors.var(dims, unbiased=False)
    return ((vectors - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias).relu()


def aggregate(module, weights, beta):
    """Weights (batch, x, y, offset, group)."""
    batch, height, width, _, _ = weights.shape
    reach, rows = module.window // 2, []
    for b in range(batch):
        for x in range(height):
            for y in range(width):
                total = 0
                for i in range(module.window):
                    for j in range(module.window):
                        value = beta[b, mirrored(x + i - reach, height), mirrored(y + j - reach, width)]
                        weight = weights[b, x, y, i * module.window + j].repeat_interleave(module.share)
                        total = total + weight * value
                rows.append(total)
    return torch.stack(rows).view(batch, height, width, -1).permute(0, 3, 1, 2)


def neighbours(psi, window):
    """(batch, x, y, offset, channel)"""
    batch, height, width, _ = psi.shape
    reach = window // 2
    return torch.stack(
        [
            psi[
                torch.arange(batch)[:, None, None],
                torch.tensor([mirrored(x + i - reach, height) for x in range(height)])[:, None],
                torch.tensor([mirrored(y + j - reach, width) for y in range(width)]),
            ]
            for i in range(window)
            for j in range(window)
        ],
        dim=3,
    )


def brute_pairwise(module, x):
    phi, psi, beta = project(module, x)
    height, width = x.shape[-2:]
    reach = module.window // 2
    # Coordinates from -1 to 1; beyond the border they go on.
    offsets = torch.tensor(
        [
            [-i * 2 / (height - 1), -j * 2 / (width - 1)]
            for i in range(-reach, reach + 1)
            for j in range(-reach, reach + 1)
        ],
        dtype=x.dtype,
    )
    positions = (offsets @ module.position.weight.T).expand(*phi.shape[:3], -1, -1)
    relations = torch.cat((phi[:, :, :, None] - neighbours(psi, module.window), positions), dim=-1)
    hidden = norm_relu(relations, module.gamma[0]) @ module.gamma[2].weight.flatten(1).T
    scores = norm_relu(hidden, module.gamma[3]) @ module.gamma[5].weight.flatten(1).T
    return aggregate(module, scores.softmax(dim=3), beta)


def brute_patchwise(module, x):
    phi, psi, beta = project(module, x)
    patch = torch.cat((phi, neighbours(psi, module.window).flatten(3)), dim=-1)
    hidden = norm_relu(patch, module.norm) @ module.reduce.weight.flatten(1).T
    weights = norm_relu(hidden, module.gamma[0]) @ module.gamma[2].weight.flatten(1).T + module.gamma[2].bias
    return aggregate(module, weights.unflatten(-1, (-1, module.window**2)).transpose(3, 4), beta)


def check(kind, brute):
    module = kind(6, 8, share=4, window=3, dim_relation=3, dtype=torch.float64).train()
    for parameter in module.parameters():  # norms too are anything but identities
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(module(x), brute(module, x), (x, *module.parameters()))


def test_pairwise_against_loops():
    check(PairwiseAttention, brute_pairwise)


def test_patchwise_against_loops():
    check(PatchwiseAttention, brute_patchwise)


def test_patchwise_norm_learns_its_statistics():
    """Its parts are applied by hand: they must move as a BatchNorm2d over the concatenation would move them."""
    module = PatchwiseAttention(6, 8, share=4, window=3, dim_relation=3).train()
    twin = torch.nn.BatchNorm2d(30).train()
    x = torch.randn(2, 6, 5, 4)
    for _ in range(3):
        module(x)
        phi, psi, _ = project(module, x)
        twin(torch.cat((phi, neighbours(psi, 3).flatten(3)), dim=-1).permute(0, 3, 1, 2))
    assert_close(module.norm.running_mean, twin.running_mean)
    assert_close(module.norm.running_var, twin.running_var)
    assert module.norm.num_batches_tracked == 3


def test_patchwise_norm_is_a_batch_norm_in_whatever_state():
    """One that is frozen while the module is trained, for instance."""
    module = PatchwiseAttention(6, 8, share=4, window=3, dim_relation=3, dtype=torch.float64).train()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    for words, norm in batch_norms(30):
        module.norm = norm.double()
        twin = copy.deepcopy(norm)
        for _ in range(2):
            x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
            phi, psi, beta = project(module, x)
            patch = torch.cat((phi, neighbours(psi, 3).flatten(3)), dim=-1).permute(0, 3, 1, 2)
            weights = module.gamma(F.conv2d(twin(patch).relu(), module.reduce.weight))
            expected = aggregate(module, weights.unflatten(1, (-1, 9)).permute(0, 3, 4, 2, 1), beta)
            assert_close(module(x), expected, msg=words)
        for name, buffer in norm.named_buffers():
            assert_close(buffer, twin.get_buffer(name), msg=f"{name}, {words}")
