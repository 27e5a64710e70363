"""docs/maxtext-files.md: the result for each file of MaxText's configs folder. Written by ``python -m tests.interop.maxtext_page``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright import InputError
from shardwright.interop.maxtext.model import model_of
from shardwright.interop.maxtext.sources import MaxTextRequest, read_configuration
from tests.interop.maxtext_facts import FACTS, write_configs

PAGE = Path(__file__).parents[2] / "docs" / "maxtext-files.md"
HEAD = """\
# MaxText's own files

The result of `import maxtext` for every YAML file in the configs folder of AI-Hypercomputer/maxtext at commit `{commit}`: its model,
with as many parameters as in MaxText, or the reason of a refusal. A file that names a model is that model, whatever other
dimensions it sets: MaxText reads the model's own file after it.

| files | model |
|---|---|
"""


Outcome = tuple[str, int | None]


def outcome(folder: Path, name: str) -> Outcome:
    """The result for a file, and the number of parameters of its model."""
    try:
        configuration = read_configuration(MaxTextRequest(file=str(folder / name)))
        table = model_of(None, {}, configuration).table
    except InputError as error:
        return f"refused: {_reason(str(error), name)}", None
    number = sum(weight.num_parameters for weight in table.weights)
    return f"{table.name}, {number:,} parameters", number


def _reason(message: str, name: str) -> str:
    """The reason without the position and the name, which are the file's."""
    place, _, reason = message.partition(".yml")
    assert place, message
    reason = reason.split(": ", 1)[1]
    stem = Path(name).stem
    reason = reason.removeprefix(f"{stem}: ")
    first = reason.split(". ")[0].rstrip(".")
    return first.replace("|", "/")


def outcomes(folder: Path) -> dict[str, Outcome]:
    """For every file, in a configs folder that has them all."""
    return {name: outcome(folder, name) for name in FACTS["files"]}


def page(found: dict[str, Outcome]) -> str:
    rows: dict[str, list[str]] = {}
    for name, (what, _) in found.items():
        rows.setdefault(what, []).append(f"`{name.removesuffix('.yml')}`")
    lines = [f"| {', '.join(files)} | {what} |" for what, files in rows.items()]
    return HEAD.format(commit=FACTS["commit"][:9]) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        PAGE.write_text(page(outcomes(write_configs(Path(temporary) / "configs"))), encoding="utf-8")
