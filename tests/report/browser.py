"""A page opened in headless Chromium: what its console said, which addresses were asked for, and how it looks."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
LIGHT = ("--blink-settings=preferredColorScheme=1",)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """`addresses` are those that a page asked for over the network; the browser's own start-up has no page as its origin."""

    console: tuple[str, ...]
    addresses: tuple[str, ...]
    picture: Path


def opened(page: Path, folder: Path, *, width: int = 1280, height: int = 1600, dark: bool = False) -> Opened:
    """Open a file, wait until it is loaded, and take its picture."""
    picture, log = folder / f"{page.stem}-{width}-{'dark' if dark else 'light'}.png", folder / "net.json"
    own = [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", f"--screenshot={picture}"]
    done = subprocess.run(
        [str(CHROMIUM), *QUIET, *own, *(DARK if dark else LIGHT), f"--window-size={width},{height}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Opened(console=console, addresses=_addresses(log), picture=picture)


def _addresses(log: Path) -> tuple[str, ...]:
    events = json.loads(log.read_text())["events"]
    asked = [event.get("params", {}) for event in events]
    return tuple(
        str(one["url"]) for one in asked if "url" in one and str(one.get("initiator", "")).startswith(("file", "null"))
    )
