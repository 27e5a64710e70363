"""Resumes from a store that gives one wrong answer each: none moves an intact step or goes on from an older one.

``python -m tests.runs.wrong_answers --count 300 --seed 0`` draws them and prints what came of each kind. Every tenth has a step that is
really damaged instead, and that must be proven.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardwright.checkpoint import verify
from shardwright.core.findings.errors import InputError
from shardwright.runs import run
from shardwright.storage import asking
from shardwright.storage.url import Url
from shardwright.training.options import RunOptions, Silent
from tests.runs.counting import NOBODY, counting, go, made, options, plan_of, sums
from tests.storage.s3 import BUCKET, Server, using
from tests.storage.wrong_answers import NEWEST, Proxy, Request, between, faults_of

DAMAGED_EVERY = 10
RUN = "train llama3-test --layout fsdp --mesh fsdp=1 --steps 6 --batch 2 --length 32 --checkpoint-every 2"
COMMAND = (sys.executable, "-m", "shardwright", *RUN.split())


class Resumes:
    """A run of six steps that was stopped after four, with saves of steps 2 and 4 and what a killed save has left beside step 4.

    ``direct``: the environment of a client that asks the server itself. ``command``: of the run, where each resume is a process.
    ``objects``: of the bucket, and ``kept`` the files of the run's folder, as each resume finds them. ``requests`` and ``loss``: of a
    resume without a wrong answer.
    """

    def __init__(self, options: RunOptions, proxy: Proxy, direct: Mapping[str, str], command: Sequence[str]) -> None:
        self.options, self.proxy, self.direct, self.command = options, proxy, direct, command
        self.kept = options.out.with_name("kept")
        shutil.copytree(options.out, self.kept)
        key = (options.out / "checkpoints.txt").read_text().splitlines()[1]
        left = f"{str(options.checkpoints).removeprefix(f's3://{BUCKET}/')}/checkpoints/{NEWEST}/{key}-deadbeef/declared-00000.json"
        self.objects = {**self.there(), left: b"[]"}
        self.restore({})
        self.loss, _ = self.resume()
        self.requests = tuple(proxy.asked)

    def restore(self, changed: Mapping[str, bytes | None]) -> None:
        """The bucket and the run's folder as they were, but for some objects."""
        client, wanted = self.client, {**self.objects, **changed}
        for name in self.there():
            if name not in wanted:
                client.delete_object(Bucket=BUCKET, Key=name)
        for name, data in wanted.items():
            if data is None:
                client.delete_object(Bucket=BUCKET, Key=name)
            else:
                client.put_object(Bucket=BUCKET, Key=name, Body=data)
        for path in self.options.out.iterdir():
            path.unlink()
        for path in self.kept.iterdir():
            shutil.copy(path, self.options.out)

    @cached_property
    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.direct["AWS_ENDPOINT_URL"])

    def there(self) -> dict[str, bytes]:
        client, prefix = self.client, str(self.options.checkpoints).removeprefix(f"s3://{BUCKET}/")
        names = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]
        return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def resume(self) -> tuple[float | str, list[str]]:
        """The last loss of one resume, or its message; and the lines that it printed."""
        if self.command:
            return self._resume_by_command()
        shown = Silent()
        try:
            resumed = replace(self.options, resume=True, stop_after=None)
            outcome = run(resumed, plan_of(), shown, connection=NOBODY, make_engine=made(counting()))
        except InputError as error:
            return str(error), shown.messages
        assert outcome.loss is not None
        return outcome.loss, shown.messages

    def _resume_by_command(self) -> tuple[float | str, list[str]]:
        """A process of its own, as a person starts it. Its pauses are real."""
        environment = {**os.environ, **self.proxy.environment}
        ended = subprocess.run(
            [*self.command, "--resume"], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert ended.returncode in (0, 2), ended
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line]
        if ended.returncode:
            return "\n".join(lines), []
        metrics = (self.options.out / "metrics.jsonl").read_text().splitlines()
        return json.loads(metrics[-1])["loss"], lines

    def faulty(self, request: Request, fault: str) -> str:
        """A resume with one wrong answer. Returns what came of it, raises AssertionError where it is wrong."""
        self.restore({})
        self.proxy.clear((request, faults_of(request)[fault]))
        outcome, messages = self.resume()
        was_wrong = self.proxy.was_wrong
        self.proxy.clear()
        told = f"{request} {fault}: {outcome} {messages}"
        there = self.there()
        moved = [name for name, data in self.objects.items() if there.get(name) != data and "-deadbeef/" not in name]
        assert not moved, f"{told}\nchanged: {moved}"
        assert not any("damaged" in name for name in there), told
        assert not any("skipped" in line or "begins again" in line for line in messages), told
        if isinstance(outcome, str):
            assert len(outcome) < 2000, told
            assert "Traceback" not in outcome, told
            return "ended with a message" if was_wrong else "a request that was not made"
        assert outcome == self.loss, told
        assert any(
            f"resumed from {self.options.checkpoints}/checkpoints/{NEWEST} (layout" in line for line in messages
        ), told
        assert verify(str(self.options.checkpoints))["ok"], told
        return "went on from the newest step" if was_wrong else "a request that was not made"

    def damaged(self, draw: random.Random) -> str:
        """A resume where an object of the newest step is really damaged. It must be set aside, and the run go on from step 2."""
        name = draw.choice([name for name in self.objects if NEWEST in name and "-deadbeef/" not in name])
        data = self.objects[name]
        at = draw.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        if name.endswith("manifest.json"):
            # A flipped bit may make another release's manifest of it, and without one there is no step.
            flipped = data.replace(b'"seed": 3', b'"seed": 7')
            how, changed = "flipped", flipped
        else:
            how, changed = draw.choice([("flipped", flipped), ("shortened", data[: at // 2]), ("missing", None)])
        self.restore({name: changed})
        outcome, messages = self.resume()
        told = f"{name} {how} at {at}: {outcome} {messages}"
        assert outcome == self.loss, told
        assert any(
            f"resumed from {self.options.checkpoints}/checkpoints/step-00000002 (layout" in line for line in messages
        ), told
        assert any(NEWEST in name and "damaged" in name for name in self.there()), told
        return "damage proven"


@contextmanager
def stopped_run(folder: Path, direct: Mapping[str, str], name: str, *, by_command: bool = False) -> Iterator[Resumes]:
    """``direct``: the environment of a client of a real server. ``by_command``: by `shardwright train`, in a process of its own."""
    run_options = replace(options(folder), checkpoints=Url(f"s3://{BUCKET}/{name}"), checkpoint_every=2)
    command = (
        (*COMMAND, "--out", str(run_options.out), "--checkpoints", str(run_options.checkpoints)) if by_command else ()
    )
    with using(direct):
        if command:
            subprocess.run([*command, "--stop-after", "4"], capture_output=True, check=True)
        else:
            go(counting(), run_options, stop_after=4)
    port = urlsplit(direct["AWS_ENDPOINT_URL"]).port
    assert port is not None
    with between(port) as proxy:
        resumes = Resumes(run_options, proxy, direct, command)
        assert not isinstance(resumes.loss, str), resumes.loss
        assert by_command or resumes.loss == sums(run_options, 6)[-1]
        yield resumes


def drawn(requests: tuple[Request, ...], draw: random.Random) -> tuple[Request, str]:
    """A request and a wrong answer to it: every kind of request is as likely."""
    kind = draw.choice(sorted({(one.method, one.kind) for one in requests}))
    request = draw.choice([one for one in requests if (one.method, one.kind) == kind])
    return request, draw.choice(sorted(faults_of(request)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="store_true", help="each resume is a process of shardwright train")
    given = parser.parse_args()
    asking.PAUSES_S = (0.0, 0.0, 0.0)
    server, table, failed = Server(), Counter[tuple[str, str, str]](), 0
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            stopped_run(Path(folder), server.environment, "run", by_command=given.command) as resumes,
        ):
            for number in range(given.count):
                draw = random.Random(f"{given.seed} {number}")
                asked, fault = "a step that is damaged", "-"
                try:
                    if number % DAMAGED_EVERY == DAMAGED_EVERY - 1:
                        result = resumes.damaged(draw)
                    else:
                        request, fault = drawn(resumes.requests, draw)
                        asked = f"{request.method} {request.kind}"
                        result = resumes.faulty(request, fault)
                except AssertionError as error:
                    failed += 1
                    print(f"FAILED {number}: {error}\n")
                    result = "FAILED"
                table[asked, fault, result] += 1
    finally:
        server.end()
    for (asked, fault, result), times in sorted(table.items()):
        print(f"{asked:28} {fault:12} {result:30} {times:4}")
    print(f"{given.count} resumes, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
