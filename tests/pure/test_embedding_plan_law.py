"""The law of ids held against sums over every row."""

from __future__ import annotations

import numpy as np
import pytest

from meshplan.embedding._cost_law import id_law


def chances(rows: int, zipf: float, first: int = 0) -> np.ndarray:
    weights = (first + np.arange(1, rows + 1)) ** -float(zipf)
    return weights / weights.sum()


@pytest.mark.parametrize(("rows", "zipf", "first"), [(1, 1.0, 0), (40, 1.2, 0), (20_000, 1.05, 0), (20_000, 1.0, 0),
                                                     (30_000, 0.7, 500), (5000, 0.0, 0)])  # fmt: skip
def test_shares_and_touched_rows_are_those_of_the_sums(rows: int, zipf: float, first: int) -> None:
    law, chance = id_law(rows, zipf, first), chances(rows, zipf, first)
    for low, high in [(0, 1), (0, rows), (rows // 3, rows // 2), (rows // 2, rows)]:
        assert law.share(low, high) == pytest.approx(chance[low:high].sum(), rel=0.02, abs=1e-12)
        for draws in (1.0, 1e3, 1e6):
            touched = -np.expm1(draws * np.log1p(-np.minimum(chance[low:high], 1 - 1e-15))).sum()
            assert law.unique(draws, low, high) == pytest.approx(touched, rel=0.02, abs=1e-9)
    assert law.share(0, rows) == pytest.approx(1)


def test_the_hottest_rows_of_a_share_are_the_least_number() -> None:
    law, below = id_law(10_000, 1.1), np.cumsum(chances(10_000, 1.1))
    for share in (0.2, 0.5, 0.9):
        assert law.rows_for(share) == pytest.approx(int(np.searchsorted(below, share)) + 1, rel=0.02, abs=1)


def test_piecewise_touched_rows_add_up_and_never_exceed_rows_or_draws() -> None:
    law = id_law(100_000, 1.05)
    edges = np.linspace(0, 100_000, 9)
    pieces = law.unique(5e4, edges[:-1], edges[1:])
    assert pieces.sum() == pytest.approx(float(law.unique(5e4)))
    assert (pieces <= np.diff(edges)).all() and pieces.sum() <= 5e4
