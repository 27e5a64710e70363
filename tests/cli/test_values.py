"""Lists in the value of one option: their meaning, and the full text of each refusal."""

from __future__ import annotations

import pytest

from shardwright.cli.typed.values import compiler_options, mesh_sizes, moves, settings
from shardwright.core.findings.errors import InputError

SIZES = "Expected: AXIS=SIZE, with commas between, as in fsdp=2,expert=4."
MOVES = "Expected: attention=HOW or moe=HOW, with a comma between, as in attention=ring,moe=all-to-all."


def test_sizes():
    assert mesh_sizes("fsdp=2") == {"fsdp": 2}
    assert mesh_sizes(" fsdp = 2 , expert=4") == {"fsdp": 2, "expert": 4}
    # Whether a size can be is the planner's to say.
    assert mesh_sizes("fsdp=0") == {"fsdp": 0}


def test_moves():
    assert moves("moe=auto,attention=ring") == {"moe": "auto", "attention": "ring"}


def test_settings_of_several_options_are_merged():
    assert settings([("num_layers=2", "embed=64"), (), ("rope.kind=default",)]) == {
        "num_layers": "2",
        "embed": "64",
        "rope.kind": "default",
    }


REFUSED = [
    (mesh_sizes, "fsdp,expert=4", f"--mesh: 'fsdp' has no value.\n    fsdp,expert=4\n    ^^^^\n{SIZES}"),
    (mesh_sizes, "fsdp=2,=4", f"--mesh: '=4' has no name.\n    fsdp=2,=4\n           ^^\n{SIZES}"),
    (mesh_sizes, "fsdp=2,expert=", f"--mesh: 'expert=' has no value.\n    fsdp=2,expert=\n           ^^^^^^^\n{SIZES}"),
    (mesh_sizes, "fsdp=2,", f"--mesh: something is missing here.\n    fsdp=2,\n           ^\n{SIZES}"),
    (mesh_sizes, "", f"--mesh: something is missing here.\n    \n    ^\n{SIZES}"),
    (mesh_sizes, "fsdp=2,fsdp=4", f"--mesh: 'fsdp' occurs twice.\n    fsdp=2,fsdp=4\n           ^^^^\n{SIZES}"),
    (mesh_sizes, "fsdp=two", f"--mesh: 'two' is not a whole number.\n    fsdp=two\n         ^^^\n{SIZES}"),
    (
        moves,
        "atention=ring",
        f"--move: nothing called 'atention' moves. Did you mean 'attention'?\n    atention=ring\n    ^^^^^^^^\n{MOVES}",
    ),
    (
        moves,
        "attention=ring,moe=rng",
        "--move: 'moe' has no movement 'rng'. Did you mean 'ring'?\n"
        f"    attention=ring,moe=rng\n                       ^^^\n{MOVES}",
    ),
]


@pytest.mark.parametrize(("read", "text", "message"), REFUSED)
def test_the_full_text_of_a_refusal(read, text, message):
    with pytest.raises(InputError) as refused:
        read(text)
    assert str(refused.value) == message


def test_a_dimension_set_twice_is_refused():
    with pytest.raises(InputError, match=r"^--set: 'embed' is set twice\.\n    embed=4\n    \^\^\^\^\^\n"):
        settings([("embed=2",), ("embed=4",)])


XLA = "Expected: NAME=VALUE, with spaces between, as in xla_gpu_enable_latency_hiding_scheduler=true."


def test_options_of_a_compiler_may_be_lists_and_empty():
    given = [
        ("xla_disable_hlo_passes=fusion,algsimp", " xla_a = true "),
        ("xla_gpu_enable_command_buffer=",),
        ("b=c=d",),
    ]
    assert compiler_options(given) == {
        "xla_disable_hlo_passes": "fusion,algsimp",
        "xla_a": "true",
        "xla_gpu_enable_command_buffer": "",
        "b": "c=d",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["xla_a"], f"--xla: 'xla_a' has no value.\n    xla_a\n    ^^^^^\n{XLA}"),
        (["=true"], f"--xla: '=true' has no name.\n    =true\n    ^^^^^\n{XLA}"),
        ([""], f"--xla: '' has no value.\n    \n    ^\n{XLA}"),
        (["xla_a=1", "xla_a=1"], f"--xla: 'xla_a' is set twice.\n    xla_a=1\n    ^^^^^\n{XLA}"),
    ],
)
def test_options_of_a_compiler_that_are_none(given, message):
    with pytest.raises(InputError) as refused:
        compiler_options([given])
    assert str(refused.value) == message
