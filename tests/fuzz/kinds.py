"""One generator for each kind of input: it writes files into the folder it runs in, and returns the command line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.core.layout.roles import COMPONENTS, ROLES
from shardwright.core.policies.policy import BASES
from shardwright.interop.torchtitan.vocabulary import KNOWN, TRAINING
from tests.checkpoint.states import save, small_state
from tests.fuzz import seeds
from tests.fuzz.forging import forged_checkpoint
from tests.fuzz.mutating import ODD_NUMBERS, damaged_arguments, damaged_text, damaged_value, odd_value

Case = list[str]


def write(name: str, text: str) -> str:
    Path(name).write_bytes(text.encode("utf-8", "surrogatepass"))
    return name


def layout(draw: random.Random) -> Case:
    """Damaged presets and layouts, and invented ones."""
    text = damaged_text(draw, draw.choice(seeds.layouts())) if draw.random() < 0.6 else invented_layout(draw)
    model = draw.choice(list(seeds.MODELS))
    argv = ["plan", model, "--set", seeds.MODELS[model], "--layout", write("mine.yaml", text)]
    argv += draw.choice(
        ([], ["--devices", "8"], ["--mesh", "fsdp=2"], ["--engine", "torch"], ["--chips", "v5p:2x2x2"], ["--json"])
    )
    return argv


ENTRY_OPTIONS = (
    "optimizer: shard",
    "gradients: shard",
    "keep_gathered: true",
    "keep_gathered: 1",
    "virtual: 2",
    "virtual: 0",
    "schedule: zbv",
    "sequence_parallel: true",
    "weights: whole",
)


def invented_layout(draw: random.Random) -> str:
    """A layout by the grammar: axes, sizes, roles by component, moves and rules."""
    axes = draw.sample(("data", "fsdp", "tensor", "expert", "context", "a", "b"), draw.randrange(1, 5))
    roles = [*ROLES, "elsewhere", "fsbp"]
    lines = [
        "name: mine",
        "mesh: {" + ", ".join(f"{axis}: {draw.choice((1, 2, 3, 4, 'auto', -1))}" for axis in axes) + "}",
        "roles:",
    ]
    for axis in axes:
        if draw.random() < 0.4:
            lines.append(f"  {axis}: {draw.choice(roles)}")
        else:
            parts = [f"elsewhere: {draw.choice(roles)}"] if draw.random() < 0.7 else []
            parts += [f"{each}: {draw.choice(roles)}" for each in draw.sample(list(COMPONENTS), draw.randrange(4))]
            parts += draw.sample(ENTRY_OPTIONS, draw.choice((0, 0, 1, 2)))
            lines.append(f"  {axis}: {{{', '.join(parts)}}}")
    if draw.random() < 0.5:
        lines.append(
            f"move: {{attention: {draw.choice(('gather', 'ring', 'ulysses', 'x'))}, moe: {draw.choice(('all-to-all', 'weights', 'x'))}}}"
        )
    if draw.random() < 0.4:
        named = draw.choice(("embed", "heads", "kv_heads", "mlp", "vocab", "experts", "nothing"))
        chosen = ", ".join(draw.sample(axes, draw.randrange(len(axes) + 1)))
        lines.append(f"rules:\n  {draw.choice(list(COMPONENTS))}: {{{named}: [{chosen}]}}")
    return "\n".join(lines) + "\n"


def lock(draw: random.Random) -> Case:
    """Lock files with values swapped, keys dropped, or damaged text; read by `check` and `diff`."""
    text = _json_or_text(draw, draw.choice(seeds.locks()))
    write("mine.yaml", seeds.MINE)
    name = write("damaged.lock.json", text)
    return draw.choice(
        (
            ["check", name],
            ["check", name, "--json"],
            ["check", name, "--update"],
            ["diff", name, name],
            ["check", name, "--annotations", "github"],
        )
    )


def plan(draw: random.Random) -> Case:
    """A damaged output of ``plan --json``, compared with an undamaged one."""
    whole = draw.choice(seeds.plans())
    write("whole.json", whole)
    write("damaged.json", _json_or_text(draw, whole))
    files = ["whole.json", "damaged.json"]
    draw.shuffle(files)
    return ["diff", *files, *draw.choice(([], ["--json"], ["--model", "llama3-test"]))]


def manifest(draw: random.Random) -> Case:
    """A checkpoint with a damaged manifest."""
    folder = save(Path("ckpt"), small_state())
    path = folder / "manifest.json"
    text = _json_or_text(draw, path.read_text())
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return ["ckpt", draw.choice(("show", "verify")), "ckpt", *draw.choice(([], ["--json"]))]


def forged(draw: random.Random) -> Case:
    """A checkpoint that somebody has made to mislead: its digests are right."""
    folder = forged_checkpoint(draw, Path("ckpt"))
    return ["ckpt", draw.choice(("show", "verify")), draw.choice(("ckpt", str(folder))), *draw.choice(([], ["--json"]))]


def maxtext(draw: random.Random) -> Case:
    """Damaged rule files of MaxText."""
    write("base.yml", damaged_text(draw, seeds.rules()[0]) if draw.random() < 0.3 else seeds.rules()[0])
    argv = ["import", "maxtext", write("rules.yml", damaged_text(draw, draw.choice(seeds.rules())))]
    argv += draw.choice(
        ([], ["--model", "mixtral-test"], ["--base", "base.yml"], ["--devices", "8"], ["--dialect", "nnx"])
    )
    given = draw.choice(
        ([], [f"ici_fsdp_parallelism={draw.choice(ODD_NUMBERS)}"], ["logical_axis_rules=[[norm, []]]"], ["x"])
    )
    return [*argv, *(["--given", *given] if given else []), "--batch", "8", "--length", "128"]


def torchtitan(draw: random.Random) -> Case:
    """Configurations of TorchTitan: damaged TOML and Python, and invented JSON."""
    kind = draw.randrange(3)
    if kind == 0:
        name = write("mine.toml", damaged_text(draw, seeds.TITAN_TOML))
    elif kind == 1:
        name = write("mine.py", damaged_text(draw, draw.choice(seeds.programs())))
    else:
        options = {word: draw.choice((1, 2, 4, -1, odd_value(draw))) for word in draw.sample(KNOWN, draw.randrange(6))}
        training = {
            word: draw.choice((8192, 2048, -1, odd_value(draw)))
            for word in draw.sample(list(TRAINING), draw.randrange(3))
        }
        name = write(
            "mine.json",
            _text_of({"parallelism": options, "training": training, "model": draw.choice(({}, odd_value(draw)))}),
        )
    return [
        "import",
        "torchtitan",
        name,
        *draw.choice(([], ["--config", "mine"], ["--devices", "8"], ["--model", "mixtral-test"], ["--json"])),
    ]


def hugging_face(draw: random.Random) -> Case:
    """Damaged configurations and tensor-parallel plans of transformers."""
    name = write("config.json", _json_or_text(draw, draw.choice(seeds.configs())))
    return [
        "import",
        "hf",
        name,
        *draw.choice(([], ["--devices", "4"], ["--model", "llama3-test"], ["--json"], ["--out", "out.yaml"])),
    ]


def policies(draw: random.Random) -> Case:
    """Policies of recomputation: texts of the grammar, mixed and damaged, and files."""
    model = draw.choice(list(seeds.MODELS))
    text = "+".join(_part_of_policy(draw) for _ in range(draw.randrange(1, 4)))
    kind = draw.random()
    if draw.random() < 0.5:
        # Most of these are policies of every model.
        names = draw.sample(("attention.attended", "attention.queries", "attention.projected"), draw.randrange(1, 4))
        how = [draw.choice(("keep", "host", "recompute")) for _ in names]
        base, rest = draw.choice(BASES), draw.choice(("", "", "@:1+dots", "@::2+none", "@0+host=residual.stream"))
        text = ",".join([base, *(f"{one}={name}" for one, name in zip(how, names, strict=True))]) + rest
    elif kind < 0.4:
        lines = ["policy:", *(line for _ in range(draw.randrange(1, 4)) for line in _part_of_file(draw))]
        text = "./" + write(
            "policy.yaml", damaged_text(draw, "\n".join(lines)) if draw.random() < 0.5 else "\n".join(lines)
        )
    elif kind < 0.7:
        text = damaged_text(draw, text).replace("\0", "")
    argv = ["plan", model, "--set", seeds.MODELS[model], "--layout", "fsdp", "--mesh", "fsdp=2", f"--remat={text}"]
    return [
        *argv,
        *draw.choice(([], ["--json"], ["--engine", "torch"], ["--chips", "v5p:2x1x1"], ["--microbatches", "2"])),
    ]


NAMES = (
    "attention.attended",
    "mlp.gate",
    "moe.gate",
    "residual.stream",
    "weights",
    "router.scores",
    "attention.latent",
    "x",
)
LAYERS = (
    "0",
    ":1",
    "1:",
    "::2",
    "layers",
    "moe_layers",
    "dense_layers",
    "5:1",
    "0:99",
    "x-y",
    "99999999999999999999",
    "::0",
)


def _part_of_policy(draw: random.Random) -> str:
    words = [draw.choice(("full", "dots", "none", "keep=mlp.up", ""))]
    words += [
        f"{draw.choice(('keep', 'host', 'recompute', 'kep'))}={','.join(draw.sample(NAMES, draw.randrange(3)))}"
        for _ in range(draw.randrange(3))
    ]
    return ",".join(words) + (f"@{draw.choice(LAYERS)}" if draw.random() < 0.5 else "")


def _part_of_file(draw: random.Random) -> Sequence[str]:
    keys = {
        "base": draw.choice(("full", "dots", "none", "ful", "[]", "3")),
        "layers": draw.choice(LAYERS),
        **{how: draw.choice(("[]", "mlp.gate", "[mlp.gate, x]", "{a: 1}", "[[]]")) for how in ("keep", "host", "kep")},
    }
    chosen = draw.sample(list(keys), draw.randrange(1, 4))
    return [f"{'  - ' if number == 0 else '    '}{key}: {keys[key]}" for number, key in enumerate(chosen)]


def arguments(draw: random.Random) -> Case:
    """Command lines of every verb, valid and damaged. Sizes are small, and no engine is started."""
    write("mine.yaml", seeds.RULES)
    write("rules.yml", seeds.rules()[0])
    write("mine.toml", seeds.TITAN_TOML)
    write("whole.json", seeds.plans()[0])
    save(Path("ckpt"), small_state())
    return damaged_arguments(draw, draw.choice(COMMANDS)(draw))


def _options(draw: random.Random) -> list[str]:
    number = [*(1, 2, 8, 64), *ODD_NUMBERS]
    pairs = [
        ["--layout", draw.choice(("fsdp", "hsdp", "ep-as-cp", "fsdp-tp", "mine.yaml", "pp", "nothing"))],
        [
            "--mesh",
            draw.choice(
                ("fsdp=2", "fsdp=2,expert=4", "fsdp=auto", "fsdp=0", "x=2", "fsdp", f"fsdp={draw.choice(number)}")
            ),
        ],
        ["--move", draw.choice(("attention=ring", "moe=weights", "attention=x", "x=ring"))],
        ["--engine", draw.choice(("jax", "torch", "x"))],
        ["--batch", str(draw.choice(number))],
        ["--length", str(draw.choice(number))],
        ["--chips", draw.choice(("v5p:2x2x2", "h100:8x2", "cpu:8", "v5p:0", "h100:", "x:2", "v5p:99999x99999x99999"))],
        ["--devices", str(draw.choice(number))],
        [
            "--set",
            draw.choice(
                ("num_layers=2", "embed=64", "num_layers=0", "num_heads=3", "x=1", f"mlp={draw.choice(number)}")
            ),
        ],
        ["--dtype", draw.choice(("float32", "bfloat16", "float16", "int8"))],
        ["--weights-dtype", draw.choice(("float32", "bfloat16", "x"))],
        ["--master-dtype", draw.choice(("float32", "bfloat16", "x"))],
        ["--gradients-dtype", draw.choice(("float32", "bfloat16", "float16"))],
        ["--moments-dtype", draw.choice(("bfloat16", "float32", "bfloat16,float32", "bfloat16,"))],
        ["--remat", draw.choice((*POLICIES, _mixed(draw, POLICIES)))],
        ["--microbatches", str(draw.choice(number))],
        ["--loss-chunks", str(draw.choice(number))],
        ["--hops", draw.choice(("one", "two", "chunks", "auto", "x"))],
        ["--precision", draw.choice(("mxfp8", "fp8-delayed", "fp8-block", "nvfp4", "x"))],
        ["--optimizer", draw.choice(("lion", "sgd", "adamw", "x", "x:y"))],
        ["--average", str(draw.choice((0.9, 0, 1, "nan", "x")))],
        ["--schedule", draw.choice(("1f1b", "zbv", "circular", "x"))],
        ["--stages", draw.choice(("Et|tL", "E(t)*2|L", "t", "(", "Et*99999999999|L", "|"))],
        ["--expert-buffer", str(draw.choice((1.25, 0, -1, "nan", "inf", "x")))],
        ["--load-balance"],
        ["--json"],
    ]
    return [word for pair in draw.sample(pairs, draw.randrange(5)) for word in pair]


POLICIES = (
    "full",
    "dots",
    "none",
    "x",
    "keep=attention.attended",
    "dots,host=residual.stream,recompute=mlp.gate",
    "full@0:2+none",
    "keep=mlp.hidden@::2+full",
    "none@moe_layers+dots",
    "full@5:1",
)


def _mixed(draw: random.Random, texts: Sequence[str]) -> str:
    """The beginning of a text and the end of another one."""
    first, second = draw.choice(texts), draw.choice(texts)
    return first[: draw.randrange(len(first) + 1)] + second[draw.randrange(len(second)) :]


def _train(draw: random.Random) -> list[str]:
    pairs = [
        ["--lr", str(draw.choice((1e-3, 0, -1, "nan", "inf")))],
        ["--warmup", str(draw.choice((0, 1, -1, 10**30)))],
        ["--clip", str(draw.choice((1.0, 0, -1, "nan")))],
        ["--seed", str(draw.choice(ODD_NUMBERS))],
        ["--keep", str(draw.choice((0, 1, -1)))],
        ["--keep-every-hours", str(draw.choice((0, 1, 10**30)))],
        ["--best-of", draw.choice(("loss", "lossy"))],
        ["--checkpoint-every", str(draw.choice((0, 1, -1)))],
        ["--data", draw.choice(("stdlib", "nowhere", "mine.yaml"))],
        ["--tokenizer", draw.choice(("whole.json", "nowhere"))],
        ["--coordinator", draw.choice(("localhost:1", "x", ":", "localhost:99999999"))],
        ["--processes", str(draw.choice(ODD_NUMBERS))],
        ["--process", str(draw.choice(ODD_NUMBERS))],
        ["--resume"],
    ]
    chosen = [word for pair in draw.sample(pairs, draw.randrange(4)) for word in pair]
    steps = str(draw.choice((1, 2, 0, -1, 10**12, 30_000_000_000, *ODD_NUMBERS)))
    return [
        "train",
        _model(draw),
        "--steps",
        steps,
        "--out",
        draw.choice(("runs", "mine.yaml", "a/b")),
        *chosen,
        *_options(draw),
    ]


def _model(draw: random.Random) -> str:
    return draw.choice((*seeds.MODELS, *seeds.MODELS, *seeds.MODELS, "llama3-8b", "llama3", "nothing"))


COMMANDS: tuple[Callable[[random.Random], list[str]], ...] = (
    lambda draw: ["plan", _model(draw), *_options(draw)],
    lambda draw: ["plan", _model(draw), *_options(draw)],
    lambda draw: ["diff", draw.choice(("fsdp", "mine.yaml", "whole.json", "nothing")), draw.choice(("hsdp", "ep-as-cp", "whole.json")),
                  *draw.choice(([], ["--model", _model(draw)])), *_options(draw)],
    lambda draw: ["lock", _model(draw), *_options(draw), *draw.choice(([], ["--out", "a.json"], ["--out", "no/where.json"], ["--compiled"]))],
    lambda draw: ["check", *draw.sample(("whole.json", "mine.yaml", "nothing"), draw.randrange(3)), *draw.choice(([], ["--update"], ["--json"]))],
    lambda draw: ["compile", _model(draw), *_options(draw), *draw.choice(([], ["--hlo", "a.txt"], ["--hlo", "no/where"]))],
    _train,
    _train,
    lambda draw: ["ckpt", draw.choice(("show", "verify", "x")), draw.choice((".", "nowhere", "mine.yaml"))],
    lambda draw: ["ckpt", "reshard", draw.choice(("ckpt", "nowhere")), "--layout", draw.choice(("fsdp", "mine.yaml", "x")), "--out",
                  draw.choice(("a", "ckpt", "mine.yaml")), *draw.choice(([], ["--mesh", "fsdp=2"], ["--model", _model(draw)], ["--json"]))],
    lambda draw: ["ckpt", "import", draw.choice(("huggingface", "dcp", "orbax", "x")), draw.choice((".", "ckpt", "nowhere", "mine.yaml")), "--out", draw.choice(("a", "ckpt", "mine.yaml"))],
    lambda draw: ["ckpt", "export", draw.choice(("huggingface", "dcp", "orbax", "x")), draw.choice((".", "ckpt", "nowhere")), "--out", draw.choice(("a", "ckpt", "mine.yaml"))],
    lambda draw: ["import", draw.choice(("maxtext", "torchtitan", "hf", "huggingface", "x")), draw.choice(("rules.yml", "mine.toml", "whole.json")),
                  *draw.choice(([], ["--model", _model(draw)], ["--devices", str(draw.choice(ODD_NUMBERS))], ["--set", "num_layers=2"]))],
    lambda draw: ["export", "maxtext", draw.choice(("fsdp", "ep-as-cp", "mine.yaml")), "--model", _model(draw), *draw.choice(([], ["--mesh", "fsdp=2"], ["--devices", "8"], ["--out", "a.yml"]))],
    lambda draw: draw.choice(([], ["--help"], ["--version"], ["plan", "--help"], ["import", "maxtext", "--help"], ["train"], ["x"])),
)  # fmt: skip
"""A command line of each verb."""


def _json_or_text(draw: random.Random, text: str) -> str:
    return damaged_text(draw, text) if draw.random() < 0.4 else _text_of(damaged_value(draw, json.loads(text)))


def _text_of(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return "{}"


KINDS: Mapping[str, tuple[Callable[[random.Random], Case], int]] = {
    "layouts": (layout, 16),
    "locks": (lock, 12),
    "plans": (plan, 10),
    "manifests": (manifest, 10),
    "forged": (forged, 40),
    "command lines": (arguments, 24),
    "MaxText": (maxtext, 9),
    "TorchTitan": (torchtitan, 10),
    "Hugging Face": (hugging_face, 9),
    "policies": (policies, 8),
}
"""Each kind with its share of the cases: of 7,000, 2,000 are forged checkpoints."""
