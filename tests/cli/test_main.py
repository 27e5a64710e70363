"""How the command line ends: exit codes, messages, one JSON object, speed, and what it never loads."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest

from shardwright.cli import plan as plan_verb
from shardwright.cli.main import main
from tests.slowness import slowness

FRAMEWORKS = {"jax", "jaxlib", "torch", "numpy", "optax", "grain", "transformers", "tensorboardX", "safetensors"}
SMALL = ["plan", "llama3-test"]
TOO_MANY_HEADS = ["plan", "deepseek3-test", "--layout", "fsdp-tp", "--mesh", "fsdp=1,tensor=8"]


def test_a_plan_is_printed_and_done(capsys):
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert out.startswith("llama3-test under fsdp\n")
    assert err == ""


def test_a_finding_of_severity_error_ends_with_1(capsys):
    assert main(TOO_MANY_HEADS) == 1
    assert "error SW107: " in capsys.readouterr().out


def test_the_findings_are_in_the_plan_with_json(capsys):
    assert main([*TOO_MANY_HEADS, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [f["code"] for f in json.loads(out)["findings"] if f["severity"] == "error"] == ["SW107"]
    assert err == ""


REFUSED = {
    "model": (["plan", "llama3-tset"], "shardwright: no model 'llama3-tset'. Did you mean 'llama3-test'?\n"),
    "layout": (
        [*SMALL, "--layout", "fspd"],
        "shardwright: no layout is called 'fspd'. Did you mean 'fsdp'? "
        "A layout of your own is given by its path, as in ./fspd.yaml.\n",
    ),
    "file": ([*SMALL, "--layout", "./no.yaml"], "shardwright: no.yaml: no such file.\n"),
    "batch": ([*SMALL, "--batch", "0"], "shardwright: --batch is 0, and must be at least 1.\n"),
    "length": ([*SMALL, "--length", "-2"], "shardwright: --length is -2, and must be at least 1.\n"),
    "devices": ([*SMALL, "--devices", "0"], "shardwright: --devices is 0, and must be at least 1.\n"),
    "microbatches": ([*SMALL, "--microbatches", "0"], "shardwright: --microbatches is 0, and must be at least 1.\n"),
    "dimension": (
        [*SMALL, "--set", "num_layer=2"],
        "shardwright: llama3-test with --set num_layer=2: no dimension 'num_layer'. Did you mean 'num_layers'?\n",
    ),
    "chips": (
        [*SMALL, "--chips", "h100:8", "--devices", "4"],
        "shardwright: --chips h100:8 has 8 devices, and --devices is 4. Leave one out.\n",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_ends_with_2_and_one_message(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("case", REFUSED)
def test_with_json_the_message_is_an_object_too(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSED[case]
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    text = message.removeprefix("shardwright: ").removesuffix("\n")
    assert json.loads(out) == {"error": {"exit_code": 2, "message": text}}
    assert err == message


def test_a_mesh_that_cannot_be_is_a_finding_on_stderr(capsys):
    assert main([*SMALL, "--mesh", "fsdp=3", "--devices", "8", "--json"]) == 1
    out, err = capsys.readouterr()
    (finding,) = json.loads(out)["findings"]
    assert (finding["code"], finding["found"], finding["needed"]) == ("SW106", "data 1 x fsdp 3 = 3", "8 devices")
    assert err.startswith("error SW106: The sizes of the mesh axes are at least 1")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"shardwright \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_verb, "planned", interrupted)
    assert main(SMALL) == 130
    assert capsys.readouterr() == ("", "shardwright: interrupted\n")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def broken(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(plan_verb, "planned", broken)
    with pytest.raises(ZeroDivisionError):
        main(SMALL)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_early_gets_no_traceback(options, user_environment):
    command = ["shardwright", "plan", "deepseek3-test", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=user_environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


FULL = (
    "shardwright: the output cannot be written: {}. The command ended there, and the files that it wrote before stay. Send "
    "its output to a place that can be written.\n"
)
NO_SPACE, BAD = FULL.format("No space left on device"), FULL.format("Bad file descriptor")
STREAMS = {
    "a full disk": ("plan llama3-test > /dev/full", 2, "", NO_SPACE),
    "a full disk with --json": ("plan llama3-test --json > /dev/full", 2, "", NO_SPACE),
    "more than is buffered": ("plan deepseek3-671b --json > /dev/full", 2, "", NO_SPACE),
    "few words": ("--version > /dev/full", 2, "", NO_SPACE),
    "help": ("plan --help > /dev/full", 2, "", NO_SPACE),
    "open for reading": ("plan llama3-test 1< /dev/null", 2, "", BAD),
    "no message either": ("plan llama3-test > /dev/full 2>&1", 2, "", ""),
    "a message alone": ("plan nosuch 2> /dev/full", 2, "", ""),
    "usage alone": ("plan 2> /dev/full", 2, "", ""),
    "closed": ("plan llama3-test >&-", 0, "", ""),
    "closed with --json": ("plan llama3-test --json >&-", 0, "", ""),
    "no messages": ("plan nosuch 2>&-", 2, "", ""),
    "all closed": ("plan nosuch <&- >&- 2>&-", 2, "", ""),
}


@pytest.mark.parametrize("case", STREAMS)
def test_output_that_cannot_be_written_is_one_message(case, user_environment):
    words, code, out, err = STREAMS[case]
    done = subprocess.run(
        ["sh", "-c", f"exec shardwright {words}"], capture_output=True, text=True, env=user_environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


NUMBERS = """
import os, sys
from shardwright.cli.main import main
assert main(["--version"]) == 0
with open(sys.argv[1], "w") as file:
    print(file.fileno() > 2, sys.stdout.name, sys.stderr.name, os.get_inheritable(1), file=file)
"""


def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path, user_environment):
    words = [sys.executable, "-c", NUMBERS, str(tmp_path / "seen")]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], env=user_environment, check=True)
    assert (tmp_path / "seen").read_text(encoding="utf-8") == "True /dev/null /dev/null True\n"


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "a/file"), OSError(13, "Permission denied"), OSError("no number")]
)
def test_an_error_of_a_file_is_no_error_of_the_output(error, monkeypatch):
    def broken(_: object) -> None:
        raise error

    monkeypatch.setattr(plan_verb, "planned", broken)
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the test is about which one
        main(SMALL)
    assert raised.value is error


def test_an_interrupt_without_a_reader_has_its_exit_code(capsys, monkeypatch):
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_verb, "planned", interrupted)
    monkeypatch.setattr(sys.stderr, "write", full)
    assert main(SMALL) == 130
    assert capsys.readouterr() == ("", "")


NUL = {
    "read": (["ckpt", "show", "\0"], 3, "'\\x00'"),
    "written": (["export", "maxtext", "--model", "mixtral-8x7b", "--out", "a\0b"], 6, "'a\\x00b'"),
    "trained": (["train", "llama3-test", "--steps", "1", "--out", "a\0b"], 6, "'a\\x00b'"),
    "in an option": ([*SMALL, "--layout=\0"], 3, "'--layout=\\x00'"),
}


@pytest.mark.parametrize("case", NUL)
def test_a_nul_character_is_refused_anywhere(case, capsys):
    arguments, number, shown = NUL[case]
    assert main(arguments) == 2
    text = f"argument {number} is {shown}, and may have no NUL character. Leave it out."
    assert capsys.readouterr() == ("", f"shardwright: {text}\n")
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": {"exit_code": 2, "message": text}}


def test_a_terminal_without_our_characters_gets_others(user_environment):
    environment = {**user_environment, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(["shardwright", "plan", "--help"], capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


LOADED = """
import sys
from shardwright.cli.main import main
assert main(sys.argv[1:]) == 0
print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def loaded_by(arguments: list[str], environment: dict[str, str]) -> set[str]:
    command = [sys.executable, "-c", LOADED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return set(done.stderr.split("LOADED")[1].split())


def test_plan_loads_no_framework(user_environment):
    assert loaded_by(["plan", "deepseek3-671b"], user_environment).isdisjoint(FRAMEWORKS)
    assert loaded_by(["plan", "deepseek3-671b", "--json"], user_environment).isdisjoint({*FRAMEWORKS, "rich"})


def test_diff_loads_no_framework(user_environment):
    arguments = ["diff", "ep", "ep-as-cp", "--model", "deepseek3-test"]
    assert loaded_by(arguments, user_environment).isdisjoint(FRAMEWORKS)


def test_the_plan_of_the_largest_model_takes_less_than_a_second(user_environment):
    """From the shell and back. The time of this process alone, the best of three: other tests run at the same time."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(["shardwright", "plan", "deepseek3-671b"], capture_output=True, env=user_environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < slowness()


def test_the_package_is_a_program():
    """As launchers of modules start it: ``torchrun -m shardwright``."""
    arguments = [sys.executable, "-m", "shardwright"]
    ran = subprocess.run([*arguments, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("shardwright ")
    assert subprocess.run([*arguments, *TOO_MANY_HEADS], capture_output=True, check=False).returncode == 1
