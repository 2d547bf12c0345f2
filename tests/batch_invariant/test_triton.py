"""The kernels for CUDA, in Triton's interpreter on the CPU: numbers against float64, bits of a row, a whole model, refusals.

The interpreter runs the source of the kernels, not what a device's compiler makes of it; test_gpu.py asks a device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="NOT TESTED: the Triton kernels in the interpreter; `pip install triton` to run this file without a GPU",
)
SCRIPT = Path(__file__).with_name("interpreted.py")
KERNELS = (
    "linear",
    "matmul",
    "einsum",
    "mv",
    "softmax",
    "log_softmax",
    "logsumexp",
    "mean",
    "sum",
    "rms_norm",
    "layer_norm",
    "attention",
)
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


@pytest.fixture(scope="module")
def found():
    roots = os.pathsep.join([str(SCRIPT.parents[2]), str(SCRIPT.parents[1]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": roots, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_is_its_own_and_its_value_that_of_float64(name, dtype, found):
    kernel = found["kernels"][f"{name}, {dtype}"]

    assert kernel["same"]
    # sums of at most 300 terms in float32, rounded once; the weights of attention are rounded to the dtype of the values too
    assert kernel["error"] <= 8


def test_attention_keeps_the_meaning_of_its_arguments_and_its_gradients(found):
    assert found["arguments"] <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_model_has_the_same_bits_in_one_piece_in_chunks_decoded_and_in_a_batch(dtype, found):
    model = found["models"][dtype]

    assert model["other"] == []
    assert model["sites"] > 15
    assert model["distance"] <= 100


def test_what_has_no_kernel_is_an_error(found):
    exact = found["refused"].pop("cumsum of whole numbers")

    assert exact == ""
    assert set(found["refused"].values()) == {"no-invariant-kernel"}
