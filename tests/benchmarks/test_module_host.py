"""The benchmark of what Python takes for a module's pass: it calls what a GPU would, and asks for all codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import module_host


def test_products_ask_for_the_codes_of_both_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    zeros = module_host.zeros

    def watched(*operands: torch.Tensor) -> Any:
        asked.append([(one.dtype, tuple(one.shape)) for one in operands[:2]])
        return zeros(*operands)

    monkeypatch.setattr(module_host, "zeros", watched)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    (taken,) = module_host.measured(2, ["as it is"], ["fp8-current"]).values()
    assert taken > 0
    narrow, wide = torch.float8_e4m3fn, torch.float8_e5m2
    hidden, inner, tokens = module_host.SIZE.hidden, module_host.SIZE.inner, module_host.SIZE.tokens
    passes = 2 * module_host.PASSES
    assert len(asked) == 6 * passes
    assert asked[0] == [(narrow, (tokens, hidden)), (narrow, (inner, hidden))]
    assert {dtype for pair in asked for dtype, _ in pair} <= {narrow, wide}
