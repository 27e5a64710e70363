"""The tables: published sizes, and consistent rows."""

import subprocess
import sys
import time

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.core.layout.roles import COMPONENTS, LOGICAL_AXES
from shardwright.core.model.table import ModelTable, as_torch_stores
from shardwright.models import build, names

# Trained parameters. Full sizes: as counted by transformers for the published configs (8.03 B, 70.6 B, ...).
COUNTS = {
    "llama3-test": 6_163_712,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-test": 3_871_872,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek3-test": 3_620_160,
    "deepseek3-16b": 15_706_484_224,
    "deepseek3-671b": 671_026_404_352,
}
GIVEN_BY_REQUEST = {"batch", "length", "kv_length", "q_length", "groups", "tokens", "slots"}

TABLES = [build(name) for name in names()]


@pytest.fixture(params=TABLES, ids=lambda table: table.name)
def table(request: pytest.FixtureRequest) -> ModelTable:
    return request.param


def test_parameter_counts() -> None:
    assert {table.name: table.num_parameters for table in TABLES} == COUNTS


def test_rows_have_known_components_and_axes(table: ModelTable) -> None:
    for row in (*table.weights, *table.activations):
        assert row.component in COMPONENTS, row.name
        assert set(row.logical_axes) <= set(LOGICAL_AXES), row.name
        assert len(set(row.logical_axes)) == len(row.logical_axes), row.name
    row_names = [row.name for row in (*table.weights, *table.activations)]
    assert len(set(row_names)) == len(row_names)


def test_every_activation_has_a_size_along_every_axis(table: ModelTable) -> None:
    for row in table.activations:
        for name in set(row.logical_axes) - GIVEN_BY_REQUEST:
            assert table.size(row, name) > 0, (row.name, name)


def test_weights_name_only_what_they_and_the_model_have(table: ModelTable) -> None:
    dims = {(row.component, name) for row in table.activations for name in row.logical_axes}
    for weight in table.weights:
        assert set(weight.storage) <= set(weight.logical_axes), weight.name
        assert set(weight.contracted) <= dims, (weight.name, set(weight.contracted) - dims)
        assert bool(weight.contracted) != weight.frozen, weight.name
        assert bool(weight.storage) == (len(weight.shape) > 1), weight.name
        assert as_torch_stores(weight).num_parameters == weight.num_parameters


def test_moves_link_rows_of_one_shape(table: ModelTable) -> None:
    rows = {row.name: row for row in table.activations}
    for move in table.moves:
        # Token-expert assignments on the one side are slots of experts on the other.
        source, target = rows[move.source], rows[move.target]
        # A row consists of groups of tokens: where it is split or merged, one side has the dim of groups too.
        if move.kind in ("dispatch", "combine"):
            assert {"batch", "groups", "embed"} <= set(source.logical_axes) & set(target.logical_axes), move
            continue
        renamed = {(move.renamed or {}).get(name, name) for name in source.logical_axes} - {"tokens"}
        assert renamed == set(target.logical_axes) - {"tokens"}, move
        sizes = [{n: table.size(row, n) for n in row.logical_axes if n in table.sizes} for row in (source, target)]
        assert sorted(sizes[0].values()) == sorted(sizes[1].values()), move


def test_layers_of_all_stacks_are_the_model(table: ModelTable) -> None:
    norms = [weight for weight in table.weights if weight.name.endswith(".attention_norm")]
    layers = [norm.first_layer + index for norm in norms for index in range(norm.num)]
    assert layers == list(range(table.num_layers))


def test_natural_batch_fits_the_natural_mesh(table: ModelTable) -> None:
    mesh = table.natural_mesh
    assert mesh is not None
    assert table.natural_batch is not None
    assert table.natural_batch % (mesh.get("data", 1) * mesh["fsdp"]) == 0


def test_test_sizes_are_those_of_the_peers() -> None:
    llama, mixtral, deepseek = (build(f"{family}-test") for family in ("llama3", "mixtral", "deepseek3"))
    assert (llama.num_layers, llama.sizes["embed"], llama.sizes["mlp"], llama.sizes["vocab"]) == (6, 256, 768, 2048)
    assert llama.weight("layers.attention.k").shape == (256, 16, 16)
    assert mixtral.weight("layers.attention.k").shape == (128, 4, 16)
    assert mixtral.weight("layers.moe.gate").shape == (8, 128, 256)
    assert deepseek.weight("moe_layers.moe.gate").shape == (16, 128, 128)
    assert deepseek.weight("dense_layers.mlp.gate").shape == (128, 256)
    assert deepseek.weight("moe_layers.attention.q_up").shape == (32, 4, 192)
    assert deepseek.weight("moe_layers.attention.kv_down").shape == (128, 80)
    assert deepseek.weight("moe_layers.attention.kv_up").shape == (16, 4, 256)
    assert (deepseek.weight("dense_layers.mlp.gate").num, deepseek.weight("moe_layers.moe.gate").num) == (1, 3)


def test_tied_embedding_is_one_weight_with_two_uses() -> None:
    table = build("llama3-1b")
    embedding = table.weight("embedding.tokens")
    assert embedding.uses == ("logits",)
    assert {component for component, _ in embedding.contracted} == {"embedding", "logits"}
    assert "logits.kernel" not in {weight.name for weight in table.weights}


def test_overrides_are_typed() -> None:
    table = build("deepseek3-test", {"num_layers": "2", "q_lora": "none", "capacity_factor": "1.5", "rope.factor": "8"})
    assert table.num_layers == 2
    assert table.capacity_factor == 1.5
    assert table.architecture.rope.factor == 8.0
    assert table.weight("moe_layers.attention.q").shape == (128, 4, 192)
    stretched = build("llama3-test", {"rope.low_freq_factor": "5", "rope.high_freq_factor": "6"}).architecture.rope
    assert (stretched.low_freq_factor, stretched.high_freq_factor) == (5.0, 6.0)
    assert build("llama3-8b", {"tied": "true"}).num_parameters == COUNTS["llama3-8b"] - 4096 * 128_256


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("deepseek3-671", {}, "no model 'deepseek3-671'. Did you mean 'deepseek3-671b'?"),
        (
            "llama3-test",
            {"num_layer": "2"},
            "llama3-test with --set num_layer=2: no dimension 'num_layer'. Did you mean 'num_layers'?",
        ),
        (
            "llama3-test",
            {"rope.thet": "1"},
            "llama3-test with --set rope.thet=1: no dimension 'rope.thet'. Did you mean 'rope.theta'?",
        ),
        (
            "llama3-test",
            {"embed": "wide"},
            "llama3-test with --set embed=wide: embed is 'wide', and must be a whole number.",
        ),
        ("llama3-test", {"tied": "si"}, "llama3-test with --set tied=si: tied is 'si', and must be true or false."),
        (
            "llama3-test",
            {"rope.kind": "linear"},
            "llama3-test with --set rope.kind=linear: rope.kind is 'linear', and must be one of default, llama3, yarn.",
        ),
        (
            "llama3-test",
            {"num_heads": "6", "num_kv_heads": "4"},
            "llama3-test with --set num_heads=6 num_kv_heads=4: num_heads is 6, and must be a multiple of "
            "num_kv_heads, which is 4.",
        ),
        (
            "mixtral-test",
            {"top_k": "9"},
            "mixtral-test with --set top_k=9: top_k is 9, and must not be above num_experts, which is 8.",
        ),
        (
            "deepseek3-671b",
            {"num_layers": "2"},
            "deepseek3-671b with --set num_layers=2: num_dense_layers is 3, and must not be above num_layers, "
            "which is 2.",
        ),
        (
            "deepseek3-test",
            {"num_layers": "0"},
            "deepseek3-test with --set num_layers=0: num_layers is 0, and must be above 0.",
        ),
        (
            "mixtral-test",
            {"capacity_factor": "nan"},
            "mixtral-test with --set capacity_factor=nan: capacity_factor is 'nan', and must be a number that is finite.",
        ),
        *(
            (
                "llama3-test",
                {key: text},
                f"llama3-test with --set {key}={text}: {key} is {float(text)}, and must be above {least}.",
            )
            for key, text, least in (
                ("rope.theta", "-1", 1),
                ("rope.theta", "1", 1),
                ("rope.factor", "0", 0),
                ("norm_eps", "-1", 0),
                ("initializer_stddev", "-1", 0),
            )
        ),
        (
            "llama3-test",
            {"rope.low_freq_factor": "5", "rope.high_freq_factor": "5"},
            "llama3-test with --set rope.low_freq_factor=5 rope.high_freq_factor=5: rope.high_freq_factor is 5.0, and must "
            "be above rope.low_freq_factor, which is 5.0.",
        ),
        (
            "llama3-test",
            {"rope": "1"},
            "llama3-test with --set rope=1: no dimension 'rope'. Did you mean 'rope.kind'?",
        ),
        (
            "llama3-test",
            {"__class__.embeds": "1"},
            "llama3-test with --set __class__.embeds=1: no dimension '__class__.embeds'. Known: embed, head_dim, "
            "initializer_stddev, mlp, norm_eps, num_heads, num_kv_heads, num_layers, rope.beta_fast, rope.beta_slow, "
            "rope.factor, rope.high_freq_factor, rope.interleaved, rope.kind, rope.low_freq_factor, rope.mscale, "
            "rope.mscale_all_dim, rope.original_length, rope.theta, tied, vocab, window.",
        ),
    ],
)
def test_invalid_overrides_are_refused(model: str, overrides: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as error:
        build(model, overrides)
    assert str(error.value) == message


def test_a_table_is_built_in_milliseconds_without_a_framework() -> None:
    started = time.perf_counter()
    for name in names():
        build(name)
    assert (time.perf_counter() - started) / len(names()) < 0.010
    program = (
        "import sys, shardwright.models as m; m.build('deepseek3-671b');"
        "print(sorted({'jax', 'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
