"""The command line of a plan: ``shardwright plan`` with the options of a request, as text that a shell reads back."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shardwright.core.mesh.hops import AUTO
from shardwright.core.resolution.request import Request
from shardwright.models import build


def plan_command(request: Request, layout_file: str, model: str, settings: Mapping[str, str]) -> str:
    """The command that plans a request. ``layout_file``: that of its layout, with all sizes. ``model`` and ``settings``: its table by name.

    Rows, tokens and engine are always stated; all else where it is not the default of the command. Without chips, an optimizer other than
    AdamW, and a recipe, which no import sets.
    """
    default_dtype = build(model, settings).dtype
    options = {
        "--layout": layout_file,
        "--engine": request.engine,
        "--batch": str(request.batch),
        "--length": str(request.length),
        "--microbatches": None if request.microbatches == 1 else str(request.microbatches),
        "--dtype": None if request.dtype == default_dtype else request.dtype,
        "--weights-dtype": None if request.weights_dtype == "float32" else request.weights_dtype,
        "--gradients-dtype": request.gradients_dtype,
        "--moments-dtype": None if request.moments_dtype == "float32" else request.moments_dtype,
        "--remat": None if request.remat == "full" else request.remat,
        "--schedule": request.schedule,
        "--stages": request.stages,
        "--loss-chunks": None if request.loss_chunks == 1 else str(request.loss_chunks),
        "--expert-buffer": None if request.expert_buffer is None else f"{request.expert_buffer:g}",
        "--hops": None if request.hops == AUTO else request.hops,
    }
    words = ["shardwright", "plan", model]
    if settings:
        words += ["--set", *(f"{key}={value}" for key, value in settings.items())]
    words += [word for option, value in options.items() if value is not None for word in (option, value)]
    if request.load_balanced:
        words.append("--load-balance")
    return shlex.join(words)
