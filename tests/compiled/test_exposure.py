"""The communication that a schedule leaves exposed, by component."""

from __future__ import annotations

from shardwright.compiled.reading.program import CompiledCollective, Exposure, exposures


def one(component: str | None, num_bytes: int, times: int, *, overlapped: bool | None) -> CompiledCollective:
    return CompiledCollective(
        kind="all-gather",
        axes=("fsdp",),
        bytes_per_device=num_bytes,
        count_per_step=times,
        dtypes=("bfloat16",),
        component=component,
        overlapped=overlapped,
    )


def test_exposed_bytes_are_those_without_compute_between_start_and_done() -> None:
    found = exposures(
        [
            one("attention", 10, 3, overlapped=False),
            one("attention", 90, 1, overlapped=True),
            one("mlp", 100, 4, overlapped=True),
            one(None, 4, 1, overlapped=False),
            # The text does not show it.
            one("moe", 1000, 1, overlapped=None),
        ]
    )
    assert found == (
        Exposure(component="mlp", moved_bytes=400, exposed_bytes=0),
        Exposure(component="attention", moved_bytes=120, exposed_bytes=30),
        Exposure(component=None, moved_bytes=4, exposed_bytes=4),
    )
    assert [each.share for each in found] == [0.0, 0.25, 1.0]


def test_nothing_is_said_of_a_program_whose_text_does_not_show_it() -> None:
    assert exposures([one("mlp", 1, 1, overlapped=None)]) == exposures([]) == ()
