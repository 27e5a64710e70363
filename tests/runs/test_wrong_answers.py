"""Runs that are resumed from a store which gives one wrong answer: ``python -m tests.runs.wrong_answers`` draws hundreds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.runs.wrong_answers import Resumes, drawn, stopped_run
from tests.storage.s3 import Server
from tests.storage.wrong_answers import Request


@pytest.fixture(scope="module")
def resumes(s3_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumes]:
    with stopped_run(tmp_path_factory.mktemp("run"), s3_server.environment, "wrong-answers") as stopped:
        yield stopped


@pytest.mark.parametrize(
    ("method", "kind", "fault"),
    [
        ("GET", "manifest.json", "404"),
        ("GET", "boxes-", "flipped"),
        ("GET", "list", "stale"),
    ],
)
def test_the_run_goes_on_from_the_newest_step(resumes: Resumes, method: str, kind: str, fault: str) -> None:
    assert resumes.faulty(Request(method, kind, 0), fault) == "went on from the newest step"


def test_a_drawn_request(resumes: Resumes) -> None:
    resumes.faulty(*drawn(resumes.requests, random.Random(35)))


def test_a_step_that_is_really_damaged_is_set_aside(resumes: Resumes) -> None:
    assert resumes.damaged(random.Random(1)) == "damage proven"
