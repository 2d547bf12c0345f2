"""Import SGLang for the CPU. A fork server imports this module once, and its workers share what was imported."""

import importlib

from parity_audit.backends import sglang_settings

sglang_settings.set_environment("cpu")
importlib.import_module("sglang.srt.managers.scheduler")
