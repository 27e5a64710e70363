"""The entry point: it runs a verb, and turns errors into messages and exit codes.

Exit codes: 0 done; 1 findings of severity error; 2 bad usage or input, or the output cannot be written; 130 interrupted;
141 the reader of the output is gone. Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from shardwright.cli.arguments.parsing import asks_for_help, parse
from shardwright.cli.arguments.usage import UsageError
from shardwright.cli.arguments.verbs import tree, verb_of
from shardwright.cli.interop.import_options import (
    ExportVerb,
    ImportHuggingFaceVerb,
    ImportMaxTextVerb,
    ImportTorchTitanVerb,
    Shardwright,
)
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.verbs import (
    CalibrateVerb,
    CheckVerb,
    CompareVerb,
    CompileVerb,
    DiffVerb,
    ExplainVerb,
    ListVerb,
    LockVerb,
    PlanVerb,
    SearchVerb,
    TrainVerb,
)
from shardwright.cli.typed.written import with_options_of_its_run
from shardwright.core.findings.bounds import require_path
from shardwright.core.findings.errors import (
    INTERRUPTED,
    NOBODY_READS,
    FindingsError,
    InputError,
    ShardwrightError,
    is_about_output,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (None: that of this process) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = _exit_code(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _end_with("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return NOBODY_READS
    except OSError as error:
        if not is_about_output(error):
            raise
        _end_with(
            f"the output cannot be written: {error.strerror}. The command ended there, and the files that it wrote before "
            f"stay. Send its output to a place that can be written."
        )
        return ShardwrightError.exit_code


def _open_closed_streams() -> None:
    """Redirect a standard stream that is closed to the null device.

    Its file descriptor too: otherwise the next file to be opened would get the number, and what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


def _end_with(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"shardwright: {text}\n")
    _discard_output()


def _discard_output() -> None:
    """Redirect a stream that cannot be written to the null device: Python flushes both streams once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_code(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        _refuse_nul(arguments)
        with _long_paths_refused():
            return _read_and_run(arguments)
    except ShardwrightError as error:
        return _refuse(error, as_json)


def _read_and_run(arguments: list[str]) -> int:
    root = tree("shardwright", Shardwright)
    verb, number = verb_of(root, arguments)
    if asks_for_help(arguments[number:]):
        from shardwright.cli.arguments.help import help_text
        from shardwright.report.usage_view import help_view

        write_view(help_view(partial(help_text, verb)), sys.stdout)
        return 0
    if verb is root:
        if arguments[1:]:
            raise root.error(f"--version stands alone, and argument 2 is '{arguments[1]}'. Leave it out.")
        from importlib.metadata import version

        sys.stdout.write(f"shardwright {version('shardwright')}\n")
        return 0
    arguments = with_options_of_its_run(arguments)
    return _run(parse(verb, root, arguments[number:], number + 1), arguments)


def _refuse_nul(arguments: Sequence[str]) -> None:
    """Refuse NUL characters. No shell passes one on, but a program that calls ``main`` may. Checked here once for all paths."""
    for number, argument in enumerate(arguments, 1):
        if "\0" in argument:
            raise InputError(f"argument {number} is {argument!r}, and may have no NUL character. Leave it out.")


@contextlib.contextmanager
def _long_paths_refused() -> Iterator[None]:
    """Refuses a path that is too long for a file system. Here once for all paths: which argument is one, its verb knows."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and isinstance(error.filename, str | bytes | os.PathLike):
            require_path(os.fsdecode(error.filename))
        raise


def _run(verb: Any, arguments: Sequence[str]) -> int:
    # Each verb is imported only when it runs: `plan` must not wait for the imports of `train`.
    match verb:
        case PlanVerb():
            from shardwright.cli.plan import run_plan

            return run_plan(verb)
        case CompileVerb():
            from shardwright.cli.running.compile import run_compile

            return run_compile(verb)
        case DiffVerb():
            from shardwright.cli.reviewing.diff import run_diff

            return run_diff(verb)
        case CompareVerb():
            from shardwright.cli.reviewing.compare import run_compare

            return run_compare(verb)
        case SearchVerb():
            from shardwright.cli.searching.search import run_search

            return run_search(verb)
        case LockVerb():
            from shardwright.cli.reviewing.lock import run_lock

            return run_lock(verb)
        case CheckVerb():
            from shardwright.cli.reviewing.check import run_check

            return run_check(verb)
        case ListVerb():
            from shardwright.cli.listing import run_list

            return run_list(verb)
        case ExplainVerb():
            from shardwright.cli.explain import run_explain

            return run_explain(verb)
        case TrainVerb():
            from shardwright.cli.running.train import run_train

            return run_train(verb, arguments)
        case CalibrateVerb():
            from shardwright.cli.running.calibrate import run_calibrate

            return run_calibrate(verb, arguments)
        case ImportMaxTextVerb() | ImportTorchTitanVerb() | ImportHuggingFaceVerb():
            from shardwright.cli.interop.import_ import run_import

            return run_import(verb)
        case ExportVerb():
            from shardwright.cli.interop.export import run_export

            return run_export(verb)
        case _:
            from shardwright.cli.ckpt import run_ckpt

            return run_ckpt(verb)


def _refuse(error: ShardwrightError, as_json: bool) -> int:
    """Report an error that a user can fix: on stderr, and with --json as an object on stdout too."""
    if isinstance(error, FindingsError):
        from shardwright.report.plan.findings_view import findings_list

        write_view(lambda width: findings_list(error.findings, width), sys.stderr)
        value: dict[str, object] = {"findings": [finding.to_json() for finding in error.findings]}
    elif isinstance(error, UsageError):
        from shardwright.report.usage_view import usage_view

        write_view(usage_view(f"shardwright: {error}"), sys.stderr)
        value = {"error": {"exit_code": error.exit_code, "message": str(error)}}
    else:
        sys.stderr.write(f"shardwright: {error}\n")
        value = {"error": {"exit_code": error.exit_code, "message": str(error)}}
    if as_json:
        write_json(value)
    return error.exit_code
