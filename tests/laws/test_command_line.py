"""The options of every verb are those listed here: a change that adds, renames or removes one must update this table."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from shardwright.cli.main import main

PLAN = {
    "--mesh",
    "--move",
    "--engine",
    "--batch",
    "--length",
    "--chips",
    "--devices",
    "--set",
    "--weights-dtype",
    "--moments-dtype",
    "--master-dtype",
    "--gradients-dtype",
    "--loss-chunks",
    "--dtype",
    "--remat",
    "--microbatches",
    "--expert-buffer",
    "--optimizer",
    "--optimizer-set",
    "--average",
    "--tokens",
    "--price",
    "--precision",
    "--schedule",
    "--stages",
    "--hops",
    "--load-balance",
    "--json",
}
RUN = {
    "--steps",
    "--out",
    "--data",
    "--tokenizer",
    "--stop-after",
    "--lr",
    "--warmup",
    "--weight-decay",
    "--clip",
    "--seed",
    "--checkpoint-every",
    "--keep",
    "--keep-every",
    "--keep-every-hours",
    "--keep-best",
    "--best-of",
    "--async-checkpoints",
    "--checkpoints",
    "--weights",
    "--weights-new",
    "--weights-skip",
    "--weights-cast",
    "--resume",
    "--resume-from",
    "--change",
    "--tensorboard",
    "--log-every",
    "--coordinator",
    "--processes",
    "--process",
    "--join-timeout",
    "--stall-timeout",
}
OPTIONS = {
    "plan": {"--layout", "--show", "--full", *PLAN},
    "compile": {"--layout", "--hlo", "--xla", *PLAN},
    "diff": {"--model", *PLAN},
    "compare": {"--model", *PLAN},
    "search": {"--like", "--budget", "--within", "--keep", "--out", "--compile", "--compile-budget", *PLAN},
    "lock": {"--layout", "--out", "--compiled", *PLAN},
    "list": {"--json"},
    "explain": {"--layout", *PLAN},
    "check": {"--update", "--annotations", "--json"},
    "train": {"--layout", *PLAN, *RUN},
    "calibrate": {"--layout", "--out", "--repeats", *PLAN},
    "import maxtext": {
        "--base",
        "--preset",
        "--eval-preset",
        "--given",
        "--model",
        "--like",
        "--set",
        "--mesh",
        "--devices",
        "--slices",
        "--batch",
        "--length",
        "--dialect",
        "--out",
        "--json",
    },
    "import torchtitan": {"--config", "--devices", "--model", "--set", "--batch", "--length", "--out", "--json"},
    "import huggingface": {"--model", "--set", "--devices", "--out", "--json"},
    "export": {
        "--model",
        "--set",
        "--mesh",
        "--devices",
        "--batch",
        "--length",
        "--microbatches",
        "--schedule",
        "--stages",
        "--move",
        "--remat",
        "--out",
        "--json",
    },
    "ckpt show": {"--for", "--mesh", "--devices", "--engine", "--stages", "--model", "--set", "--json"},
    "ckpt reshard": {"--layout", "--out", "--mesh", "--devices", "--engine", "--stages", "--model", "--set", "--json"},
    "ckpt verify": {"--json"},
    "ckpt import huggingface": {
        "--out",
        "--model",
        "--set",
        "--dtype",
        "--keep-prediction-layers",
        "--keep-fp8",
        "--json",
    },
    "ckpt import dcp": {*("--out", "--step", "--module", "--optimizer", "--leave-out", "--trust-pickle", "--json")},
    "ckpt export dcp": {"--out", "--json"},
    "ckpt import orbax": {"--out", "--step", "--leave-out", "--json"},
    "ckpt export orbax": {"--out", "--json"},
    "ckpt export huggingface": {
        *(
            "--out",
            "--config",
            "--model",
            "--set",
            "--dtype",
            "--fp8",
            "--average",
            "--prediction-layers",
            "--max-file-bytes",
            "--json",
        ),
    },
}
ARGUMENTS = {
    "plan": "MODEL",
    "compile": "MODEL",
    "diff": "A B",
    "compare": "A B ...",
    "search": "MODEL",
    "lock": "MODEL",
    "check": "",
    "list": "{models,layouts,chips,recipes,optimizers,findings}",
    "explain": "CODE|MODEL",
    "train": "MODEL --steps N --out DIR",
    "calibrate": "MODEL --out FILE",
    **dict.fromkeys(("import maxtext", "import torchtitan", "import huggingface"), "FILE"),
    "export": "maxtext|torchtitan NAME|FILE",
    "ckpt show": "DIR|URL",
    "ckpt reshard": "DIR|URL --layout NAME|FILE --out DIR|URL",
    "ckpt verify": "DIR|URL",
    "ckpt import huggingface": "FOLDER --out DIR|URL",
    "ckpt import dcp": "FOLDER --out DIR|URL",
    "ckpt export huggingface": "DIR|URL --out FOLDER",
    "ckpt export dcp": "DIR|URL --out FOLDER",
    "ckpt import orbax": "FOLDER --out DIR|URL",
    "ckpt export orbax": "DIR|URL --out FOLDER",
}
VERBS = {
    "": {
        "plan",
        "compile",
        "diff",
        "compare",
        "search",
        "lock",
        "check",
        "list",
        "explain",
        "train",
        "calibrate",
        "ckpt",
        "import",
        "export",
    },
    "import": {"maxtext", "torchtitan", "huggingface"},
    "ckpt": {"show", "verify", "reshard", "import", "export"},
    "ckpt import": {"huggingface", "dcp", "orbax"},
    "ckpt export": {"huggingface", "dcp", "orbax"},
}


def help_of(verb: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*verb.split(), "--help"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("verb", OPTIONS)
def test_options_of_a_verb(verb, monkeypatch):
    # An option begins its line: its description may name others.
    listed = re.findall(r"^  (--[a-z][a-z0-9-]*)", help_of(verb, monkeypatch), re.MULTILINE)
    assert sorted(listed) == sorted(OPTIONS[verb])


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_arguments_of_a_verb(verb, monkeypatch):
    usage = help_of(verb, monkeypatch).splitlines()[0]
    assert re.sub(r"\s*\[[^]]*\]", "", usage) == f"usage: shardwright {verb} {ARGUMENTS[verb]}".strip()


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(verb, monkeypatch):
    listed = help_of(verb, monkeypatch).partition("\nverbs\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (\S+) ", listed, re.MULTILINE)) == VERBS[verb]


@pytest.mark.parametrize("verb", {**OPTIONS, **VERBS})
def test_each_part_of_a_help_has_a_plain_name(verb, monkeypatch):
    parts = re.findall(r"(?<=\n\n)(\S.*)\n  \S", help_of(verb, monkeypatch))
    names = {"arguments", "verbs", "options", "options of the plan", "options of the run", "options of the layout"}
    assert set(parts) <= names
    assert len(parts) == len(set(parts))
    assert "options" in parts


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_option_says_what_it_is_for(verb, monkeypatch):
    text = help_of(verb, monkeypatch)
    for option in OPTIONS[verb]:
        (description,) = re.findall(rf"^  {option}(?![-\w])(.*(?:\n {{10,}}\S.*)*)", text, re.MULTILINE)
        # Without the names of values, the default and the frame, a sentence remains.
        left = re.sub(r"\([^)]*\)|\{[^}]*\}|\n", " ", description)
        assert re.search(r"[A-Z][a-z]* [A-Za-z]", left), (option, description)
