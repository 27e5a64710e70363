"""MaxText's policies of recomputation as ours, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright import InputError, Request, load_layout, make_plan
from shardwright.interop.maxtext.export import export_maxtext
from shardwright.interop.maxtext.importing import MaxTextImport, import_maxtext
from shardwright.interop.maxtext.sources import MaxTextRequest
from shardwright.models import build
from tests.interop.rule_files import CLEAN

QKV = "attention.queries,attention.keys,attention.values"


def imported(folder: Path, settings: str, model: str = "llama3-test") -> MaxTextImport:
    file = folder / "rules.yml"
    file.write_text(CLEAN + settings, encoding="utf-8")
    return import_maxtext(MaxTextRequest(file=str(file), model=model, batch=8, length=64))


@pytest.mark.parametrize(
    ("settings", "model", "remat"),
    [
        ("", "llama3-test", None),
        ("remat_policy: full\n", "llama3-test", "full"),
        ("remat_policy: save_qkv_proj\n", "llama3-test", f"keep={QKV}"),
        (
            "remat_policy: minimal_with_context\n",
            "llama3-test",
            f"keep={QKV},attention.attended,attention.projected,mlp.gate,mlp.up,mlp.projected",
        ),
        ("remat_policy: qkv_proj_offloaded\n", "llama3-test", f"host={QKV}"),
        # What recipes of TPUs set: the rest of a custom policy is made again, but the input of a layer.
        (
            "remat_policy: custom\ndecoder_layer_input: offload\nquery_proj: offload\nout_proj: device\nmlpwo: remat\n",
            "llama3-test",
            "keep=attention.projected,host=residual.stream,attention.queries",
        ),
        (
            "remat_policy: custom\nmlpwi_0: device\nmoe_mlpwi_1: device\nkey_proj: device\nkv_wa_proj: device\n",
            "deepseek3-test",
            "keep=attention.keys_attended,attention.latent,mlp.gate,shared.gate,moe.up",
        ),
    ],
)
def test_a_policy_keeps_what_maxtext_keeps(tmp_path: Path, settings: str, model: str, remat: str | None) -> None:
    assert imported(tmp_path, settings, model).remat == remat


def test_an_unknown_policy_is_a_finding_with_the_nearest_one(tmp_path: Path) -> None:
    for settings, found in (
        ("remat_policy: minmal\n", ("'minmal'", "Did you mean 'minimal'?")),
        ("remat_policy: custom\ncontext: host\n", ("'host'", "Write one of remat, device, offload.")),
    ):
        (finding,) = [one for one in imported(tmp_path, settings).findings if one.severity == "error"]
        assert (finding.code, finding.found, finding.fix) == ("SW111", *found)


@pytest.mark.parametrize("remat", ["keep=attention.attended,mlp.gate", f"host=residual.stream,{QKV}"])
def test_what_is_written_is_read_again(tmp_path: Path, remat: str) -> None:
    plan = make_plan(
        Request(layout=load_layout("fsdp"), table=build("llama3-test"), devices=8, batch=8, length=64, remat=remat)
    )
    file = tmp_path / "rules.yml"
    file.write_text(export_maxtext(plan).text, encoding="utf-8")
    found = import_maxtext(MaxTextRequest(file=str(file), model="llama3-test", batch=8, length=64))
    assert found.remat == remat


@pytest.mark.parametrize(
    ("remat", "message"),
    [
        (
            "none@0:1+full",
            "MaxText has one policy for all layers, and --remat is 'none@0:1+full'. Give one for all.",
        ),
        (
            "dots",
            "MaxText's custom policy is a list of what is kept, and --remat is 'dots'. Give keep= and host= alone.",
        ),
        (
            "keep=residual.middle",
            "MaxText has no name for 'residual.middle', so that no policy of it can keep that alone.",
        ),
    ],
)
def test_what_maxtext_cannot_say_is_refused(remat: str, message: str) -> None:
    request = Request(layout=load_layout("fsdp"), table=build("llama3-test"), devices=8, batch=8, length=64)
    with pytest.raises(InputError) as error:
        export_maxtext(make_plan(replace(request, remat=remat)))
    assert str(error.value) == message
