"""Names of models on the Hugging Face Hub, and which of our models each is. Nothing is downloaded by any command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shardwright.core.findings.errors import InputError

LLAMA_2 = "embed=4096 num_heads=32 num_kv_heads=32 mlp=11008 vocab=32000 rope.kind=default rope.theta=10000"
MISTRAL = "rope.kind=default vocab=32768 rope.theta=1000000"
HUB: Mapping[str, str] = {
    "meta-llama/Llama-3.2-1B": "llama3-1b",
    "meta-llama/Llama-3.2-1B-Instruct": "llama3-1b",
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama3-8b",
    "meta-llama/Meta-Llama-3-8B": "llama3-8b --set rope.kind=default",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b --set rope.kind=default",
    "meta-llama/Llama-2-7b-hf": f"llama3-8b --set {LLAMA_2}",
    "meta-llama/Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3-70b",
    "meta-llama/Meta-Llama-3.1-70B": "llama3-70b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3-70b",
    "meta-llama/Meta-Llama-3-70B": "llama3-70b --set rope.kind=default",
    "meta-llama/Llama-3.1-405B": "llama3-405b",
    "meta-llama/Llama-3.1-405B-Instruct": "llama3-405b",
    "meta-llama/Meta-Llama-3.1-405B": "llama3-405b",
    "mistralai/Mistral-7B-v0.1": "llama3-8b --set rope.kind=default vocab=32000 rope.theta=10000 window=4096",
    "mistralai/Mistral-7B-v0.3": f"llama3-8b --set {MISTRAL}",
    "mistralai/Mistral-7B-Instruct-v0.3": f"llama3-8b --set {MISTRAL}",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek3-16b",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek3-16b",
    "deepseek-ai/DeepSeek-V3": "deepseek3-671b",
    "deepseek-ai/DeepSeek-V3-Base": "deepseek3-671b",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek3-671b",
    "deepseek-ai/DeepSeek-V3.1": "deepseek3-671b",
    "deepseek-ai/DeepSeek-V3.1-Base": "deepseek3-671b",
    "deepseek-ai/DeepSeek-R1": "deepseek3-671b",
    "deepseek-ai/DeepSeek-R1-Zero": "deepseek3-671b",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek3-671b",
    "moonshotai/Kimi-K2-Base": (
        "deepseek3-671b --set num_dense_layers=1 num_heads=64 num_experts=384 num_groups=1 num_chosen_groups=1 routed_scale=2.827 "
        "vocab=163840 rope.theta=50000 rope.factor=32 rope.beta_fast=1"
    ),
}
"""A published name, and the arguments of the same model here."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_hub_name(model: str) -> None:
    """Raises InputError for ``owner/name`` where no such path is there."""
    if not _NAME.fullmatch(model) or model.endswith(".json") or Path(model).exists():
        return
    by_lower = {name.lower(): name for name in HUB}
    of_name = {name.rpartition("/")[2]: published for name, published in by_lower.items()}
    published = by_lower.get(model.lower()) or of_name.get(model.lower().rpartition("/")[2])
    folder = "For another model, or for its weights, give the path of a folder with its config.json, or of that file."
    if published is None:
        raise InputError(
            f"{model}: there is no such path. As a name on the Hugging Face Hub it is not known here, and nothing is downloaded. {folder}"
        )
    which = "It" if published.lower() == model.lower() else f"{published}, if it is the same,"
    raise InputError(
        f"{model}: a name on the Hugging Face Hub; nothing is downloaded. {which} is {HUB[published]} here. {folder}"
    )
