"""Heat maps of sites by layers as HTML tables; every cell has its number, and the colour only repeats it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity_audit.core.limits import WARN_SHARE, limit_of
from parity_audit.core.report import SiteDelta
from parity_audit.report.html import text_of

Ratio = Callable[[SiteDelta], "float | None"]
STEPS = ((WARN_SHARE, "n0"), (1.0, "n1"), (10.0, "n2"), (1000.0, "n3"), (float("inf"), "n4"))
"""The CSS class of a cell for each range of the noise ratio over the site's limit; each entry has the range's upper end."""
KEY = (
    ("n0", "rounding"), ("n1", "near the limit"), ("n2", "up to 10 limits"), ("n3", "up to 1000"), ("n4", "more"),
    ("nn", "not measured"),
)  # fmt: skip


def heat_map(title: str, about: str, deltas: Sequence[SiteDelta], ratio: Ratio, *, first: str = "") -> str:
    """Return a figure with a row per kind of site, in the order of the data, and a column per layer.

    `ratio` reads the number of a cell from its delta; `first` is the site whose cell is outlined.
    """
    layers = sorted({delta.layer for delta in deltas if delta.layer is not None})
    by_site = {delta.site: delta for delta in deltas}
    rows = dict.fromkeys(_local(delta) for delta in deltas)
    body = "".join(_row(name, per_layer, layers, by_site, ratio, first) for name, per_layer in rows)
    head = "".join(f'<th scope="col">{layer}</th>' for layer in layers)
    return (
        f'<figure><figcaption>{text_of(title)} <span>{text_of(about)}</span></figcaption><div class="scroll" role="region" '
        f'tabindex="0" aria-label="{text_of(title)}"><table class="heat"><thead><tr><th scope="col">layer</th>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div></figure>"
    )


def key() -> str:
    """Return the legend of the cell colours."""
    items = "".join(f'<li><i class="{name}"></i>{text}</li>' for name, text in KEY)
    return f'<ul class="key">{items}<li>outlined: first divergence</li></ul>'


def _local(delta: SiteDelta) -> tuple[str, bool]:
    """Return a site's name within its block, and whether it is in a block."""
    return (
        delta.site if delta.layer is None else delta.site.removeprefix(f"blocks.{delta.layer}."),
        delta.layer is not None,
    )


def _row(
    name: str, per_layer: bool, layers: Sequence[int], by_site: dict[str, SiteDelta], ratio: Ratio, first: str
) -> str:
    sites = [f"blocks.{layer}.{name}" for layer in layers] if per_layer else [name]
    wide = f' colspan="{len(layers)}"' if not per_layer and len(layers) > 1 else ""
    cells = "".join(_cell(by_site.get(site), ratio, site == first, wide) for site in sites)
    return f'<tr><th scope="row">{text_of(name)}</th>{cells}</tr>'


def _cell(delta: SiteDelta | None, ratio: Ratio, first: bool, wide: str) -> str:
    value = None if delta is None else ratio(delta)
    if delta is None or value is None:
        return f'<td class="nn"{wide}>-</td>'
    share = value / limit_of(delta.site)
    kind = next(name for top, name in STEPS if share <= top)
    hint = f"{delta.site}: {value:.4g} times the noise floor, limit {limit_of(delta.site):g}, probe {delta.probe}"
    mark = " first" if first else ""
    return f'<td class="{kind}{mark}"{wide} title="{text_of(hint)}">{brief(value)}</td>'


def brief(value: float) -> str:
    """Return a number in at most four characters: `0`, `1.1`, `137`, `7e4`."""
    if value == 0:
        return "0"
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 999.5 else f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
