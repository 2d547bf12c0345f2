"""Pictures of a worked example's page in headless Chromium: wide and narrow, light and dark.

python benchmarks/page_pictures.py gemma-2-2024 docs/images
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "report"))
HEIGHT = 1500


def main() -> None:
    """Write `report-<width>-<light or dark>.png` for both widths."""
    from browser import opened

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", help="a folder of reports/examples")
    parser.add_argument("out", type=Path, help="directory of the pictures")
    asked = parser.parse_args()
    page = ROOT / "reports" / "examples" / asked.example / "report.html"
    for width in (1280, 390):
        for dark in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                seen = opened(page, Path(folder), width=width, height=HEIGHT, dark=dark)
                assert (seen.console, seen.addresses) == ((), ())
                shutil.copy(seen.picture, asked.out / seen.picture.name)


if __name__ == "__main__":
    main()
