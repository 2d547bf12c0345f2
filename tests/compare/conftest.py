"""Put the captures in memory within reach of the tests next to them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
