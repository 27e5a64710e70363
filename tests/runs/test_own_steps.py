"""The number of a step that a user's own program gives."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from shardwright.core.findings.errors import InputError
from shardwright.runs.own_program.store import whole_step


@pytest.mark.parametrize("step", [0, 7, np.int64(7), np.array(7, np.int32), 10**18 - 1])
def test_a_number_of_any_library(step: Any) -> None:
    assert (whole_step(step), type(whole_step(step))) == (int(step), int)


@pytest.mark.parametrize("step", [-1, 10**18, 1.5, "3", True, None, np.array([1, 2])], ids=str)
def test_what_is_no_step(step: Any) -> None:
    with pytest.raises(
        InputError, match=f"^{re.escape(f'step is {step!r}')}, and must be a whole number from 0 to 999,999,"
    ):
        whole_step(step)
