"""The rows of a report's tables: one per layer, the logits before and after the patch, and what was not tested."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parity_audit.core.limits import limit_of
from parity_audit.core.report import Candidate, LogitsDelta, Report, SiteDelta
from parity_audit.report.numbers import number, ratio

ALWAYS_ALL = 12


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One part of the model: its place, its worst site relative to the limit, and the delta of that site.

    `introduced` is the largest introduced ratio of all its sites.
    """

    place: str
    site: str
    delta: SiteDelta
    introduced: float | None


def layer_rows(candidate: Candidate) -> list[LayerRow]:
    """Return the worst site of each block and each site outside the blocks (embed, final norm, logits).

    The rows are in the order of the data. If there are more than `ALWAYS_ALL`, consecutive blocks within the limit are joined.
    """
    places: dict[str, list[SiteDelta]] = {}
    for delta in candidate.sites:
        place = delta.site if delta.layer is None else f"blocks.{delta.layer}"
        places.setdefault(place, []).append(delta)
    rows = [_row(place, deltas) for place, deltas in places.items()]
    return _folded(rows) if len(rows) > ALWAYS_ALL else rows


def _row(place: str, deltas: Sequence[SiteDelta]) -> LayerRow:
    worst = max(deltas, key=_excess)
    introduced = [delta.introduced_ratio for delta in deltas if delta.introduced_ratio is not None]
    return LayerRow(
        place=place, site=worst.site.removeprefix(f"{place}."), delta=worst,
        introduced=max(introduced) if introduced else None,
    )  # fmt: skip


def _excess(delta: SiteDelta) -> float:
    """Return the noise ratio over the limit of the site, or the relative distance minus 1 if there is no noise ratio.

    The latter is negative for a distance below 100 %, so that such a site ranks below every site with a ratio.
    """
    return delta.rel - 1.0 if delta.noise_ratio is None else delta.noise_ratio / limit_of(delta.site)


def is_wrong(delta: SiteDelta) -> bool:
    """Return whether the noise ratio is above the limit of the site, or is not known."""
    return delta.noise_ratio is None or delta.noise_ratio > limit_of(delta.site)


def _folded(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Join each run of at least three blocks within the limit into one row, `blocks.3-24`, with the worst of them."""
    out: list[LayerRow] = []
    run: list[LayerRow] = []
    for row in [*rows, None]:
        quiet = row is not None and row.delta.layer is not None and not is_wrong(row.delta)
        if quiet and row is not None:
            run.append(row)
            continue
        out += _as_one(run)
        run = []
        if row is not None:
            out.append(row)
    return out


def _as_one(run: Sequence[LayerRow]) -> list[LayerRow]:
    if len(run) < 3:
        return list(run)
    worst = max(run, key=lambda row: _excess(row.delta))
    place = f"{run[0].place}-{run[-1].delta.layer}"
    site = worst.delta.site.removeprefix("blocks.")
    return [LayerRow(place=place, site=site, delta=worst.delta, introduced=worst.introduced)]


def introduced(candidate: Candidate) -> list[SiteDelta]:
    """Return the sites that exceed the limit even when they are replayed on correct inputs, in the order of the data."""
    return [delta for delta in candidate.sites if (delta.introduced_ratio or 0.0) > limit_of(delta.site)]


def before_after(candidate: Candidate) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows (one per metric) of the logits as shipped, against a right reference, and patched."""
    right, after = candidate.right_reference, candidate.patched
    columns = [("as shipped", candidate.verdict, candidate.logits)]
    columns += [("right reference", right.verdict, right.logits)] if right and right.verdict else []
    columns += [(f"patched{', against it' if after.against else ''}", after.verdict, after.logits)] if after else []
    rows = [["verdict", *(verdict.value for _, verdict, _ in columns)]]
    rows += [[name, *(_metric(logits, read) for _, _, logits in columns)] for name, read in METRICS.items()]
    return ["logits", *(title for title, _, _ in columns)], rows


METRICS = {
    "max |difference|": lambda logits: number(logits.max_abs),
    "mean |difference|": lambda logits: number(logits.mean_abs),
    "rmse": lambda logits: number(logits.rmse),
    "rmse / rms": lambda logits: number(logits.rel),
    "noise ratio": lambda logits: ratio(logits.noise_ratio),
    "KL (nats)": lambda logits: number(logits.kl),
    "same top token": lambda logits: f"{100 * logits.top1_agreement:.4g} %",
}


def _metric(logits: LogitsDelta | None, read: object) -> str:
    return "-" if logits is None else str(read(logits))  # type: ignore[operator]


def not_visible(candidate: Candidate) -> list[tuple[str, str]]:
    """Return (site, reason), one row per kind of site: `blocks.*.pattern` stands for several layers."""
    return _grouped((item.site, item.why) for item in candidate.not_visible)


def not_tested(owner: Candidate | Report) -> list[tuple[str, str]]:
    """Return (what, reason), one row for entries that differ in the layer number only."""
    return _grouped((item.what, item.why) for item in owner.not_tested)


def _grouped(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join the items whose name and reason differ in the number of the layer only into one row."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for what, why in items:
        groups.setdefault((_of_any_layer(what), _of_any_layer(why)), []).append((what, why))
    return [kind if len(set(rows)) > 1 else rows[0] for kind, rows in groups.items()]


def _of_any_layer(said: str) -> str:
    return re.sub(r"(blocks|layers)\.\d+\.", r"\1.*.", said)


def own_variation_line(candidate: Candidate) -> str | None:
    """Return how much of the distance to the reference the candidate's own two ways to run explain.

    The result is None if decoding from the cache gave the same result as one pass, or was not compared.
    """
    own = candidate.own_variation
    if own is None or not own.rmse:
        return None
    return (
        f"decoded from the cache and all at once they are {ratio(own.noise_ratio)} the noise floor apart; that explains "
        f"{own.explained:.0%} of the squared distance to the reference in decoding (at {own.site})"
    )
