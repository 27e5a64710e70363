"""TorchTitan's degrees: the ranks of its groups, the equivalent layout, and each finding."""

from __future__ import annotations

import json
from itertools import product
from math import prod

import pytest

from shardwright import FindingsError, Request, make_plan
from shardwright.interop.layout_text import layout_text
from shardwright.interop.torchtitan.degrees import Degrees
from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan
from shardwright.interop.torchtitan.layout import layout_of, mesh_axes_of, mesh_of, rank_groups
from shardwright.models import build

SIXTEEN = {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}


def degrees(ep: int = 1, *, sequence_parallel: bool = True, **sizes: int) -> Degrees:
    return Degrees(sizes={**dict.fromkeys(SIXTEEN, 1), **sizes}, ep=ep, sequence_parallel=sequence_parallel)


def groups_of(given: Degrees, rank: int = 0):
    axes = mesh_axes_of(given)
    assert axes is not None
    return rank_groups(mesh_of(axes), axes, rank)


def test_groups_of_rank_0_are_those_that_torchtitan_prints():
    """16 ranks, as TorchTitan's own ParallelDims printed them."""
    assert dict(groups_of(degrees(ep=4, **SIXTEEN))) == {
        "pp": (0,),
        "dp_replicate": (0, 8),
        "dp_shard": (0, 4),
        "cp": (0, 2),
        "tp": (0, 1),
        "batch": (0, 4, 8, 12),
        "loss": (0, 2, 4, 6, 8, 10, 12, 14),
        "ep": (0, 1, 2, 3),
        "efsdp": (0, 4),
    }


def test_experts_may_borrow_a_factor_of_tensor_parallel():
    found = groups_of(degrees(ep=2, tp=8))
    assert (found["ep"], found["efsdp"]) == ((0, 1), (0, 2, 4, 6))


def test_hybrid_sharding_has_adjacent_ranks_in_a_shard_group():
    found = groups_of(degrees(dp_replicate=4, dp_shard=2))
    assert (found["dp_shard"], found["dp_replicate"]) == ((0, 1), (0, 2, 4, 6))


def unflattened(world: int, shape: tuple[int, ...], axis: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` only along some axes of a row-major mesh: a slice of a DeviceMesh."""
    steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
    here = [rank // step % size for step, size in zip(steps, shape, strict=True)]
    spans = [range(size) if i in axis else (at,) for i, (size, at) in enumerate(zip(shape, here, strict=True))]
    found = sorted(sum(at * step for at, step in zip(each, steps, strict=True)) for each in product(*spans))
    assert found[-1] < world
    return tuple(found)


@pytest.mark.parametrize("ep", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("sizes", [(1, 2, 2, 2, 4), (2, 1, 4, 1, 4), (1, 1, 8, 2, 1), (1, 2, 1, 4, 4), (2, 2, 2, 2, 2)])
def test_groups_of_every_rank_are_slices_of_the_two_views(sizes, ep):
    """Dense: pp, dp_replicate, dp_shard, cp, tp. Sparse: pp, dp_replicate, efsdp, ep."""
    borrowable = prod(sizes[2:])
    if borrowable % ep:
        assert mesh_axes_of(degrees(ep=ep, **dict(zip(SIXTEEN, sizes, strict=True)))) is None
        return
    given = degrees(ep=ep, **dict(zip(SIXTEEN, sizes, strict=True)))
    world, sparse = prod(sizes), (sizes[0], sizes[1], borrowable // ep, ep)
    dense = {
        "pp": (0,),
        "dp_replicate": (1,),
        "dp_shard": (2,),
        "cp": (3,),
        "tp": (4,),
        "batch": (1, 2),
        "loss": (1, 2, 3),
    }
    for rank in range(world):
        found = groups_of(given, rank)
        for name, axis in dense.items():
            assert found[name] == unflattened(world, sizes, axis, rank), (name, rank)
        assert found["ep"] == unflattened(world, sparse, (3,), rank)
        assert found["efsdp"] == unflattened(world, sparse, (2,), rank)


def layout_lines(given: Degrees) -> list[str]:
    axes = mesh_axes_of(given)
    assert axes is not None
    text = layout_text(layout_of(given, axes, "mine"))
    return text[text.index("mesh") :].splitlines()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (degrees(dp_shard=8), ["mesh: {dp_shard: 8}", "roles:", "  dp_shard: fsdp"]),
        (
            degrees(dp_replicate=2, dp_shard=4, pp=2),
            [
                "mesh: {pp: 2, dp_replicate: 2, dp_shard: 4}",
                "roles:",
                "  pp:           stage",
                "  dp_replicate: data",
                "  dp_shard:     fsdp",
            ],
        ),
        (
            degrees(dp_shard=2, cp=2, tp=2, sequence_parallel=False),
            [
                "mesh: {dp_shard: 2, cp: 2, tp: 2}",
                "roles:",
                "  dp_shard: fsdp",
                "  cp:       context",
                "  tp:       tensor",
            ],
        ),
        (
            degrees(ep=2, dp_shard=8),
            [
                "mesh: {dp_shard_mod_ep: 4, dp_shard_in_ep: 2}",
                "roles:",
                "  dp_shard_mod_ep: fsdp",
                "  dp_shard_in_ep:  {elsewhere: fsdp, moe: expert}",
            ],
        ),
        (
            degrees(ep=4, dp_shard=4, tp=2),
            [
                "mesh: {dp_shard_mod_ep: 2, dp_shard_in_ep: 2, tp: 2}",
                "roles:",
                "  dp_shard_mod_ep: fsdp",
                "  dp_shard_in_ep:  {elsewhere: fsdp, moe: expert}",
                "  tp:              {elsewhere: tensor, router: context, moe: expert, weights: whole, sequence_parallel: true}",
            ],
        ),
        (
            degrees(ep=2, dp_shard=2, tp=4),
            [
                "mesh: {dp_shard: 2, tp_mod_ep: 2, tp_in_ep: 2}",
                "roles:",
                "  dp_shard:  fsdp",
                "  tp_mod_ep: {elsewhere: tensor, router: context, moe: context, sequence_parallel: true}",
                "  tp_in_ep:  {elsewhere: tensor, router: context, moe: expert, sequence_parallel: true}",
                "rules:",
                "  router: {scores: [dp_shard]}",
            ],
        ),
    ],
)
def test_layout(given, expected):
    assert layout_lines(given) == expected


def test_experts_are_stored_where_torchtitan_stores_them():
    """Experts over ep, then efsdp; other weights over dp_shard and cp, and tp where it shards them; the router not over tp."""
    given = degrees(ep=4, **SIXTEEN)
    axes = mesh_axes_of(given)
    assert axes is not None
    layout, table = layout_of(given, axes, "mine"), build("mixtral-test")
    plan = make_plan(Request(layout=layout, table=table, batch=16, length=64, engine="torch"))
    at_rest = {row.name: str(row.at_rest) for row in plan.weights}
    assert at_rest["layers.moe.up"] == "experts/cp/tp/dp_shard mlp embed"
    assert at_rest["layers.attention.q"] == "heads/tp/dp_shard/cp embed"
    assert at_rest["layers.attention.o"] == "embed/dp_shard/cp heads/tp"
    assert at_rest["layers.router.kernel"] == "scores/dp_shard/cp embed"
    assert at_rest["embedding.tokens"] == "vocab/tp/dp_shard/cp embed"
    # cp shards the tokens of a row; between the layers tp does too, and each rank routes its own tokens.
    assert str(plan.by_name["residual.stream"].in_use) == "batch/dp_replicate/dp_shard length/cp/tp embed"
    assert not plan.errors


def found_in(tmp_path, text: str, **options):
    (tmp_path / "a.toml").write_text(text)
    try:
        return import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.toml"), **options)).findings
    except FindingsError as error:
        return error.findings


@pytest.mark.parametrize(
    ("text", "options", "code", "found", "fix"),
    [
        (
            "tensor_parallel_degree = 16\n",
            {"devices": 8},
            "SW106",
            "tp 16, which does not divide 8 ranks: TorchTitan rounds dp_shard down to 0",
            "",
        ),
        (
            "data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\nexpert_parallel_degree = 4\n",
            {"devices": 32},
            "SW106",
            "dp_shard 4 x tp 2 = 8; ep has no ranks of its own",
            "Write 'data_parallel_shard_degree = 16'.",
        ),
        ("context_parallel_degree = 0\n", {}, "SW106", "degree 0", ""),
        (
            "data_parallel_shard_degree = 6\nexpert_parallel_degree = 4\n",
            {},
            "SW109",
            "4, which does not divide the ranks it borrows from: dp_shard 6 x cp 1 x tp 1 = 6",
            "Write 'expert_parallel_degree = 3'.",
        ),
        (
            "data_parallel_shard_degree = 16\nexpert_parallel_degree = 16\n",
            {"model": "mixtral-test", "batch": 16},
            "SW109",
            "8 experts of mixtral-test over ep 16",
            "Write 'expert_parallel_degree = 8'.",
        ),
        (
            "data_parallel_shard_degree = 8\nexpert_parallel_degree = 2\n",
            {"model": "llama3-test"},
            "SW109",
            "2, and llama3-test has no experts: it has no effect",
            "",
        ),
        (
            "data_parallel_shard_degree = 8\nexpert_tensor_parallel_degree = 2\n",
            {},
            "SW109",
            "2, and tensor parallelism no longer shards experts (pytorch/torchtitan #3167)",
            "Take 'expert_tensor_parallel_degree' out.",
        ),
        (
            "data_parallel_shard_degree = 8\ntensor_paralel_degree = 2\n",
            {},
            "SW111",
            "TorchTitan has no option 'tensor_paralel_degree'",
            "Write 'tensor_parallel_degree'.",
        ),
        (
            "data_parallel_shard_degree = 8\nfsdp_reshard_after_forward = 'nver'\n",
            {},
            "SW111",
            "'nver'",
            "Write 'never'.",
        ),
        # The suggestion is of the same kind: no degree for an option, and no option with the opposite meaning.
        (
            "data_parallel_shard_degree = 8\nenable_loss_parallel = true\n",
            {},
            "SW111",
            "TorchTitan has no option 'enable_loss_parallel'",
            "",
        ),
        (
            "data_parallel_shard_degree = 3\ntensor_parallel_degree = 4\nexpert_parallel_degree = 6\n",
            {},
            "SW123",
            "ep 6 takes the innermost ranks of dp_shard 3 x cp 1 x tp 4, which are no box of the mesh: no mesh "
            "axes shard the experts so",
            "",
        ),
        (
            "data_parallel_shard_degree = 4\ntensor_parallel_degree = 8\n",
            {"model": "llama3-8b", "settings": {"num_kv_heads": "4"}},
            "SW107",
            "4 KV heads over tp 8: 0.5 of a KV head on each device; layers.attention.k and 1 more weight",
            None,
        ),
    ],
)
def test_findings(tmp_path, text, options, code, found, fix):
    own = [finding for finding in found_in(tmp_path, f"[parallelism]\n{text}", **options) if finding.code == code]
    assert found in [finding.found for finding in own]
    finding = next(each for each in own if each.found == found)
    if fix is not None:
        assert finding.fix == fix
        assert finding.position is not None
        assert (
            text.splitlines()[finding.position.line - 2].split(" =")[0] in finding.where or "product" in finding.where
        )
    if fix and fix.startswith("Write 'expert"):
        degree = fix.removeprefix("Write '").removesuffix("'.")
        mended = "".join(
            f"{degree}\n" if each.startswith("expert_parallel") else each for each in text.splitlines(keepends=True)
        )
        assert code not in [each.code for each in found_in(tmp_path, f"[parallelism]\n{mended}", **options)]


def test_dp_shard_gets_the_remaining_ranks(tmp_path):
    (tmp_path / "a.toml").write_text("[parallelism]\ntensor_parallel_degree = 2\n")
    request = TorchTitanRequest(file=str(tmp_path / "a.toml"), devices=8)
    assert import_torchtitan(request).degrees.sizes["dp_shard"] == 4
    named = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.toml"), model="llama3-8b"))
    assert (named.degrees.sizes["dp_shard"], dict(named.chosen)) == (8, {"--devices": "16"})


def test_full_text_of_a_degree_that_does_not_divide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[parallelism]\ndata_parallel_shard_degree = 6\nexpert_parallel_degree = 4\n")
    (finding,) = import_torchtitan(TorchTitanRequest(file="a.toml")).findings
    assert finding.text() == (
        """\
error SW109: The ranks that hold experts divide the experts, and the ranks that they are borrowed from.
  where  a.toml:3:1: 'expert_parallel_degree'
  found  4, which does not divide the ranks it borrows from: dp_shard 6 x cp 1 x tp 1 = 6
  needed 1, 2, 3 or 6
  fix    Write 'expert_parallel_degree = 3'."""
    )


def test_full_text_of_ranks_that_are_no_box(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(
        "[parallelism]\ndata_parallel_shard_degree = 3\ntensor_parallel_degree = 4\nexpert_parallel_degree = 6\n"
    )
    found = import_torchtitan(TorchTitanRequest(file="a.toml"))
    assert found.layout is None
    assert found.findings[0].text() == (
        """\
error SW123: What is translated to another language means the same there, or is reported not to.
  where  a.toml:4:1: 'expert_parallel_degree'
  found  ep 6 takes the innermost ranks of dp_shard 3 x cp 1 x tp 4, which are no box of the mesh: no mesh axes shard the experts so
  needed a degree that takes full axes and a divisor of the next"""
    )


@pytest.mark.parametrize(
    ("training", "degrees", "step"),
    [
        # rows, tokens of a row, passes, microbatches of a pipeline
        ({"num_tokens_per_microbatch_per_dp_rank": 16384, "max_context_length": 8192}, {}, (16, 8192, 1, 1)),
        ({"num_tokens_per_train_step": 4 * 8 * 16384, "max_context_length": 4096}, {}, (128, 4096, 4, 1)),
        ({"num_tokens_per_microbatch_per_dp_rank": 4096}, {"pp": 2, "num_pp_microbatches": 4}, (64, 2048, 1, 4)),
        ({"local_batch_size": 3, "seq_len": 4096}, {"dp_replicate": 2}, (48, 4096, 1, 1)),
        ({"batch_size": 2}, {}, (16, 2048, 1, 1)),
        ({"local_batch_size": 4, "global_batch_size": 64}, {}, (64, 2048, 2, 1)),
        ({"local_batch_size": 4, "global_batch_size": -1}, {"pp": 2}, (32, 2048, 1, 4)),
        ({"num_tokens_per_microbatch_per_dp_rank": 1000, "max_context_length": 3000}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_batch_is_that_of_one_data_parallel_rank(tmp_path, training, degrees, step):
    options = {"data_parallel_shard_degree": 8, "tensor_parallel_degree": 2, "context_parallel_degree": 2}
    for name, value in degrees.items():
        options[
            {"pp": "pipeline_parallel_degree", "dp_replicate": "data_parallel_replicate_degree"}.get(name, name)
        ] = value
    (tmp_path / "a.json").write_text(json.dumps({"parallelism": options, "training": training}))
    found = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.json")))
    rows = found.rows
    assert (rows and (rows.batch, rows.length, rows.passes, rows.microbatches_of_pass)) == step
    keys = ["batch", "length", "passes", "microbatches", "ranks"]
    assert found.to_json()["step"] == (rows and dict(zip(keys, [*(step or ()), rows.ranks], strict=True)))
    planned = import_torchtitan(
        TorchTitanRequest(file=str(tmp_path / "a.json"), model="llama3-8b", settings={"num_layers": "2"})
    ).plan
    assert planned is not None
    if step is not None:
        assert (planned.request.batch, planned.request.length) == step[:2]
        assert planned.request.microbatches == step[2] * step[3]


def test_full_text_of_a_step_that_is_no_multiple_of_a_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(
        "[parallelism]\ndata_parallel_shard_degree = 8\n[training]\nlocal_batch_size = 4\nglobal_batch_size = 48\n"
    )
    (finding,) = import_torchtitan(TorchTitanRequest(file="a.toml")).findings
    assert finding.text() == (
        """\
error SW108: The axes that shard the batch divide its rows; those that shard the length, its tokens.
  where  a.toml:5:1: 'global_batch_size'
  found  48 in a step, where a pass of all ranks has 4 x 8 data-parallel ranks = 32
  needed a multiple of 32
  fix    Write 'global_batch_size = 32'."""
    )


def test_the_files_own_model_is_planned_where_we_have_it(tmp_path):
    text = """\
from torchtitan.models.llama3 import model_registry

def mine():
    return Trainer.Config(model_spec=model_registry("8B"{options}))
"""
    (tmp_path / "a.py").write_text(text.format(options=', attn_backend="flex"'))
    found = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.py")))
    assert (found.model, found.plan and found.plan.request.table.name) == (("llama3", "8B"), "llama3-8b")
    (tmp_path / "a.py").write_text(text.format(options=", converters=[LoRAConverter.Config(rank=8)]"))
    found = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.py")))
    assert (found.model, found.plan) == (("llama3", "8B"), None)


def test_ranks_are_chosen_that_experts_can_borrow(tmp_path):
    """dp_shard -1 and ep 8: 8 ranks, since ep cannot borrow 8 of 1."""
    (tmp_path / "a.toml").write_text("[parallelism]\nexpert_parallel_degree = 8\ntensor_parallel_degree = 2\n")
    found = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.toml")))
    assert (dict(found.chosen), found.findings) == ({"--devices": "8"}, ())
    assert found.degrees.sizes["dp_shard"] == 4
