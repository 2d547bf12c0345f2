"""SGLang as it is imported on the CPU: what its forked workers have in common."""

import importlib

from parity_audit.backends import sglang_settings

sglang_settings.set_environment("cpu")
importlib.import_module("sglang.srt.managers.scheduler")
