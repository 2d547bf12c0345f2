"""An S3 server (moto) in this process, with one empty bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL")


@contextmanager
def bucket() -> Iterator[str]:
    """`s3://BUCKET`; the environment says where its server is, for processes that are started meanwhile too."""
    for name in ("s3fs", "moto.server"):
        pytest.importorskip(name, reason=f"S3 WAS NOT TESTED: {name} is not installed")
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    before = {name: os.environ.get(name) for name in NAMES}
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= dict(zip(NAMES, ("test", "test", "us-east-1", f"http://{host}:{port}"), strict=True))
    boto3.client("s3").create_bucket(Bucket="fleet")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        yield "s3://fleet"
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
