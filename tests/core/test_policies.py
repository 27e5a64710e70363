"""Policies of recomputation: their notation, what a layer keeps under them, and what it makes again."""

from __future__ import annotations

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.findings.position import located
from shardwright.core.policies.policy import read_policy
from shardwright.core.policies.reading import read_policy_file
from shardwright.core.policies.runs import check_policy, runs_of
from shardwright.models import build

LLAMA, DEEPSEEK = build("llama3-test", {"num_layers": "4"}), build("deepseek3-test", {})


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "dots",
        "none",
        "keep=attention.output,mlp.gate",
        "dots,host=residual.stream,recompute=attention.keys",
        "full@:2+none",
        "keep=mlp.gate@moe_layers+dots@::2+full",
        "none,recompute=weights@3:4+full",
    ],
)
def test_a_policy_is_its_text(text: str) -> None:
    assert read_policy(text).text == text


def test_a_file_says_the_same_as_a_text() -> None:
    parts = [
        {"layers": "0:2", "base": "dots", "keep": ["attention.output"], "host": "residual.stream"},
        {"layers": "moe_layers", "recompute": ["mlp.gate"]},
        {"base": "none"},
    ]
    text = "dots,keep=attention.output,host=residual.stream@:2+recompute=mlp.gate@moe_layers+none"
    assert read_policy_file(located({"policy": parts})) == read_policy(text)


def test_layers_take_the_first_part_that_has_them() -> None:
    runs = runs_of(LLAMA, "none@1:3+dots@::3")
    assert [(run.layers, run.keeps_all, "mlp.gate" in run.saved) for run in runs] == [
        (range(1), False, True),
        (range(1, 3), True, True),
        (range(3, 4), False, True),
    ]
    # Layers are numbered through the model, and shown by stack.
    dense = runs_of(DEEPSEEK, "none@:1+full")[0]
    assert (dense.stack, dense.keeps_all) == ("dense_layers", True)


def test_only_what_is_read_is_saved_and_only_what_is_not_kept_is_made_again() -> None:
    (run,) = runs_of(LLAMA, "keep=attention.queries,attention.attended,attention.projected,mlp.projected")
    # No backward pass reads the output of a layer's last product, and the sum over both parts is made of what is kept.
    assert run.saved == {"residual.stream", "attention.queries", "attention.attended", "attention.projected"}
    assert {"attention.queries", "attention.attended", "attention.projected", "mlp.projected"}.isdisjoint(run.again)
    assert {"attention.keys", "attention.input", "residual.middle", "mlp.hidden"} <= run.again
    (other,) = runs_of(LLAMA, "none,recompute=mlp.hidden")
    assert (other.again, other.gathers_again) == ({"mlp.hidden"}, False)
    (hosted,) = runs_of(LLAMA, "host=residual.stream")
    assert (hosted.saved, hosted.hosted) == (frozenset(), {"residual.stream"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fulll",
            "remat is 'fulll', and must be one of full, dots, none, or a policy. Did you mean 'full'? A policy is full, dots or none; or "
            "names of activations, as keep=attention.output,host=residual.stream; or several for some layers each, as full@0:16+none.",
        ),
        ("keep=attention.outptu", "--remat: no activation of llama3-test is called 'attention.outptu'. Did you mean 'attention.output'?"),
        ("keep=", "remat 'keep=': 'keep=' needs names of activations, as keep=attention.output."),
        ("kep=mlp.gate", "remat 'kep=mlp.gate': there is no 'kep='. Did you mean 'keep'?"),
        (
            "keep=mlp.gate,host=mlp.gate",
            "remat 'keep=mlp.gate,host=mlp.gate': 'mlp.gate' is under 'keep' and under 'host'. Leave it out of one of them.",
        ),
        (
            "recompute=residual.stream",
            "remat 'recompute=residual.stream': 'residual.stream' is the input of a layer, from which all else is made again. Keep it, or "
            "put it on the host: host=residual.stream.",
        ),
        ("host=weights", "remat 'host=weights': gathered weights are kept on the device or gathered again. Give keep=weights or leave them out."),
        ("none+full", "remat: 'none' is for all layers, so that 'full' after it has none. Say for which layers it is, as none@0:16, or put it last."),
        ("none@2:9", "remat: '2:9' ends at layer 9, and llama3-test has 4. End at 4."),
        (
            "none@7:9",
            "remat: '7:9' is no layer of llama3-test, which has 4 layers, numbered from 0, in 'layers' (0:4). Give some of these, as 0:2.",
        ),
        (
            "none@moe_layers",
            "remat: 'moe_layers' is no layer of llama3-test, which has 4 layers, numbered from 0, in 'layers' (0:4). Give some of these, "
            "as 0:2.",
        ),
        ("none@3:1", "remat 'none@3:1': '3:1' has no layer. Give a slice of some, as 0:16 or ::2."),
        (
            "none@layers+dots@0:2",
            "--remat: 'dots@:2' has no layer of llama3-test: each of ':2' has a part before it. Leave one of them out.",
        ),
        ("full,full", "remat 'full,full': 'full' is a policy by name, which stands first and once. Leave it out here."),
        (
            "full@0+",
            "remat 'full@0+': a policy is missing. A policy is full, dots or none; or names of activations, as "
            "keep=attention.output,host=residual.stream; or several for some layers each, as full@0:16+none.",
        ),
        ("none@x-y", "remat 'none@x-y': 'x-y' names no layers. Give a slice, as 0:16 or ::2, a number, or a stack, as moe_layers."),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        check_policy(LLAMA, text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polcy": []}, "a policy is a mapping with one key, 'policy', and a list of parts under it."),
        ({"policy": []}, "the policy has no part. Give one, as - base: dots."),
        ({"policy": [{"kep": []}]}, "'kep' is no key of a policy. Did you mean 'keep'?"),
        ({"policy": [{"base": "ful"}]}, "'ful' is no policy by name. Did you mean 'full'? Names of activations are listed under 'keep'."),
        ({"policy": [{"keep": [3]}]}, "'keep' lists names of activations, as attention.output."),
    ],
)  # fmt: skip
def test_a_file_that_has_no_policy_is_refused_with_its_place(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_policy_file(located(values, "own.yaml"))
    assert str(error.value) == f"own.yaml:1:1: {message}"
