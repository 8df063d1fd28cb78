"""Runs that share a GPU: one that is timed is alone, and the others go on afterwards."""

import threading
import time

import pytest

from gsanet.paper.matrix import matrix, read_matrix
from gsanet.paper.run_matrix import timed_steps
from gsanet.paper.turns import Turns
from tests.paper.test_matrix import SMALL

STEPS, LENGTH = 60, 5


class Bench:
    """What runs do, in the order in which they do it."""

    def __init__(self):
        self.done: list[tuple[str, int]] = []
        self.computing: set[str] = set()
        self.at_once: list[int] = []

    def step(self, name, number):
        self.computing.add(name)
        time.sleep(0.001)
        self.at_once.append(len(self.computing))
        self.done.append((name, number))
        self.computing.discard(name)


def test_a_run_that_is_timed_is_alone(tmp_path):
    bench, times = Bench(), {name: [] for name in "abc"}
    starts = {"a": (10, 40), "b": (12, 41), "c": (14,)}  # at nearly the same time
    failures = []

    def run(name):
        try:
            with Turns(tmp_path, starts[name], LENGTH, times[name].append) as turns:
                for number in range(STEPS):
                    turns(number)
                    bench.step(name, number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert not failures
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2, "c": 1}
    assert all(seconds > LENGTH * 0.001 for found in times.values() for seconds in found)
    assert len(bench.done) == 3 * STEPS
    assert max(bench.at_once) > 1  # they do share, most of the time
    for name, first in starts.items():
        for start in first:
            begin = bench.done.index((name, start))
            assert bench.done[begin : begin + LENGTH] == [(name, start + number) for number in range(LENGTH)]


def test_the_first_step_holds_nothing(tmp_path):
    """It may compile for a minute, for which nobody should wait."""
    times = []
    with Turns(tmp_path, (), 1, times.append) as compiling, Turns(tmp_path, (1,), 1, times.append) as timed:
        compiling(0)
        for number in range(3):
            timed(number)
    assert len(times) == 1


def test_a_run_that_ends_in_its_turn_lets_the_others_go_on(tmp_path):
    with Turns(tmp_path, (1,), 10, lambda seconds: pytest.fail("its turn is not over")) as turns:
        for number in range(3):
            turns(number)
    with Turns(tmp_path, (), 1, lambda seconds: None) as other:
        for number in range(3):
            other(number)


@pytest.mark.parametrize("name", list(matrix()))
def test_the_stretches_lie_within_epochs(name):
    run = matrix()[name]
    starts, length = timed_steps(run)
    assert len(set(starts)) == 3
    assert length == min(40, run.steps_per_epoch // 2)
    for start in starts:
        assert 0 < start < start + length < run.steps
        assert start // run.steps_per_epoch == (start + length) // run.steps_per_epoch


def test_short_runs_are_timed_too():
    starts, length = timed_steps(read_matrix(SMALL)["gsa"])
    assert set(starts) == {1}
    assert length == 3
