"""SGLang's own server, started by this process for the time of the session: its real scheduler, radix cache and sampler.

A start of SGLang that fails kills the process that it was started from. Here that is the server, and not this worker, which
says what happened.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

from parity_audit.backends import sglang_settings
from parity_audit.backends.endpoint import Endpoint
from parity_audit.backends.free_port import free_port
from parity_audit.backends.served import ServedBackend, recognised
from parity_audit.core.errors import BackendFailed
from parity_audit.core.types import Description
from parity_audit.core.wire import LoadRequest

ORIGINAL = "return_original_logprob"
"""Our name for SGLANG_RETURN_ORIGINAL_LOGPROB: log-probabilities of sampled tokens from before the temperature."""
ORIGINAL_ENV = "SGLANG_RETURN_ORIGINAL_LOGPROB"
SERVE = """\
import json, sys
from sglang.launch_server import run_server
from sglang.srt.server_args import ServerArgs
run_server(ServerArgs(**json.loads(sys.argv[1])))
"""
LOOK_AGAIN = 0.25
"""Seconds between two questions whether the server is ready; it takes ten to thirty."""


class SglangServer(ServedBackend):
    """`sglang.launch_server` on a free port of this machine; settings go to `ServerArgs`."""

    process: subprocess.Popen[bytes]

    def load(self, request: LoadRequest) -> None:
        """Start the server and wait until it answers.

        Raises:
            BackendFailed: SGLang does not have a setting, or the server ended instead of starting.
        """
        sglang_settings.set_environment(request.device)
        given = dict(request.settings)
        original = bool(given.pop(ORIGINAL, False))
        plain = sglang_settings.arguments(replace(request, settings=given))
        port = free_port()
        environ = {**os.environ, ORIGINAL_ENV: str(int(original))}
        command = [sys.executable, "-I", "-c", SERVE, json.dumps({**plain, "host": "127.0.0.1", "port": port})]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL)
        self.request, self.original = request, original
        url = f"http://127.0.0.1:{port}"
        self._wait(Endpoint(url, timeout=LOOK_AGAIN * 20))
        self.server = recognised(Endpoint(url), request)

    def describe(self) -> Description:
        """What the server says of itself, and what it was started with."""
        about = super().describe()
        return replace(about, settings={**about.settings, ORIGINAL: self.original})

    def _wait(self, endpoint: Endpoint) -> None:
        while True:
            code = self.process.poll()
            if code is not None:
                raise BackendFailed(
                    f"SGLang's server ended with exit code {code} while it started", code="server-start"
                )
            try:
                endpoint.get("/health")
                return
            except BackendFailed:
                time.sleep(LOOK_AGAIN)
