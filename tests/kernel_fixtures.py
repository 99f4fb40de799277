"""Fixtures of the tests of kernels: an interpreter that is patched once, and poisoned outputs."""

import pytest
import torch
import triton.language as tl
from interpreted import INTERPRETED
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def _one_way(request):
    """A process has Triton with the interpreter or without."""
    if INTERPRETED == ("gpu" in request.keywords):
        pytest.skip("TRITON_INTERPRET decides which tests run")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """What torch.empty gives is NaN, or the least of integers."""
    empty = torch.empty

    def poisoned(*shape, **how):
        fresh = empty(*shape, **how)
        return fresh.fill_(torch.nan if fresh.is_floating_point() else torch.iinfo(fresh.dtype).min)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True, scope="module")
def _patched_once():
    """The interpreter patches the language anew at each call of a device function, for half of the time: once is enough."""
    if not INTERPRETED:
        yield
        return
    patch, scopes = interpreter._patch_lang, {}

    def once(fn):
        place = frozenset(lang.__name__ for lang in (tl, tl.core) if any(value is lang for value in fn.__globals__.values()))
        if place not in scopes:
            scopes[place] = patch(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", once)
        yield
    for scope in reversed(scopes.values()):
        scope.restore()
