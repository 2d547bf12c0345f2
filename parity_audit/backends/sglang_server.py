"""SGLang's own server with its real scheduler, radix cache and sampler, started by this process for the session.

If a start of SGLang fails, SGLang kills the process that it runs in. The server therefore runs in a process of its own,
so that this worker survives and can report the failure.
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
"""Our setting for SGLANG_RETURN_ORIGINAL_LOGPROB: return log-probabilities of sampled tokens before the temperature."""
ORIGINAL_ENV = "SGLANG_RETURN_ORIGINAL_LOGPROB"
SERVE = """\
import json, sys
from sglang.launch_server import run_server
from sglang.srt.server_args import ServerArgs
run_server(ServerArgs(**json.loads(sys.argv[1])))
"""
LOOK_AGAIN = 0.25
"""Seconds between two checks whether the server is ready; a start takes ten to thirty seconds."""


class SglangServer(ServedBackend):
    """`sglang.launch_server` on a free port of this machine; the settings are passed to `ServerArgs`."""

    process: subprocess.Popen[bytes]

    def load(self, request: LoadRequest) -> None:
        """Start the server and wait until it answers.

        Raises:
            BackendFailed: SGLang does not know a setting, or the server ended while it started.
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
        """Return the server's description of itself, with the setting `ORIGINAL` that it was started with."""
        about = super().describe()
        return replace(about, settings={**about.settings, ORIGINAL: self.original})

    def _wait(self, endpoint: Endpoint) -> None:
        """Wait until the server answers; raise BackendFailed if its process ends first."""
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
