"""Keys next to a ``model_name``: taken, refused or reported, as in MaxText, which merges its own file of the model last."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright import InputError
from shardwright.interop.maxtext.importing import import_maxtext, placed_for
from shardwright.interop.maxtext.reading.model_files import BASE, FILES
from shardwright.interop.maxtext.reading.model_vocabulary import MODEL_KEYS, UNREAD
from shardwright.interop.maxtext.reading.vocabulary import MODELS
from shardwright.interop.maxtext.sources import MaxTextRequest
from tests.interop.maxtext_facts import FACTS, write_configs
from tests.interop.rule_files import CLEAN
from tests.interop.test_maxtext_models import EXPERTS


def as_read(keys: dict[str, object]) -> dict[str, object]:
    """The keys of a MaxText file on weights, as they are read."""
    weight_keys = {key: value for key, value in keys.items() if key in MODEL_KEYS}
    return {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in weight_keys.items()}


def test_the_contents_of_maxtexts_own_files_are_known() -> None:
    assert set(FILES) == set(MODELS)
    for name, keys in FILES.items():
        assert dict(keys) == as_read(FACTS["files"][f"models/{name}.yml"]), name
    base = as_read(FACTS["files"]["base.yml"])
    assert {key: BASE[key] for key in base if key != "mlp_bias"} == {k: v for k, v in base.items() if k != "mlp_bias"}


OVERRIDING = "override_model_config=true"
NEXT_TO_A_NAME = {
    # The command line against the model's own file, which MaxText has although it is not here.
    "a dimension": (
        "",
        ("base_num_decoder_layers=2",),
        "--given base_num_decoder_layers: 2, and llama3-8b has 32: MaxText refuses both. Add override_model_config=true, "
        "with which the command line wins, or take it out.",
    ),
    "a decoder": (
        "",
        ("decoder_block=gemma3",),
        "--given decoder_block: gemma3, and llama3-8b has llama2: MaxText refuses both. Add override_model_config=true, "
        "with which the command line wins, or take it out.",
    ),
    "another decoder in its place": (
        "",
        (OVERRIDING, "decoder_block=gemma3"),
        "--given:2:16: llama3-8b: decoder 'gemma3' has norms after attention and feed-forward layers, and norms of queries "
        "and keys, which no table of ours has.",
    ),
    # A key that the model's own file does not have is used from any source.
    "other weights": (
        "",
        ("fused_qkv=true",),
        "--given:1:12: llama3-8b: 'fused_qkv' is true: queries, keys and values in one weight, which no table of ours has.",
    ),
    "other weights in the file": (
        "fused_qkv: true\n",
        (),
        "mine.yml:46:12: llama3-8b: 'fused_qkv' is true: queries, keys and values in one weight, which no table of ours has.",
    ),
    "adapters": (
        "lora: {enable_lora: true}\n",
        (),
        "mine.yml:46:21: llama3-8b: 'lora.enable_lora' is true: adapters in addition to the weights, which no table of ours has.",
    ),
    "experts": (
        "",
        ("num_experts=8",),
        "--given:1:14: llama3-8b: 'num_experts' is 8, and decoder 'llama2' has no experts. Leave it out, or name a decoder "
        "that has them, as mixtral.",
    ),
    # A file against the model's own.
    "a file": (
        "decoder_block: llama2\nbase_num_decoder_layers: 24\nbase_emb_dim: 2048\n",
        (),
        "mine.yml:47:26: 'base_num_decoder_layers' is 24, and llama3-8b has 32: MaxText reads its models/llama3-8b.yml after "
        "this file, and takes that. Leave 'base_num_decoder_layers' out, copy models/llama3-8b.yml there, or set it on the "
        "command line: --given override_model_config=true base_num_decoder_layers=24.",
    ),
    "a file with the override": (
        f"{OVERRIDING.replace('=', ': ')}\nhead_dim: 64\n",
        (),
        "mine.yml:47:11: 'head_dim' is 64, and llama3-8b has 128: MaxText reads its models/llama3-8b.yml after this file, and "
        "takes that. Leave 'head_dim' out, copy models/llama3-8b.yml there, or set it on the command line: --given "
        "override_model_config=true head_dim=64.",
    ),
}


@pytest.mark.parametrize("case", NEXT_TO_A_NAME)
def test_keys_next_to_a_name_that_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, given, message = NEXT_TO_A_NAME[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: llama3-8b\n{text}")
    with pytest.raises(InputError) as refused:
        placed_for(MaxTextRequest(file="mine.yml", given=given))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("name", "text", "given", "model", "weights"),
    [
        # Values equal to the model's own file, and a complete base.yml, whose dimensions any model replaces.
        ("llama3-8b", "base_num_decoder_layers: 32\n", ("base_emb_dim=4096",), "llama3-8b", "models/llama3-8b.yml"),
        ("mixtral-8x7b", "THE BASE", (), "mixtral-8x7b", "models/mixtral-8x7b.yml"),
        (
            "llama3-8b",
            "",
            (OVERRIDING, "base_num_decoder_layers=2"),
            "maxtext-llama3-8b",
            2 * 218_112_000 + 1_050_677_248,
        ),
        ("mixtral-8x7b", "", (OVERRIDING, "num_experts_per_tok=4"), "maxtext-mixtral-8x7b", "models/mixtral-8x7b.yml"),
        ("gemma2-9b", "", (), None, None),
    ],
)
def test_a_model_by_its_name_and_other_keys(
    name: str, text: str, given: tuple[str, ...], model: str | None, weights: int | str, tmp_path: Path
) -> None:
    if text == "THE BASE":
        text = "".join(f"{key}: {value!r}\n" for key, value in BASE.items() if not isinstance(value, bool | str))
        text += "decoder_block: llama2\n"
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: {name}\n{text}")
    request = MaxTextRequest(file=str(tmp_path / "mine.yml"), given=given)
    if model is None:
        with pytest.raises(InputError, match="which no table of ours has"):
            placed_for(request)
        return
    imported, findings, _ = placed_for(request)
    number = FACTS["files"][weights]["parameters"] if isinstance(weights, str) else weights
    assert (imported.table.name, findings) == (model, ())
    assert sum(weight.num_parameters for weight in imported.table.weights) == number
    if "num_experts_per_tok=4" in given:
        assert imported.table.top_k == 4


@pytest.mark.parametrize("key", [*UNREAD, "mlp_bias", "shared_experts"])
def test_keys_of_other_decoders_are_reported(key: str, tmp_path: Path) -> None:
    value = "true" if MODEL_KEYS[key] == "true or false" else "7"
    (tmp_path / "mine.yml").write_text(f"{CLEAN}model_name: llama3-8b\n")
    request = MaxTextRequest(file=str(tmp_path / "mine.yml"), given=(f"{key}={value}",))
    imported, (finding,), _ = placed_for(request)
    assert not imported.configuration.not_read
    assert (finding.code, finding.severity, finding.where) == ("SW111", "warning", f"'{key}'")
    assert "which MaxText's decoder 'llama2' does not read: it changes no weight" in finding.found


def test_values_that_a_models_own_file_replaces_are_reported(tmp_path: Path) -> None:
    """MaxText's own gpu/models/mixtral_8x1b.yml sets 5 layers next to model_name, and gets 32."""
    folder = write_configs(tmp_path / "configs")
    found = import_maxtext(MaxTextRequest(file=str(folder / "gpu/models/mixtral_8x1b.yml")))
    (finding,) = (each for each in found.findings if "model_name" in each.where)
    assert finding.text().splitlines()[1:] == [
        f"  where  {finding.position}: 'base_num_decoder_layers' next to 'model_name'",
        f"  found  5, and {finding.found.split()[2][:-1]}, which MaxText reads after this file, has 32",
        "  needed 32, or 'base_num_decoder_layers' on the command line",
        "  fix    Take 'base_num_decoder_layers' out.",
    ]
    assert finding.position is not None
    assert finding.position.source.endswith("gpu/models/mixtral_8x1b.yml")
    assert "models/mixtral-8x7b.yml:" in finding.found
    plain = import_maxtext(MaxTextRequest(file=str(folder / "gpu/models/mixtral_8x7b.yml")))
    assert not [each for each in plain.findings if "model_name" in each.where]


def test_a_fully_sparse_model_has_one_width(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text(f"{CLEAN}{EXPERTS}base_moe_mlp_dim: 32\n")
    with pytest.raises(InputError) as refused:
        placed_for(MaxTextRequest(file=str(tmp_path / "mine.yml")))
    assert str(refused.value) == (
        f"{tmp_path / 'mine.yml'}:55:19: mine: 'base_moe_mlp_dim' is 32 and 'base_mlp_dim' is 128: MaxText ends with an error "
        "where all layers have experts and the two differ. Give both the same."
    )
