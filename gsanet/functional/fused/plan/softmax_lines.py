"""Softmax attention along lines, `kernels/softmax_lines.cuh`: how lines lie in bundles, and bundles in blocks."""

from gsanet.functional.fused.plan.shape import Machine, round_up

LONGEST = 64  # pixels of a line, whose scores are in registers


def rows_of(length: int) -> int:
    """Pixels of a bundle of lines, in shared memory."""
    return round_up(length * bundle_lines(length), 16)


def bundle_lines(length: int) -> int:
    """How many lines are treated as one."""
    return 16 // length if length <= 16 else 1


def bundles_of(lines: int, length: int) -> int:
    """How many bundles the lines of an image are."""
    return -(-lines // bundle_lines(length))


def grid_of(machine: Machine, bundles: int, blocks: int, groups: int) -> tuple[int, int]:
    """Blocks for bundles of all images, so many blocks on a multiprocessor, and for each group of heads."""
    return min(bundles, max(1, machine.multiprocessors * blocks // groups)), groups


def shares_of(heads: int) -> list[int]:
    """How many heads a block may have, a warp for each: the most first."""
    return [count for count in range(min(8, heads), 0, -1) if heads % count == 0]
