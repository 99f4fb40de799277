"""Queries, keys, values and documents on which the attention of training-time test is tried, and comparisons with gradients."""

import torch

from draftsmith.models import training_time_test

HEADS = 4
LAYOUTS = ["one", "packed", "padded"]


def documents(layout, positions, rows=2, seed=0):
    """Runs of numbers; in "padded" the second row ends in padding."""
    if layout == "one":
        return None
    numbers = (torch.rand(rows, positions, generator=torch.Generator().manual_seed(seed)) < 0.3).cumsum(1)
    if layout == "padded":
        numbers[-1, positions // 2 :] = -1
    return numbers


def case(positions, kv, k, dtype=torch.float64, rows=2, dim=3, wide=1.0, seed=0):
    """The query of step k, and k+1 keys and values, which float32 represents exactly, so that both precisions read the same."""
    gen = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, HEADS, positions, dim, generator=gen) * wide
    rest = [torch.randn(rows, kv, positions, dim, generator=gen) for _ in range(2 * k + 2)]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (query, *rest)]
    return leaves, torch.randn(query.shape, generator=gen)


def halves(leaves):
    query, *rest = leaves
    return query, rest[: len(rest) // 2], rest[len(rest) // 2 :]


def with_grads(function, leaves, weight):
    out = function(leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight.to(out.dtype), materialize_grads=True)]


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1, b.abs().max())


def causal_spans(document, positions, before=0):
    """The spans of causal attention in two rows of documents, of the positions after the first `before`."""
    return training_time_test._causal(training_time_test.document_starts(document, 2, positions, "cpu"), before)
