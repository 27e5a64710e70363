"""A real S3 server on this machine: moto, in a process of its own. Run as a module, it is that process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from unittest.mock import patch
from urllib.request import Request, urlopen

BUCKET = "bucket"
ROOT = Path(__file__).parents[2]

Result = TypeVar("Result")


def environment_of(port: int) -> dict[str, str]:
    """What a client of S3 reads to find this server, and to ask it once only."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def using(environment: Mapping[str, str]) -> Iterator[None]:
    """This process uses the server of an environment. A client keeps what it read when it was made, so that others are dropped."""
    from s3fs import S3FileSystem

    with patch.dict(os.environ, environment):
        S3FileSystem.clear_instance_cache()
        try:
            yield
        finally:
            S3FileSystem.clear_instance_cache()


def run_using(environment: Mapping[str, str], function: Callable[..., Result], *arguments: Any) -> Result:
    """A function in a process of its own, which uses the server of an environment."""
    with using(environment):
        return function(*arguments)


class Server:
    """The server's process. ``environment``: of its clients. It has an empty bucket."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline()
        if not port:
            self.end()
            raise RuntimeError(f"{sys.executable} -m {__name__} did not start: run it to see why.")
        self.environment = environment_of(int(port))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def serving() -> Iterator[Server]:
    """A server, which this process uses."""
    server = Server()
    try:
        with using(server.environment):
            yield server
    finally:
        server.end()


def keys(prefix: str) -> dict[str, bytes]:
    """The objects of the bucket whose names begin with a prefix, read by another client than the one under test."""
    import boto3

    client: Any = boto3.client("s3")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    names = [one["Key"] for page in pages for one in page.get("Contents", ())]
    return {name: client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


def put(name: str, data: bytes) -> None:
    import boto3

    client: Any = boto3.client("s3")
    client.put_object(Bucket=BUCKET, Key=name, Body=data)


@contextmanager
def answering(status: int, body: bytes, length: int | None = None) -> Iterator[dict[str, str]]:
    """A server that gives every request one answer, of which it may send less than the ``length`` that it promises.

    Gives the environment of its clients.
    """

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        environment = environment_of(server.server_address[1])
        with using(environment):
            yield environment
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    port = moto.get_host_and_port()[1]
    with urlopen(Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")):
        pass
    print(port, flush=True)
    # Ends with its parent, however that ends.
    sys.stdin.read()
