"""Measuring a module's row of Table 1, instead of believing it.

What each measurement shows, and what it does not:

- Global, from gradients: every output pixel has a gradient to every input pixel. Axial attention and criss-cross
  attention pass, because their second step carries on what the first one gathered; one step alone does not.
- Content, from second differences: what a pixel gives to another depends on what it holds, so that the output is not
  an affine function of it. A convolution fails, and so does GSA's positional attention alone. Behind a feed-forward
  network or a layer normalisation, as in the transformers, nothing is affine: there it shows the layer, not the
  attention.
- Positional, from shuffling: if shuffling all pixels just shuffles the output, position plays no part. A module that
  looks at a window or at a row fails that already by where it looks. So the order is also shuffled among the pixels
  that one output pixel draws on: if that changes the output, position matters beyond the choice of pixels.
- Translation: an object on an empty map, moved by a pixel, moves its output, exactly, where position enters as the
  offset between two pixels that hold something: GSA, windows, and everything without position. An error says that the
  module feels where the map ends or begins, not why: with absolute positions (DETR, VideoBERT) by design; with relative
  ones under a softmax over the whole map (axial attention, attention augmentation) because the softmax also counts the
  empty pixels, and a move changes at which offsets they lie.
"""

import inspect

import torch
from torch import Tensor, nn


def small_module(kind: type[nn.Module], dim: int = 16, feat_size: tuple[int, int] = (9, 8)) -> nn.Module:
    """A small module to measure, in float64: of each class those of these arguments that it knows.

    None starts as the identity, as those do that are inserted between residual blocks.
    """
    arguments = {"dim_out": dim, "feat_size": feat_size, "num_heads": 2, "depth": 2, "zero_init_last": False}
    known = inspect.signature(kind.__init__).parameters
    return kind(dim, **{name: value for name, value in arguments.items() if name in known}).double().eval()


def drawn_on(module: nn.Module, x: Tensor, pixel: tuple[int, int]) -> Tensor:
    """The input pixels, (height, width), that have a gradient to one output pixel."""
    x = x.detach().requires_grad_()
    out = module(x)[0, :, pixel[0], pixel[1]]
    # A plain sum, of squares too, is constant behind a layer normalisation.
    (grad,) = torch.autograd.grad((torch.randn_like(out) * out).sum(), x)
    return grad[0].abs().sum(0) > 0


def sees_everything(module: nn.Module, x: Tensor) -> bool:
    """Global: every input pixel has a gradient to every output pixel."""
    height, width = x.shape[2:]
    return all(drawn_on(module, x, (i, j)).all() for i in range(height) for j in range(width))


@torch.no_grad()
def depends_on_content(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """Content: what a pixel gives to others depends on what it holds, so the output is not affine in it.

    Asked of each pixel of a diagonal, since one may fall on the flat side of a ReLU, and only of outputs outside its
    own row and column: along these, GSA's positional attention multiplies what a pixel holds with its own query.
    """
    out = module(x)
    for place in range(min(x.shape[2:])):
        change = torch.zeros_like(x)
        change[:, :, place, place] = torch.randn_like(x[:, :, place, place])
        bend = module(x + change) - 2 * out + module(x - change)
        bend[:, :, place] = 0
        bend[:, :, :, place] = 0
        if _relative(bend, out) > tolerance:
            return True
    return False


@torch.no_grad()
def commutes_with_shuffling(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """No position at all: shuffling the pixels of the input just shuffles the output."""
    order = torch.randperm(x.shape[2] * x.shape[3])

    def shuffle(feature_map: Tensor) -> Tensor:
        return feature_map.flatten(2)[..., order].view_as(feature_map)

    return _relative(module(shuffle(x)) - shuffle(module(x)), module(x)) <= tolerance


@torch.no_grad()
def commutes_with_shuffling_lines(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """Nothing of position but which pixels share a line: shuffling whole rows and whole columns shuffles the output."""
    rows, columns = torch.randperm(x.shape[2]), torch.randperm(x.shape[3])

    def shuffle(feature_map: Tensor) -> Tensor:
        return feature_map[:, :, rows][..., columns]

    return _relative(module(shuffle(x)) - shuffle(module(x)), module(x)) <= tolerance


def depends_on_order(module: nn.Module, x: Tensor, tolerance: float = 1e-6) -> bool:
    """Positional: shuffling the pixels that an output pixel draws on, all but itself, changes that output pixel."""
    row, column = x.shape[2] // 2, x.shape[3] // 2
    others = drawn_on(module, x, (row, column))
    others[row, column] = False
    order = torch.randperm(int(others.sum()))
    shuffled = x.clone()
    shuffled[:, :, others] = x[:, :, others][..., order]
    with torch.no_grad():
        before, after = (module(feature_map)[:, :, row, column] for feature_map in (x, shuffled))
    return _relative(after - before, before) > tolerance


@torch.no_grad()
def shift_error(module: nn.Module, x: Tensor) -> float:
    """How far moving an object by a pixel, down and to the right, is from moving its output: the relative error.

    The object is the middle third of x, in each direction; the rest of the map is empty. For modules with a window the
    other two thirds must be wider than it, lest it meets the border.
    """
    rows, columns = (slice(length // 3, -(-2 * length // 3)) for length in x.shape[2:])
    moved_rows, moved_columns = (slice(part.start + 1, part.stop + 1) for part in (rows, columns))
    before, after = torch.zeros_like(x), torch.zeros_like(x)
    before[..., rows, columns] = after[..., moved_rows, moved_columns] = x[..., rows, columns]
    wanted = module(before)[..., rows, columns]
    return _relative(module(after)[..., moved_rows, moved_columns] - wanted, wanted)


def _relative(difference: Tensor, size: Tensor) -> float:
    return (difference.norm() / size.norm()).item()
