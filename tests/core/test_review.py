"""Which tensors a finding about a moved lock names: those of which the most bytes moved, in all layers together."""

from __future__ import annotations

from copy import deepcopy
from random import Random

from shardwright.locks.difference import difference
from shardwright.locks.review import MOST_CHANGES, moved_finding
from tests.core.test_difference import PLAN


def named(before: list[dict], after: list[dict]) -> list[str]:
    """The tensors that the finding names, and how many it says there are beside them."""
    plans = [{**deepcopy(PLAN), "tensors": tensors} for tensors in (before, after)]
    finding = moved_finding(difference(*plans), [], lock="m.lock.json", update="update", position=None)
    lines = finding.found.split("\n")[2:]
    return [line.split(":")[0].split(" is ")[0] for line in lines]


def row(name: str, num: int, held: int, rests: str = "embed") -> dict:
    return {**PLAN["tensors"][0], "name": name, "num": num, "at_rest": rests, "bytes_per_device": held}


def test_the_most_bytes_come_first_grown_or_shrunk_new_or_gone_and_of_all_layers() -> None:
    before = [row("few", 1, 900), row("shrunk", 2, 800), row("many", 60, 30), row("gone", 1, 700)]
    after = [row("few", 1, 1000), row("shrunk", 2, 200), row("many", 60, 10), row("new", 3, 500)]
    assert named(before, after) == ["new", "shrunk", "many", "gone", "few"]


def test_random_changes_are_named_in_the_order_of_their_bytes() -> None:
    random = Random(0)
    for _ in range(100):
        count = random.randint(1, 9)
        # Each power of two is one tensor's, so that no two are alike.
        moved = random.sample([2**power for power in range(2, 20)], count)
        layers = [random.choice((1, 2, 4)) for _ in range(count)]
        grows = [random.random() < 0.5 for _ in range(count)]
        before = [row(f"w{n}", layers[n], 5 if grows[n] else 5 + moved[n]) for n in range(count)]
        after = [row(f"w{n}", layers[n], 5 + moved[n] if grows[n] else 5, "embed/fsdp") for n in range(count)]
        totals = {f"w{n}": moved[n] * layers[n] for n in range(count)}
        found = named(before, after)
        shown = found[:MOST_CHANGES]
        assert [totals[name] for name in shown] == sorted(totals.values(), reverse=True)[:MOST_CHANGES]
        assert len(found) == min(count, MOST_CHANGES + 1)
        if count > MOST_CHANGES:
            more = count - MOST_CHANGES
            assert found[-1] == f"and {more} more tensor{'s' if more > 1 else ''}"
