"""What the tables hold, as data: one row per layer, before and after, and what was not looked at."""

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
    """One part of the model: its place, the site that stands out most, and that site's delta."""

    place: str
    site: str
    delta: SiteDelta
    introduced: float | None


def layer_rows(candidate: Candidate) -> list[LayerRow]:
    """The worst site of embed, of each block, of the final norm and of the logits, in the order of the data."""
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
    """The noise ratio as a multiple of the limit at its site; without a ratio only the distance speaks."""
    return delta.rel - 1.0 if delta.noise_ratio is None else delta.noise_ratio / limit_of(delta.site)


def is_wrong(delta: SiteDelta) -> bool:
    """More than rounding explains, or not known."""
    return delta.noise_ratio is None or delta.noise_ratio > limit_of(delta.site)


def _folded(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Runs of blocks within the limit become one row, `blocks.3-24`, with the worst of them."""
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
    """Sites that are wrong even from correct inputs, in the order of the data."""
    return [delta for delta in candidate.sites if (delta.introduced_ratio or 0.0) > limit_of(delta.site)]


def before_after(candidate: Candidate) -> tuple[list[str], list[list[str]]]:
    """Titles and rows (metric by metric) of the logits as shipped, against a right reference, and patched."""
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
    """(site, why), one row per kind of site: `blocks.*.pattern` for every layer."""
    return _grouped((item.site, item.why) for item in candidate.not_visible)


def not_tested(owner: Candidate | Report) -> list[tuple[str, str]]:
    """(what, why), one row per kind."""
    return _grouped((item.what, item.why) for item in owner.not_tested)


def _grouped(items: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """One row for what differs by the number of its layer alone, in what it names and in the reason."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for what, why in items:
        groups.setdefault((_of_any_layer(what), _of_any_layer(why)), []).append((what, why))
    return [kind if len(set(rows)) > 1 else rows[0] for kind, rows in groups.items()]


def _of_any_layer(said: str) -> str:
    return re.sub(r"(blocks|layers)\.\d+\.", r"\1.*.", said)


def own_variation_line(candidate: Candidate) -> str | None:
    """What part of the distance is the candidate's own kernels; None where decoding moved nothing, or was not compared."""
    own = candidate.own_variation
    if own is None or not own.rmse:
        return None
    return (
        f"decoded from the cache and all at once they are {ratio(own.noise_ratio)} the noise floor apart; that explains "
        f"{own.explained:.0%} of the squared distance to the reference in decoding (at {own.site})"
    )
