"""Random numbers as a function of what they are for.

A number depends only on (seed, epoch, purpose, sample, draw), not on who asks or what was asked before. So any process
or worker can make the numbers of any sample, and an interrupted epoch goes on where it stopped. NumPy's and torch's
generators promise neither that nor the same numbers in their next release; a hash of the five does.
"""

import numpy as np
from numpy.typing import NDArray

ORDER, VIEW, SHARD_ORDER, SHARD_BUFFER, HOLDOUT, POLICY, ERASE, SOME = range(8)  # purposes

_DRAWS = 64  # of one sample, at most
_WORD = 2**64 - 1


def uniforms(seed: int, epoch: int, purpose: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), shape (samples, count); the first of a sample do not depend on `count`."""
    return (_hashes(seed, epoch, purpose, samples, count) >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, epoch: int, purpose: int, length: int) -> NDArray[np.int64]:
    """A random order of `range(length)`."""
    return np.argsort(_hashes(seed, epoch, purpose, np.arange(length), 1)[:, 0], kind="stable")


def _hashes(seed: int, epoch: int, purpose: int, samples: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, purpose):
        key = _mix(key + np.uint64(part & _WORD))
    position = samples.astype(np.uint64)[:, None] * np.uint64(_DRAWS) + np.arange(count, dtype=np.uint64)
    return _mix(_mix(position) ^ key)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
