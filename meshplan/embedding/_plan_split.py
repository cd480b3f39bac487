"""Tables of a known Zipf law, kept as hot rows on every device and cold rows in shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshplan.embedding._cost import GATHERED, Feature, Group, Pricing, options
from meshplan.embedding._plan_data import Split
from meshplan.embedding._runtime_split import split_table
from meshplan.embedding._solve import make_placing

_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_MOST_ROWS = 0.25  # of the table: beyond, little is cold


def split_features(
    features: Sequence[Feature], group: Group, pricing: Pricing
) -> tuple[tuple[Feature, ...], tuple[Split, ...]]:
    """The features, those split that are cheaper so by their uniform price (what they use on the average device)."""
    found: list[Feature] = []
    splits: list[Split] = []
    for feature in features:
        best = best_split(feature, group, pricing)
        if best is None:
            found.append(feature)
        else:
            found += best[:2]
            splits.append(best[2])
    return tuple(found), tuple(splits)


def best_split(feature: Feature, group: Group, pricing: Pricing) -> tuple[Feature, Feature, Split] | None:
    t = feature.table
    if t.zipf == 0 or t.pooling not in ("sum", "weighted") or group.devices == 1:
        return None
    price, best = _price(feature, group, pricing, None), None
    for share in _SHARES:
        rows = feature.law.rows_for(share)
        if not 0 < rows <= _MOST_ROWS * t.rows:
            continue
        parts = divide(feature, rows)
        both = _price(parts[0], group, pricing, "data") + _price(parts[1], group, pricing, None)
        if both < price:
            price, best = both, parts
    return best


def divide(feature: Feature, hot_rows: int) -> tuple[Feature, Feature, Split]:
    """The hot and the cold rows of a table as two, and what says so."""
    t = feature.table
    share = float(feature.law.share(0, hot_rows))
    split = Split(table=t.name, hot=f"{t.name}/hot", cold=f"{t.name}/cold", hot_rows=hot_rows, hot_share=share)
    hot, cold = split_table(t, split)
    return Feature(table=hot, first=feature.first), Feature(table=cold, first=feature.first + hot_rows), split


def _price(feature: Feature, group: Group, pricing: Pricing, scheme: str | None) -> float:
    """Seconds of the dearest device where the table is alone, spread by its best option."""
    found = [o for o in options(feature, group, pricing) if scheme in (None, o.scheme)]
    if not found:
        return np.inf
    p = make_placing(group, [found], np.inf)
    peaks = [float(p.rates @ o.totals(group.devices)) / group.devices for o in found]
    hot = [float(p.rates @ o.extra.max(axis=1)) if o.extra.size else 0.0 for o in found]
    gather = [p.gather_rate * float(o.common[GATHERED]) for o in found]
    return min(a + b + c for a, b, c in zip(peaks, hot, gather, strict=True))
