"""`shardwright import maxtext`, `import torchtitan` and `import huggingface`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from shardwright.cli.interop.import_options import (
    ImportHuggingFaceVerb,
    ImportMaxTextVerb,
    ImportTorchTitanVerb,
    ImportVerb,
)
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.values import at_least_one, mesh_sizes, settings
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Layout
from shardwright.files import replace_text


def run_import(verb: ImportVerb) -> int:
    """Print what a declaration means. Returns 1 where it has a finding of severity error."""
    match verb:
        case ImportMaxTextVerb():
            return _maxtext(verb)
        case ImportTorchTitanVerb():
            return _torchtitan(verb)
        case ImportHuggingFaceVerb():
            return _hugging_face(verb)


def _maxtext(verb: ImportMaxTextVerb) -> int:
    from shardwright.interop.maxtext.importing import read_maxtext
    from shardwright.interop.maxtext.sources import MaxTextRequest
    from shardwright.interop.maxtext.without_table import RulesAlone

    for option, value in (("--devices", verb.devices), ("--slices", verb.slices), ("--batch", verb.batch)):
        at_least_one(option, value)
    at_least_one("--length", verb.length)
    typed = {} if verb.mesh is None else mesh_sizes(verb.mesh)
    for axis, size in typed.items():
        at_least_one(f"--mesh {axis}", None if size == "auto" else size)
    # MaxText writes `auto` as -1.
    sizes = {axis: -1 if size == "auto" else size for axis, size in typed.items()}
    found = read_maxtext(
        MaxTextRequest(
            file=verb.file,
            base=verb.base,
            preset=verb.preset,
            eval_preset=verb.eval_preset,
            given=(*verb.pasted, *(text for group in verb.given for text in group)),
            model=verb.model,
            like=verb.like,
            settings=settings(verb.set),
            mesh_sizes=sizes if verb.mesh is not None else None,
            devices=verb.devices,
            slices=verb.slices,
            batch=verb.batch,
            length=verb.length,
            dialect=verb.dialect,
            out=None if verb.out is None else str(verb.out),
        )
    )
    if verb.out is not None:
        comparison = None if isinstance(found, RulesAlone) else found.comparison
        _write_layout(verb.out, None if comparison is None else comparison.layout, found.findings)
    if verb.json:
        write_json(found.to_json())
    else:
        from shardwright.report.interop.maxtext_view import maxtext_view, rules_view

        alone = isinstance(found, RulesAlone)
        write_view(rules_view(found) if alone else maxtext_view(found, written=verb.out is not None), sys.stdout)
    return _exit_code(found.findings)


def _torchtitan(verb: ImportTorchTitanVerb) -> int:
    from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan

    for option, value in (("--devices", verb.devices), ("--batch", verb.batch), ("--length", verb.length)):
        at_least_one(option, value)
    found = import_torchtitan(
        TorchTitanRequest(
            file=verb.file,
            config=verb.config,
            devices=verb.devices,
            model=verb.model,
            settings=settings(verb.set),
            batch=verb.batch,
            length=verb.length,
            name=Path(verb.file).stem,
            out=None if verb.out is None else str(verb.out),
        )
    )
    if verb.out is not None:
        _write_layout(verb.out, found.layout, found.findings)
    if verb.json:
        write_json(found.to_json())
    else:
        from shardwright.report.interop.import_views import torchtitan_view

        write_view(torchtitan_view(found, verb.file, written=verb.out is not None), sys.stdout)
    return _exit_code(found.findings)


def _hugging_face(verb: ImportHuggingFaceVerb) -> int:
    from shardwright.interop.hugging_face.importing import HuggingFaceRequest, import_hugging_face

    at_least_one("--devices", verb.devices)
    found = import_hugging_face(
        HuggingFaceRequest(file=verb.file, model=verb.model, settings=settings(verb.set), devices=verb.devices)
    )
    if verb.out is not None:
        _write_layout(verb.out, found.layout, found.findings)
    if verb.json:
        write_json(found.to_json())
    else:
        from shardwright.report.interop.import_views import hugging_face_view

        write_view(hugging_face_view(found), sys.stdout)
    return _exit_code(found.findings)


def _exit_code(findings: Iterable[Finding]) -> int:
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _write_layout(path: Path, layout: Layout | None, findings: Iterable[Finding]) -> None:
    from shardwright.interop.layout_text import layout_text

    if layout is None:
        why = next((finding.found for finding in findings if finding.severity == "error"), "the file has none")
        raise InputError(f"--out {path}: there is no layout to write: {why}.")
    replace_text(path, layout_text(layout))
