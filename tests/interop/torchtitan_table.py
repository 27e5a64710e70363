"""Regenerate docs/torchtitan.md: ``python -m tests.interop.torchtitan_table``.

With a TorchTitan checkout, ``python -m tests.interop.torchtitan_table FOLDER`` reads every registered configuration there and
prints where the values read differ from those that running it gave (tests/interop/torchtitan_registry.json).
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright import InputError
from shardwright.interop.torchtitan.reading import read_section
from shardwright.interop.torchtitan.vocabulary import DEGREES
from tests.conftest import ROOT
from tests.interop.test_torchtitan_programs import REGISTRY, table_line


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(compare(Path(sys.argv[1])))
    path = ROOT / "docs" / "torchtitan.md"
    text = path.read_text(encoding="utf-8")
    head, rule = text.split("|---|---|---|---|---|\n", 1)[0], "|---|---|---|---|---|\n"
    with TemporaryDirectory() as folder:
        path.write_text(f"{head}{rule}" + "\n".join(table_line(*row, Path(folder)) for row in REGISTRY) + "\n")


def compare(folder: Path) -> int:
    """Read, and print each difference. Returns 1 where there is one."""
    wrong = refused = 0
    for module, function, sizes, sequence, microbatches, training, model in REGISTRY:
        try:
            found = read_section(str(folder / "torchtitan" / module / "config_registry.py"), function)
        except InputError as error:
            refused += 1
            print(f"refused {function}: {error}")
            continue
        read = [found.degree(name) for name in DEGREES], found.sequence_parallel, found.microbatches
        tokens = list(found.training.values()) if found.training else None
        flavor = found.model[1] if found.model else model.split()[1]
        if read != (sizes, sequence, microbatches) or tokens != training or flavor != model.split()[1]:
            wrong += 1
            print(
                f"{function}: read {read} {tokens} {found.model}, runs {sizes} {sequence} {microbatches} {training} {model}"
            )
    print(
        f"{len(REGISTRY)} configurations: {len(REGISTRY) - wrong - refused} read correctly, {refused} refused, {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
