"""A run whose options change on resume trains as a loop by hand that switches them there: transformers and PyTorch's AdamW."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.checkpoint import latest
from shardwright.cli.main import main
from shardwright.data import read_corpus, read_tokenizer
from shardwright.data.batches import stream
from shardwright.data.packing import Rows
from tests.engine_jax.commands import results
from tests.interop.published_folder import Made, made_folder

SETTINGS = {"embed": "64", "mlp": "128", "num_layers": "1", "vocab": "320"}
LENGTH = 24
BEFORE = {"lr": "1e-2", "warmup": "1", "steps": "6", "weight-decay": "0.1", "clip": "0.5"}
AFTER = {"lr": "3e-3", "warmup": "2", "steps": "9", "weight-decay": "0.3", "clip": "5.0"}


def texts(folder: Path) -> tuple[str, str]:
    """Each is one document of less than a row's vocabulary, so that no row has two segments."""
    paths = folder / "first.txt", folder / "second.txt"
    for number, path in enumerate(paths):
        path.write_text("".join(f"{(i * 7 + number) ** 2} {chr(97 + i % 26)}\n" for i in range(60)))
    return str(paths[0]), str(paths[1])


def rate(options: dict[str, str], step: int) -> float:
    """Of step ``step``, from 1: linear over the warm-up, then a cosine to a tenth."""
    lr, warmup, steps = float(options["lr"]), int(options["warmup"]), int(options["steps"])
    share = max(step - warmup, 0) / (steps - warmup)
    return lr * min(step / warmup, 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)


def by_hand(made: Made, data: tuple[str, str]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and the published weights after two steps of 2 rows of the first text and two of 4 rows of the second."""
    model = made.model.train()
    adamw = torch.optim.AdamW(
        [
            {"params": [one for one in model.parameters() if one.ndim > 1]},
            {"params": [one for one in model.parameters() if one.ndim == 1]},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses = []
    for step, (text, first, stop) in enumerate(((0, 0, 2), (0, 2, 4), (1, 0, 4), (1, 4, 8)), 1):
        corpus = read_corpus(data[text], read_tokenizer(None, vocabulary=320))
        ordered = stream(Rows(corpus=corpus, length=LENGTH), 5)
        rows = [row for number in range(first, stop) if (row := ordered[number])]
        tokens, targets = (
            torch.from_numpy(np.stack([row[name] for row in rows])).long() for name in ("tokens", "targets")
        )
        assert all(row["valid"].all() for row in rows)
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        loss.backward()
        options = BEFORE if step <= 2 else AFTER
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(options["clip"]))
        for group, decay in zip(adamw.param_groups, (float(options["weight-decay"]), 0.0), strict=True):
            group["lr"], group["weight_decay"] = rate(options, step), decay
        adamw.step()
        adamw.zero_grad()
    return losses, {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("engine", ["jax", "torch"])
def test_it_trains_as_a_loop_by_hand(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    made, data = made_folder(tmp_path / "folder", "llama3-test", SETTINGS), texts(tmp_path)
    settings = [f"{name}={value}" for name, value in {"num_layers": "3", **SETTINGS}.items()]
    same = ["train", "llama3-test", "--set", *settings, "--layout", "fsdp", "--mesh", "fsdp=1", "--engine", engine]
    same += ["--dtype", "float32", "--length", str(LENGTH), "--seed", "5", "--out", "run", "--json"]

    def given(options: dict[str, str]) -> list[str]:
        return [each for name, value in options.items() for each in (f"--{name}", value)]

    first = ["--batch", "2", "--data", data[0], "--weights", "folder", "--stop-after", "2"]
    assert main([*same, *given(BEFORE), *first]) == 0
    capsys.readouterr()
    names = ",".join([*AFTER, "batch", "data"])
    again = ["--batch", "4", "--data", data[1], "--stop-after", "4", "--resume", "--change", names]
    assert main([*same, *given(AFTER), *again]) == 0
    ended = json.loads(capsys.readouterr().out)["run"]
    assert [change["name"] for change in ended["changes"]] == ["lr", "warmup", "steps", "weight-decay", "clip", "batch", "data"]  # fmt: skip
    learning_rate = f"is {rate(AFTER, 3):.6g}, and would have been {rate(BEFORE, 3):.6g}"
    assert f"lr: was 0.01, is 0.003; the learning rate of step 3 {learning_rate}" in ended["said"]
    losses, weights = by_hand(made, data)
    np.testing.assert_allclose([line[1] for line in results(Path("run"))], losses, rtol=2e-5)
    found = latest("run").checkpoint
    assert found is not None
    ours = found.read_box("embedding.tokens")
    theirs = weights["model.embed_tokens.weight"]
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert np.abs(theirs - made.weights["embedding.tokens"]).max() > 1e-2
