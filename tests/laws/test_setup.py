"""The setup script with fakes of Python and pip: what it creates, what it leaves unchanged, what it repairs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Answers the queries of the script, makes an environment that contains itself, and records the arguments of pip.
PYTHON = """\
#!/bin/sh
case "$1 $2" in
    "-c "*) echo "{version} /home/of/it" ;;
    "-m venv")
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        printf '#!/bin/sh\\n' >"$3/bin/shardwright"
        chmod +x "$3/bin/shardwright"
        echo venv >>log ;;
    "-m pip")
        [ ! -e stop ] || exit 1
        for last in "$@"; do :; done
        echo "$last" >>log ;;
esac
"""
SHIM = "#!/bin/sh\necho 'shim: no such version' >&2\nexit 127\n"
OLD = "#!/bin/sh\necho 'is Python 3.9.2' >&2\nexit 1\n"

COMPLETE = [".[jax]", ".[jax,torch]", ".[jax,torch,dev]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A folder with the script, and a PATH with the fakes and ordinary commands."""

    folder: Path
    commands: Path

    def install(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def run(self, kind: str, python: str = "", *, code: int = 0, activated: bool = False) -> tuple[list[str], str]:
        """The steps that were done, and the messages that were written."""
        (self.folder / "log").unlink(missing_ok=True)
        path = f"{self.folder}/.venv/bin:{self.commands}" if activated else str(self.commands)
        done = subprocess.run(
            ["sh", str(self.folder / "scripts" / "setup.sh"), kind],
            env={"PATH": path, "PYTHON": python},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else [], done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    commands, folder = tmp_path / "commands", tmp_path / "check out"
    commands.mkdir()
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("sh", "cat", "chmod", "cksum", "cp", "date", "dirname", "head", "mkdir", "rm"):
        found = shutil.which(name)
        assert found is not None
        os.symlink(found, commands / name)
    made = Checkout(folder=folder, commands=commands)
    made.install("python3", PYTHON.format(version="3.11.7"))
    return made


def test_makes_an_environment_once(checkout: Checkout) -> None:
    steps, message = checkout.run("complete")
    assert steps == ["venv", *COMPLETE]
    assert message.splitlines()[:-1] == [
        "setup: making .venv with python3 (Python 3.11.7)",
        "setup: installing JAX and what training needs",
        "setup: installing PyTorch (the largest part)",
        "setup: installing the tools of the tests",
    ]
    assert checkout.run("complete") == ([], "")


def test_the_demo_needs_less_and_takes_more(checkout: Checkout) -> None:
    assert checkout.run("demo")[0] == ["venv", ".[jax]"]
    assert checkout.run("demo") == ([], "")
    assert checkout.run("complete")[0] == COMPLETE
    assert checkout.run("demo") == ([], "")


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_recipe_is_followed_in_the_same_environment(checkout: Checkout, name: str) -> None:
    checkout.run("complete")
    with (checkout.folder / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("complete")[0] == COMPLETE
    assert checkout.run("complete") == ([], "")


def test_a_setup_that_was_stopped_is_begun_again(checkout: Checkout) -> None:
    (checkout.folder / "stop").touch()
    assert checkout.run("complete", code=1)[0] == ["venv"]
    (checkout.folder / "stop").unlink()
    (checkout.folder / ".venv" / "half-copied").touch()
    assert checkout.run("complete")[0] == ["venv", *COMPLETE]
    assert not (checkout.folder / ".venv" / "half-copied").exists()
    assert checkout.run("complete") == ([], "")


def test_an_environment_without_a_working_python_is_made_again(checkout: Checkout) -> None:
    checkout.run("complete")
    (checkout.folder / ".venv" / "bin" / "python").write_text(SHIM)
    assert checkout.run("complete")[0] == ["venv", *COMPLETE]


def test_an_environment_that_was_moved_is_made_again(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("complete")
    checkout.folder.rename(tmp_path / "moved")
    moved = Checkout(folder=tmp_path / "moved", commands=checkout.commands)
    assert moved.run("complete")[0] == ["venv", *COMPLETE]


def test_an_environment_made_by_hand_is_completed(checkout: Checkout) -> None:
    checkout.run("complete")
    (checkout.folder / ".venv" / "READY").unlink()
    (checkout.folder / ".venv" / "kept").touch()
    assert checkout.run("complete")[0] == COMPLETE
    assert (checkout.folder / ".venv" / "kept").exists()


def test_another_python_makes_another_environment(checkout: Checkout) -> None:
    checkout.run("complete")
    checkout.install("python3.12", PYTHON.format(version="3.12.1"))
    assert checkout.run("complete") == ([], "")
    assert checkout.run("complete", "python3.12")[0] == ["venv", *COMPLETE]
    assert checkout.run("complete", "python3.12") == ([], "")
    assert checkout.run("complete") == ([], "")


def test_takes_the_first_python_that_runs(checkout: Checkout) -> None:
    checkout.install("python3", OLD)
    checkout.install("python3.13", SHIM)
    checkout.install("python3.12", PYTHON.format(version="3.12.1"))
    assert checkout.run("demo")[1].startswith("setup: making .venv with python3.12 (Python 3.12.1)\n")


def test_an_activated_environment_is_not_made_from_itself(checkout: Checkout) -> None:
    checkout.run("complete")
    shutil.copy(checkout.folder / ".venv" / "bin" / "python", checkout.folder / ".venv" / "bin" / "python3")
    assert checkout.run("complete", activated=True) == ([], "")
    (checkout.folder / ".venv" / "UNFINISHED").touch()
    assert checkout.run("complete", activated=True)[0] == ["venv", *COMPLETE]
    (checkout.folder / ".venv" / "UNFINISHED").touch()
    message = checkout.run("complete", str(checkout.folder / ".venv" / "bin" / "python"), code=2)[1]
    assert "bin/python is that of the environment itself\n" in message


def test_reports_what_it_tried_if_no_python_is_suitable(checkout: Checkout) -> None:
    checkout.install("python3", OLD)
    checkout.install("python3.13", SHIM)
    assert checkout.run("complete", code=2) == (
        [],
        "setup: no usable Python. Shardwright needs one from 3.11 to 3.13. Tried:\n"
        "  python3 is Python 3.9.2\n"
        "  python3.13 shim: no such version\n"
        "  python3.12 is not there\n"
        "  python3.11 is not there\n"
        "  python is not there\n"
        "setup: Install one, or name one: make setup PYTHON=/path/to/python3.12\n",
    )
    assert "  python9 is not there\n" in checkout.run("complete", "python9", code=2)[1]
    assert not (checkout.folder / ".venv").exists()
