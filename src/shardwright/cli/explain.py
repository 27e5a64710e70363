"""`shardwright explain`: the page of a finding's code, in the terminal."""

from __future__ import annotations

import sys

from shardwright.cli.typed.output import write_json
from shardwright.cli.typed.verbs import ExplainVerb
from shardwright.core.findings.codes import CODES
from shardwright.core.findings.pages import page_of


def run_explain(verb: ExplainVerb) -> int:
    """Print what the code means, an example with its fix, and why."""
    page = page_of(verb.code)
    if verb.json:
        code = CODES[verb.code.upper()]
        write_json({"code": code.code, "severity": code.severity, "title": code.title, "law": code.law, "page": page})
    else:
        sys.stdout.write(page)
    return 0
