"""The examples of README.md and docs/ behave as shown; and a wrong example is detected."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.laws.documents import ExampleError, blocks, matches, run_document
from tests.laws.forked import started

# Examples may import JAX, and start commands.
pytestmark = [pytest.mark.devices, pytest.mark.processes]

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = [*DOCUMENTS, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MARKDOWN, ids=name_of)
def test_document_exists_and_its_links_are_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for block in blocks(text):
        text = text.replace("\n".join(block.lines), "")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    broken = [link for link in links if link and "://" not in link and not (path.parent / link).exists()]
    assert not broken


@pytest.fixture(scope="module")
def reader_environment(
    user_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A user's, with commands that start at once."""
    with started(tmp_path_factory.mktemp("bin"), user_environment) as folder:
        yield {**user_environment, "PATH": os.pathsep.join([str(folder), user_environment["PATH"]])}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_examples(path: Path, tmp_path: Path, reader_environment: dict[str, str]) -> None:
    run_document(path, tmp_path, reader_environment)


WITH_COMMANDS = [
    path for path in DOCUMENTS if re.search(r"\$ .*(shardwright|torchrun)", path.read_text(encoding="utf-8"))
]


@pytest.mark.matrix
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name_of)
def test_examples_with_the_commands_themselves(path: Path, tmp_path: Path, user_environment: dict[str, str]) -> None:
    run_document(path, tmp_path, user_environment)


def test_a_rank_that_fails_ends_torchrun(tmp_path: Path, reader_environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:], flush=True)\n"
        "sys.exit('bad') if os.environ['RANK'] == '1' else signal.pause()\n"
    )
    command = ["torchrun", "--nproc-per-node", "2", str(script), "more"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=reader_environment)
    assert (ran.returncode, sorted(ran.stdout.splitlines())) == (1, ["0 2 more", "1 2 more"]), ran.stderr


def run(text: str, folder: Path, environment: dict[str, str]) -> int:
    document = folder / "document.md"
    document.write_text(text)
    return run_document(document, folder, environment)


GOOD = """\
# A document

```python
x = 2
```

```yaml
# mine.yaml
mesh: {fsdp: 2}
```

1. In a list:

   ```python
   >>> x + 1
   3
   ```

```console
$ cat mine.yaml
mesh: {fsdp: 2}
$ printf '%s\\n' one \\
> two three
one
...
$ python -c 'import sys; sys.exit("bad")' || echo "exit code $?"
bad
exit code 1
$ true
```

```text
$ false
```

```python
with open("mine.yaml") as file:
    assert file.read() == "mesh: {fsdp: 2}\\n"
```
"""


def test_a_correct_document(tmp_path: Path, user_environment: dict[str, str]) -> None:
    assert run(GOOD, tmp_path, user_environment) == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n```python\nx = 1\nassert x == 2, x\n```\n", "document.md:4: AssertionError: 1"),
        ("```python\n>>> 1 + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2"),
        ("```console\n$ echo a\nb\n```\n", "document.md:2: $ echo a\n--- the document says\nb\n--- it prints\na\n"),
        ("```console\n$ echo a\n```\n", "--- the document says\n\n--- it prints\na\n"),
        ("```console\n$ true\na\n```\n", "--- the document says\na\n--- it prints\n"),
        ("```console\n$ echo a; exit 3\na\n```\n", "document.md:2: exit code 3: $ echo a; exit 3\na\n"),
        ("```console\necho a\n```\n", "line 2: a console block begins with a command, after '$ '"),
        ("text\n```python\nx = 1\n", "line 2: this block is never closed"),
    ],
)
def test_a_wrong_document(tmp_path: Path, user_environment: dict[str, str], text: str, message: str) -> None:
    with pytest.raises(ExampleError) as caught:
        run(text, tmp_path, user_environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (("a",), "a  \n\n", True),
        (("a",), "a\nb\n", False),
        (("a", "..."), "a\n", True),
        (("a", "..."), "a\nb\nc\n", True),
        (("...", "c"), "a\nb\nd\n", False),
        (("a ... c",), "a b c\n", True),
        (("a ... c",), "a b\nc\n", False),
        (("a.c",), "abc\n", False),
        ((), "", True),
        ((), "a\n", False),
    ],
)
def test_what_dots_stand_for(expected: tuple[str, ...], printed: str, same: bool) -> None:
    assert matches(expected, printed) is same
