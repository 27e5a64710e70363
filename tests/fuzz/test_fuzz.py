"""A few cases of each kind of damaged and invented input: no traceback, one message, in time and in memory.

``python -m tests.fuzz --cases 7000`` draws others; ``make test-all`` runs it with a seed of the day.
"""

from __future__ import annotations

import pytest

from tests.fuzz.kinds import KINDS
from tests.fuzz.running import cases, judged, run_case

SEED = 11


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_ends_in_a_traceback(kind):
    wrong = []
    for _, index in (case for case in cases(140) if case[0] == kind):
        outcome = run_case(kind, index, SEED)
        if outcome.wrong:
            wrong.append(f"--seed {SEED} --kind '{kind}' --case {index}: {outcome.arguments}\n{outcome.wrong}")
    assert not wrong, "\n".join(wrong)


def test_kinds_reach_every_exit_code():
    """If every case were refused at once, the test would check nothing."""
    found = {run_case(kind, index, SEED).code for kind in ("layouts", "TorchTitan") for index in range(12)}
    assert found == {0, 1, 2}


@pytest.mark.parametrize(
    ("code", "out", "err", "wrong"),
    [
        (0, "fine", "", ""),
        (1, "", "", "exit code 1 without a word"),
        (2, "", "shardwright: no such file.\n", ""),
        (2, "", "oops", "exit code 2 without a message: 'oops' ''"),
        (
            2,
            "",
            "shardwright: one\nshardwright: two\n",
            "more than one message: 'shardwright: one\\nshardwright: two\\n'",
        ),
        (3, "", "", "exit code 3"),
        (1, "", "Traceback (most recent call last)", "a traceback in its output: Traceback (most recent call last)"),
    ],
)
def test_a_violated_rule_is_detected(code, out, err, wrong):
    assert judged(code, out, err, as_json=False) == wrong


def test_a_fault_of_the_program_is_detected(monkeypatch):
    """The harness itself: an exception is reported with its traceback, and an endless loop is interrupted."""

    def raises(_):
        raise IndexError("seen")

    def hangs(_):
        while True:
            pass

    monkeypatch.setattr("tests.fuzz.running.main", raises)
    assert "IndexError: seen" in run_case("Hugging Face", 0, SEED).wrong
    monkeypatch.setattr("tests.fuzz.running.main", hangs)
    monkeypatch.setattr("tests.fuzz.running.SLOWEST_S", 0.05)
    assert run_case("Hugging Face", 0, SEED).wrong.startswith("longer than 0.05 s")
