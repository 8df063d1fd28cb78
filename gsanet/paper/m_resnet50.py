"""The one network whose printed size we could not reproduce, and the search for it.

Table 3 describes M-ResNet-50 as ResNet-50 "obtained by first halving the number of input and output channels of all
residual blocks and then scaling the number of filters in every layer by a factor of 1.125", and prints 12.7 M and
6.0 G. Read literally, with the stem's 64 channels kept, that is 12.826 M and 6.052 G. Run as a command,
`python -m gsanet.paper.m_resnet50`, this counts every reading that respects the rest of the paper's text: for each
residual group, inner and outer channels scaled or not; queries and keys scaled or not; the stem kept, scaled, halved,
or halved and scaled.
"""

from collections.abc import Iterator
from itertools import product

NOTE = (
    "No reading of the paper's text was found that prints 12.7 M and 6.0 G (1,984 were counted: "
    "python -m gsanet.paper.m_resnet50). This one keeps the stem at 64 channels."
)

DEPTHS = (3, 4, 6, 3)
HEADS = 8
Widths = tuple[int, ...]


def count(inner: Widths, outer: Widths, key: Widths, stem: int) -> tuple[int, int]:
    """Parameters and operations of a GSA-ResNet-50 with these channels at 224x224, in closed form."""
    length, channels = 56, stem
    params = 7 * 7 * 3 * stem + 2 * stem
    flops = 2 * 7 * 7 * 3 * stem * 112**2
    for group, depth in enumerate(DEPTHS):
        c, o, k = inner[group], outer[group], key[group]
        for block in range(depth):
            pooled = length // 2 if group > 0 and block == 0 else length
            weights = channels * c + c * (2 * k + c)  # the first 1x1 convolution, q, k and v: before the pooling
            params += weights + 2 * (2 * length - 1) * k // HEADS + 6 * c  # tables, three batch norms
            flops += 2 * length**2 * (weights + 2 * k * c // HEADS + 2 * length * (k + c))
            weights = c * o + (channels * o if block == 0 else 0)  # the last 1x1 convolution and the shortcut
            params += weights + 2 * o * (2 if block == 0 else 1)
            flops += 2 * pooled**2 * weights
            length, channels = pooled, o
    return params + 1000 * (channels + 1), flops + 2 * 1000 * channels


def readings() -> Iterator[tuple[Widths, Widths, Widths, int]]:
    """Inner, outer and key channels of the groups, and the stem's."""
    unscaled = (64,) * 4
    for inner, outer in product(product((64, 72), repeat=4), product((128, 144), repeat=4)):
        for key, stem in product({inner, unscaled}, (32, 36, 64, 72)):
            yield _double(inner), _double(outer), _double(key), stem


def _double(base: Widths) -> Widths:
    return tuple(channels << group for group, channels in enumerate(base))


def main() -> None:
    """Count them all, and print those that match and the nearest."""
    counted = [(*count(*reading), reading) for reading in readings()]
    matching = [row for row in counted if f"{row[0] / 1e6:.1f}" == "12.7" and f"{row[1] / 1e9:.1f}" == "6.0"]
    nearest = sorted(counted, key=lambda row: abs(row[0] / 12.7e6 - 1) + abs(row[1] / 6.0e9 - 1))[:5]
    print(f"{len(counted)} readings, {len(matching)} print 12.7 M and 6.0 G; the nearest:")
    for params, flops, (inner, outer, key, stem) in matching or nearest:
        print(f"{params / 1e6:.3f} M  {flops / 1e9:.3f} G  inner {inner}, outer {outer}, keys {key}, stem {stem}")


if __name__ == "__main__":
    main()
