"""Helpers are modules beside these tests, and the architectures of the specs' tests."""

import sys
from pathlib import Path

for folder in ("", "../specs"):
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))
