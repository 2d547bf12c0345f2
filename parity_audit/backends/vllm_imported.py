"""vLLM as a request without settings wants it imported, on the CPU: what its forked workers have in common."""

import importlib

from parity_audit.backends import vllm_engine

vllm_engine.set_environment({}, "cpu")
importlib.import_module("vllm.entrypoints.llm")
importlib.import_module("vllm.v1.worker.cpu_worker")
