"""The model of a MaxText file: exactly that model, or a refusal with its name; never a similar one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright import InputError
from shardwright.interop.maxtext.importing import placed_for
from shardwright.interop.maxtext.model import model_of
from shardwright.interop.maxtext.reading.model_vocabulary import DECODERS, MODEL_NAMES, OTHER_DECODERS
from shardwright.interop.maxtext.reading.vocabulary import MODELS
from shardwright.interop.maxtext.sources import MaxTextRequest, read_configuration
from shardwright.models import build
from tests.interop.maxtext_facts import FACTS, write_configs
from tests.interop.maxtext_page import PAGE, Outcome, outcomes, page
from tests.interop.rule_files import CLEAN, PRESET, line

DENSE = """\
decoder_block: "llama2"
base_num_decoder_layers: 2
base_emb_dim: 64
base_num_query_heads: 4
base_num_kv_heads: 2
head_dim: 16
base_mlp_dim: 128
vocab_size: 32_000
"""
EXPERTS = DENSE.replace("llama2", "mixtral") + "num_experts: 4\nnum_experts_per_tok: 2\n"
LATENT = EXPERTS.replace("mixtral", "deepseek") + (
    "attention_type: mla\nbase_moe_mlp_dim: 32\nfirst_num_dense_layers: 1\nshared_experts: 1\nq_lora_rank: 24\n"
    "kv_lora_rank: 16\nrouted_bias: true\nrouted_score_func: sigmoid\n"
)


@pytest.fixture(scope="module")
def found_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes(write_configs(tmp_path_factory.mktemp("maxtext") / "configs"))


@pytest.mark.parametrize("name", FACTS["files"])
def test_a_file_is_the_model_that_it_is_or_none(name: str, found_of: dict[str, Outcome]) -> None:
    """It has as many parameters as in MaxText; a refusal names what we lack."""
    result, found = found_of[name]
    decoder = FACTS["files"][name].get("decoder_block")
    if found is None:
        assert result.startswith("refused: ")
        assert name == "post_train/rl.yml" or decoder not in DECODERS or "which no table of ours has" in result
    else:
        # MaxText has a file of this model but no longer accepts its name.
        like = "models/llama3.1-405b.yml" if name == "models/llama3-405b.yml" else name
        assert found == FACTS["files"][like]["parameters"]


def test_the_page_has_every_file(found_of: dict[str, Outcome]) -> None:
    assert page(found_of) == PAGE.read_text(encoding="utf-8"), "Regenerate it: python -m tests.interop.maxtext_page"
    assert len([name for name in FACTS["files"] if name.startswith("models/")]) == 78


def test_names_and_decoders_are_maxtexts() -> None:
    by_file = {name[7:-4]: keys["decoder_block"] for name, keys in FACTS["files"].items() if name.startswith("models/")}
    assert by_file == {name: block for block, names in MODEL_NAMES.items() for name in names}
    assert not set(DECODERS) & set(OTHER_DECODERS)


@pytest.mark.parametrize("name", MODELS)
def test_a_name_alone_is_ours_where_maxtexts_model_has_the_same_weights(
    name: str, found_of: dict[str, Outcome], tmp_path: Path
) -> None:
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: {name}\n")
    table = model_of(None, {}, read_configuration(MaxTextRequest(file=str(tmp_path / "mine.yml")))).table
    assert table.name == MODELS[name]
    _, number = found_of[f"models/{name}.yml"]
    assert sum(weight.num_parameters for weight in build(table.name).weights) == number


@pytest.mark.parametrize(
    ("text", "family", "weights"),
    [
        # 2 norms of 64 and q, k, v, o, and three matrices a layer; both ends and a norm.
        (DENSE, "llama3", 2 * (128 + 64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128) + 2 * 32_000 * 64 + 64),
        (DENSE + "logits_via_embedding: true\n", "llama3", 2 * (128 + 12_288 + 24_576) + 32_000 * 64 + 64),
        (EXPERTS, "mixtral", 2 * (128 + 12_288 + 64 * 4 + 4 * 24_576) + 2 * 32_000 * 64 + 64),
        (
            LATENT,
            "deepseek3",
            # Attention: down to 24, norm, up to 4 heads of 192; down to 16 and 64, norm, up to 4 of 256; 4 of 128 back.
            2 * (128 + 64 * 24 + 24 + 24 * 4 * 192 + 64 * 80 + 16 + 16 * 4 * 256 + 4 * 128 * 64)
            + 24_576
            + (64 * 4 + 4 + 5 * 3 * 64 * 32)
            + 2 * 32_000 * 64
            + 64,
        ),
    ],
)
def test_a_model_that_is_not_here_becomes_a_table_of_its_own(
    text: str, family: str, weights: int, tmp_path: Path
) -> None:
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: my-own\n{text}")
    imported, _, chosen = placed_for(MaxTextRequest(file=str(tmp_path / "mine.yml")))
    assert (imported.table.name, imported.table.family) == ("my-own", family)
    assert sum(weight.num_parameters for weight in imported.table.weights) == weights
    assert chosen["--model"] == f"my-own, a {family} by the dimensions of {tmp_path / 'mine.yml'}"


REFUSED = {
    "nothing": (
        CLEAN,
        "mine.yml: no model is given for these rules: no 'model_name', and no 'decoder_block' "
        "with dimensions. Give it: --model NAME.",
    ),
    "preset": (
        PRESET,
        "mine.yml: no model is given for these rules: no 'model_name', and no 'decoder_block' "
        "with dimensions. Give it: --model NAME.",
    ),
    "experts in rules": (
        CLEAN + line("kv_lora", "fsdp"),
        "mine.yml: no model is given for these rules: no 'model_name', and no 'decoder_block' with dimensions. "
        "Give it: --model NAME.",
    ),
    "unknown name": (
        CLEAN + "model_name: zebra-1t\n",
        "mine.yml:45:13: MaxText has no model 'zebra-1t', and the file has no 'decoder_block' with dimensions. Give the "
        "model: --model NAME.",
    ),
    "misspelt name": (
        CLEAN + "model_name: llama3-8bb\n",
        "mine.yml:45:13: MaxText has no model 'llama3-8bb', and the file has no 'decoder_block' with dimensions. Did you "
        "mean 'llama3-8b'?",
    ),
    "a name of another decoder": (
        CLEAN + "model_name: gemma2-9b\n",
        "mine.yml:45:13: gemma2-9b: decoder 'gemma2' has norms after attention and feed-forward layers, which no table of "
        "ours has.",
    ),
    "a name without its file": (
        CLEAN + "model_name: kimi-k2-1t\n",
        "mine.yml:45:13: the dimensions of kimi-k2-1t are in MaxText's models/kimi-k2-1t.yml, which is neither next to this "
        "file nor in a configs folder above it. Import that file, or copy it there.",
    ),
    "another decoder": (
        CLEAN + DENSE.replace("llama2", "qwen3"),
        "mine.yml:45:16: mine: decoder 'qwen3' has norms of queries and keys, which no table of ours has.",
    ),
    "no decoder": (
        CLEAN + DENSE.replace("llama2", "lama2"),
        "mine.yml:45:16: MaxText has no decoder 'lama2'. Did you mean 'llama2'?",
    ),
    "a dimension missing": (
        CLEAN + DENSE.replace("base_mlp_dim: 128\n", ""),
        "mine.yml: mine: no 'base_mlp_dim', which a model needs. Give the file that has it: --base base.yml.",
    ),
    "other weights": (
        CLEAN + DENSE + "fused_qkv: true\n",
        "mine.yml:53:12: mine: 'fused_qkv' is true: queries, keys and values in one weight, which no table of ours has.",
    ),
    "gelu": (
        CLEAN + DENSE + "mlp_activations: [gelu, linear]\n",
        "mine.yml:53:18: mine: 'mlp_activations' is 'gelu, linear': our feed-forward layers are SwiGLU, which no table of ours "
        "has.",
    ),
    "a router bias": (
        CLEAN + EXPERTS + "routed_bias: true\n",
        "mine.yml:55:14: mine: 'routed_bias' is true: a router bias, which no mixtral of ours has.",
    ),
    "experts tied": (
        CLEAN + EXPERTS + "logits_via_embedding: true\n",
        "mine.yml:55:23: mine: 'logits_via_embedding' is true, and mixtral has a separate output head.",
    ),
    "deepseek without latents": (
        CLEAN + LATENT.replace("attention_type: mla\n", ""),
        "mine.yml: mine: 'attention_type' is 'global', where decoder 'deepseek' of ours has 'mla'.",
    ),
    "heads": (
        CLEAN + DENSE.replace("base_num_kv_heads: 2", "base_num_kv_heads: 3"),
        "mine.yml: mine: num_heads is 4, and must be a multiple of num_kv_heads, which is 3.",
    ),
    "a dimension that is none": (
        CLEAN + DENSE.replace("64\n", "sixty\n"),
        "mine.yml:47:15: 'base_emb_dim' is a whole number; found 'sixty'.",
    ),
    "student and teacher": (
        CLEAN + DENSE + "student_overrides: {model_name: gemma-2b}\n",
        "mine.yml:53:20: a student and a teacher, each with its own model: import the overrides of each as a file, or give "
        "the model: --model NAME.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(text)
    with pytest.raises(InputError) as refused:
        placed_for(MaxTextRequest(file="mine.yml"))
    assert str(refused.value).splitlines()[0] == message


def test_sizes_on_the_command_line_beside_a_model_of_ours_are_refused(tmp_path: Path) -> None:
    """Only those of the files are replaced by ``--model``: a size that somebody types is meant."""
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: my-own\n{DENSE}")
    file = str(tmp_path / "mine.yml")
    assert placed_for(MaxTextRequest(file=file, model="llama3-test"))[0].table.name == "llama3-test"
    with pytest.raises(
        InputError, match="--given base_emb_dim: it sizes the model of the files, and --model llama3-test"
    ):
        placed_for(MaxTextRequest(file=file, model="llama3-test", given=("base_emb_dim=96",)))


def test_maxtexts_command_line_and_the_models_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own file is merged after the configuration; a command line may not set its keys to other values."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yml").write_text(f"{CLEAN}model_name: default\n{DENSE}")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llama2-7b.yml").write_text(
        DENSE.replace("base_emb_dim: 64", "base_emb_dim: 96") + "logical_axis_rules: [[norm, [fsdp]]]\n"
    )
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "mine.yml").write_text(
        "base_config: base.yml\nmodel_name: llama2-7b-Instruct\nbase_emb_dim: 32\nsteps: 3\n"
    )
    named = ("model_name=llama2-7b",)
    for request in (
        MaxTextRequest(file="base.yml", given=named),
        MaxTextRequest(file="models/llama2-7b.yml"),
        MaxTextRequest(file="gpu/mine.yml"),
        MaxTextRequest(file="gpu/mine.yml", given=("base_emb_dim=96", "logical_axis_rules=[[norm, fsdp]]")),
    ):
        imported, _, _ = placed_for(request)
        assert imported.table.sizes["embed"] == 96
        assert str(imported.rules[-1]) == "[norm, [fsdp]]"
    for key, found in (
        ("base_emb_dim=48", "48, and models/llama2-7b.yml:3:15 has 96"),
        ("logical_axis_rules=[[kv, []]]", "1, and models/llama2-7b.yml:9:1 has others"),
    ):
        with pytest.raises(InputError) as refused:
            placed_for(MaxTextRequest(file="base.yml", given=(*named, key)))
        assert str(refused.value) == (
            f"--given {key.partition('=')[0]}: {found}: MaxText refuses both. Add override_model_config=true, with which "
            "the command line wins, or take it out."
        )
        imported, _, _ = placed_for(MaxTextRequest(file="base.yml", given=(*named, key, "override_model_config=true")))
        assert imported.table.sizes["embed"] == (48 if "emb" in key else 96)
        # A key of the command line replaces the full value of the model's file: its rule for norms goes with the list.
        norm = next(line for line in imported.rules if line.name == "norm")
        assert norm.axes == (("fsdp",) if "emb" in key else ())


def test_configs_that_include_each_other_in_a_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, other in (("a.yml", "b.yml"), ("b.yml", "a.yml")):
        (tmp_path / name).write_text(f"base_config: {other}\n")
    with pytest.raises(InputError) as refused:
        placed_for(MaxTextRequest(file="a.yml"))
    assert str(refused.value) == "b.yml:1:14: base_config names this file, through others."
