"""Read captures from disk: the manifest first, every file checked against its hash, tensors a few rows at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from parity_audit.cache.contents import sha256_of
from parity_audit.core.errors import CaptureBroken
from parity_audit.core.jsonio import dumps, from_plain
from parity_audit.core.manifest import CAPTURE_FORMAT, MANIFEST_NAME, Entry, Manifest
from parity_audit.core.types import Probe
from parity_audit.core.whole_file import write_whole

TENSOR = "x"
MANIFEST_HASH = "manifest.sha256"
RESULTS_ONLY = "judged.json"
"""The file in a capture's directory that keeps the results found with its tensors after the tensors were deleted."""
RETAKE = "take the capture again; this one cannot be trusted"


class Capture:
    """A capture directory. Files are verified once, when first read, unless they were `just_written`."""

    def __init__(self, folder: Path, manifest: Manifest, *, just_written: bool = False) -> None:
        self.folder = folder
        self.manifest = manifest
        self._verified = {entry.file for entry in manifest.entries} if just_written else set()

    @property
    def probes(self) -> Sequence[Probe]:
        """The probes that were run."""
        return self.manifest.probes

    @cached_property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """Manifest entries by (probe, site)."""
        return {(entry.probe, entry.site): entry for entry in self.manifest.entries}

    @property
    def hashes(self) -> dict[tuple[str, str], str]:
        """The sha256 of every tensor file that has one in the manifest, by (probe, site)."""
        return {key: entry.sha256 for key, entry in self.entries.items() if entry.sha256}

    @cached_property
    def _sites(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for probe, site in self.entries:
            found.setdefault(probe, set()).add(site)
        return found

    def only(self, probes: Sequence[Probe]) -> Capture:
        """Return the same capture, restricted to some probes."""
        names = {probe.name for probe in probes}
        same = Capture(self.folder, dataclasses.replace(
            self.manifest, probes=tuple(probe for probe in self.manifest.probes if probe.name in names)
        ))  # fmt: skip
        same._verified = self._verified
        return same

    def where(self, keep: Callable[[Entry], bool]) -> Capture:
        """Return the same capture, restricted to the tensors whose entry satisfies `keep`."""
        entries = tuple(entry for entry in self.manifest.entries if keep(entry))
        same = Capture(self.folder, dataclasses.replace(self.manifest, entries=entries))
        same._verified = self._verified
        return same

    def without(self, sites: Collection[str]) -> Capture:
        """The same capture without some sites."""
        return self.where(lambda entry: entry.site not in sites)

    def sites(self, probe: str) -> set[str]:
        """Return the sites captured for one probe."""
        return self._sites.get(probe, set())

    def shape(self, probe: str, site: str) -> tuple[int, ...]:
        """The shape of one tensor, from the manifest."""
        return self._entry(probe, site).shape

    def assumes(self, probe: str, site: str) -> str:
        """Return the assumption about the program's code under which a tensor is this site; empty if a module shows the site."""
        return self._entry(probe, site).assumes

    def raised(self, probe: str) -> str:
        """Return where in a probe the program failed, with its error; empty if it ran the probe."""
        return self.manifest.raised.get(probe, "")

    def digest(self, probe: str, site: str) -> str:
        """The hash of one tensor's file, from the manifest."""
        return self._entry(probe, site).sha256

    def file(self, probe: str, site: str) -> Path:
        """The safetensors file of one tensor."""
        return self.folder / self._entry(probe, site).file

    def tensor(self, probe: str, site: str) -> Tensor:
        """One whole tensor."""
        return self.rows(probe, site, 0, self.shape(probe, site)[1])

    def rows(self, probe: str, site: str, start: int, stop: int) -> Tensor:
        """Return the rows `[start, stop)` on axis 1 of one tensor, every other axis whole.

        Raises:
            CaptureBroken: missing, truncated or altered file.
        """
        entry = self._entry(probe, site)
        path = self.folder / entry.file
        self._verify(entry, path)
        try:
            with safe_open(path, framework="pt") as handle:
                part: Tensor = handle.get_slice(TENSOR)[:, start:stop]
                return part
        except (SafetensorError, OSError) as error:
            raise CaptureBroken(
                f"cannot read {site} of probe {probe}: {error}", where=str(path), hint=RETAKE
            ) from error

    def verify(self) -> None:
        """Read every file and compare it with its hash.

        Raises:
            CaptureBroken: one is missing, truncated or altered.
        """
        for entry in self.manifest.entries:
            self._verify(entry, self.folder / entry.file)

    def _entry(self, probe: str, site: str) -> Entry:
        try:
            return self.entries[probe, site]
        except KeyError:
            raise CaptureBroken(f"no {site} for probe {probe} in this capture", where=str(self.folder)) from None

    def _verify(self, entry: Entry, path: Path) -> None:
        if entry.file in self._verified:
            return
        if not path.is_relative_to(self.folder) or ".." in Path(entry.file).parts:
            raise CaptureBroken(f"the manifest points outside its directory: {entry.file}", where=str(self.folder))
        try:
            found = sha256_of(path)
        except OSError as error:
            raise CaptureBroken(f"{entry.file} is missing", where=str(path), hint=RETAKE) from error
        if entry.sha256 and found != entry.sha256:
            raise CaptureBroken(
                f"{entry.file} is truncated or was altered",
                where=str(path),
                expected=entry.sha256,
                found=found,
                hint=RETAKE,
            )
        self._verified.add(entry.file)


def with_newer(capture: Capture, newer: Capture, folder: Path) -> Capture:
    """Write a capture to `folder` that has `newer`'s tensors for the probes that were run again, and `capture`'s for the others.

    Files are linked, or copied if the disk has no links; both given captures stay as they are.
    """
    again = {probe.name: probe for probe in newer.probes}
    kept = [entry for entry in capture.manifest.entries if entry.probe not in again]
    for source, entries in ((capture, kept), (newer, newer.manifest.entries)):
        for file in {entry.file for entry in entries}:  # two bit-identical sites share one file
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source.folder / file, target)
            except OSError:
                shutil.copyfile(source.folder / file, target)
    probes = tuple(again.get(probe.name, probe) for probe in capture.probes)
    manifest = dataclasses.replace(capture.manifest, probes=probes, entries=(*kept, *newer.manifest.entries))
    write_manifest(folder, manifest)
    return open_capture(folder, just_written=True)


def open_capture(folder: Path, *, just_written: bool = False) -> Capture:
    """Open a capture directory.

    Args:
        just_written: this audit wrote it, so its files need not be checked against their hashes.

    Raises:
        CaptureBroken: no manifest, not JSON, unknown format, or fields missing.
    """
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
        _check_manifest(folder, text)
        plain = json.loads(text)
        if plain.get("format") != CAPTURE_FORMAT:
            raise CaptureBroken(
                f"capture format {plain.get('format')!r} is not one this version reads", where=str(path),
                expected=str(CAPTURE_FORMAT),
            )  # fmt: skip
        return Capture(folder, from_plain(Manifest, plain), just_written=just_written)
    except FileNotFoundError:
        raise CaptureBroken(
            f"{folder} is not a capture: no {MANIFEST_NAME}",
            where=str(folder),
            hint="make one with `parity-audit capture`",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, AttributeError, OSError) as error:
        raise CaptureBroken(f"{MANIFEST_NAME} cannot be read: {error}", where=str(path), hint=RETAKE) from error


def _check_manifest(folder: Path, text: bytes) -> None:
    """Compare the manifest with its hash, if its writer stored one."""
    known = folder / MANIFEST_HASH
    if known.is_file() and known.read_text().strip() != hashlib.sha256(text).hexdigest():
        raise CaptureBroken(f"{MANIFEST_NAME} was altered", where=str(folder / MANIFEST_NAME), hint=RETAKE)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest's hash, then the manifest in one step and last: a directory with a manifest is a finished capture."""
    folder.mkdir(parents=True, exist_ok=True)
    text = dumps(manifest, indent=1).encode()
    (folder / MANIFEST_HASH).write_text(hashlib.sha256(text).hexdigest())
    write_whole(folder / MANIFEST_NAME, text)
