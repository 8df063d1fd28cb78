"""On a GPU: launches in both ways, early and as usual, and CUDA graphs of them."""

import torch

from gsanet.functional.fused.dependent import dependent_launches


def both_ways(function):
    """What a function gives with early launches, and without."""
    results = []
    for early in (True, False):
        with dependent_launches(early):
            results.append(function())
        torch.cuda.synchronize()
    return results


def capture(function):
    """A CUDA graph of a function, and what that gives: tensors which each replay writes."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def check_replay(gpu, function):
    """A graph gives what the function does."""
    with gpu.running(poison=False):
        expected = function()
        graph, replayed = capture(function)
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(expected, replayed, strict=True))


def replay(pairs):
    """What each of several graphs gives now."""
    for graph, _ in pairs:
        graph.replay()
    return [results for _, results in pairs]
