"""What an audit of a plan must hold, the same on every back end."""

from __future__ import annotations

from meshplan import Audit
from meshplan.core import bytes_by_kind

BYTES, FLOPS, PEAK = 0.05, 0.02, 0.20
ABOVE = 1e6


def report(found: Audit) -> str:
    assert found.predicted is not None and found.memory is not None
    return (
        f"predicted {bytes_by_kind(found.predicted.collectives)} {found.predicted.flops:.4g} FLOP "
        f"{found.predicted.peak_bytes:.4g} B\ncompiled  {found.bytes_by_kind()} {found.flops:.4g} FLOP "
        f"{found.memory.peak_bytes:.4g} B"
    )


def check_prediction(found: Audit) -> None:
    """Bytes within 5 % per kind above 1 MB, FLOPs within 2 %, peak within 20 % of the compiled module's."""
    assert found.predicted is not None and found.memory is not None, found.out_of_memory
    predicted, compiled = bytes_by_kind(found.predicted.collectives), found.bytes_by_kind()
    for kind in {**predicted, **compiled}:
        p, c = predicted.get(kind, 0.0), compiled.get(kind, 0.0)
        if max(p, c) > ABOVE:
            assert abs(p - c) <= BYTES * c, f"{kind}: {p:.4g} against {c:.4g}\n{report(found)}"
    assert abs(found.predicted.flops - found.flops) <= FLOPS * found.flops, report(found)
    assert abs(found.predicted.peak_bytes - found.memory.peak_bytes) <= PEAK * found.memory.peak_bytes, report(found)
