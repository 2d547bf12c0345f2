"""Put the hand-written generator of activations within reach of the tests next to it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
