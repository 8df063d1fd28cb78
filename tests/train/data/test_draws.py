import numpy as np
from scipy.stats import kstest, pearsonr

from gsanet.train.data import draws

SAMPLES = np.arange(20_000)


def test_numbers_are_uniform_and_unrelated():
    u = draws.uniforms(0, 0, draws.VIEW, SAMPLES, 4)
    others = [
        draws.uniforms(1, 0, draws.VIEW, SAMPLES, 1)[:, 0],
        draws.uniforms(0, 1, draws.VIEW, SAMPLES, 1)[:, 0],
        draws.uniforms(0, 0, draws.ORDER, SAMPLES, 1)[:, 0],
        np.roll(u[:, 0], 1),
        *u[:, 1:].T,
    ]
    assert u.min() >= 0
    assert u.max() < 1
    for column in [u[:, 0], *others]:
        assert kstest(column, "uniform").pvalue > 1e-3
    for column in others:
        assert pearsonr(u[:, 0], column).pvalue > 1e-3


def test_numbers_of_a_sample_do_not_depend_on_what_else_is_asked():
    every = draws.uniforms(5, 7, draws.VIEW, SAMPLES, 23)
    some = draws.uniforms(5, 7, draws.VIEW, np.array([19_999, 4]), 3)
    assert np.array_equal(every[[19_999, 4], :3], some)


def test_permutation_is_one_and_every_place_is_as_likely():
    orders = np.stack([draws.permutation(0, epoch, draws.ORDER, 10) for epoch in range(4000)])
    assert (np.sort(orders, 1) == np.arange(10)).all()
    counts = np.stack([np.bincount(place, minlength=10) for place in orders.T])
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 126  # 81 degrees of freedom: the 99.9 % point


def test_numbers_are_the_same_in_every_release():
    """A run that a later release resumes must see the same images."""
    assert draws.permutation(0, 0, draws.ORDER, 8).tolist() == [0, 6, 7, 1, 4, 3, 5, 2]
    (numbers,) = draws.uniforms(2**40, 3, draws.VIEW, np.array([11]), 2).tolist()
    assert numbers == [0.49854805362044907, 0.9442377277427352]
