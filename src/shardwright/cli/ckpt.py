"""`shardwright ckpt show` and `shardwright ckpt verify`."""

from __future__ import annotations

import sys
from importlib import import_module

from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.options import ShowVerb, VerifyVerb
from shardwright.cli.typed.output import write_json, write_view


def run_show(verb: ShowVerb) -> int:
    """Print what a checkpoint holds. Returns 1 if another checkpoint in the folder cannot be read."""
    with needing_extra("jax", "reading checkpoints"):
        checkpoint = import_module("shardwright.checkpoint")
    shown = checkpoint.describe(verb.directory)
    if verb.json:
        write_json(shown)
    else:
        from shardwright.report.checkpoint_view import checkpoint_view

        write_view(checkpoint_view(shown), sys.stdout)
    return 1 if shown["damaged"] else 0


def run_verify(verb: VerifyVerb) -> int:
    """Check every byte of a checkpoint. Returns 1 if it is damaged."""
    with needing_extra("jax", "reading checkpoints"):
        checkpoint = import_module("shardwright.checkpoint")
    checked = checkpoint.verify(verb.directory)
    if verb.json:
        write_json(checked)
    else:
        from shardwright.report.checkpoint_view import verified_view

        write_view(verified_view(checked), sys.stdout)
    return 0 if checked["ok"] else 1
