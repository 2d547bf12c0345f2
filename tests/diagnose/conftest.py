"""Put the hand-written generator of activations, and the helpers of the specs' and the formulas' tests, within reach."""

import sys
from pathlib import Path

import pytest
import torch

for folder in ("", "../specs", "../formulas"):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
