"""Import vLLM for the CPU as a request without settings needs it.

A fork server imports this module once, and its workers share what was imported.
"""

import importlib

from parity_audit.backends import vllm_engine

vllm_engine.set_environment({}, "cpu")
importlib.import_module("vllm.entrypoints.llm")
importlib.import_module("vllm.v1.worker.cpu_worker")
