"""Reports: one tree of parts, to text and to HTML."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from meshplan.core import Collective, MeshShape, Spec
from meshplan.lower._aot import MemoryUse, OutOfMemory
from meshplan.lower._audit import Audit, Prediction
from meshplan.plan import CompareRow, diff, picture_dims, ranges, split_grid
from meshplan.report import (
    Doc,
    audit_doc,
    compare_doc,
    diff_doc,
    html,
    plan_doc,
    show,
    split_picture,
    verify_doc,
)
from meshplan.report import text as plain
from tests._plans import MESH, array, make_plan, spec

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order and collects text, tags and addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(page)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words).replace("\xa0", " ")


def rows_of(text: str, heading: str) -> list[str]:
    """Lines of the section under a heading."""
    return text.split(f"{heading}\n{'-' * len(heading)}\n", 1)[1].strip().split("\n\n")[0].splitlines()


# -------------------------------------------------------------------------------------------------------- plans


def test_a_plan_as_text_begins_with_its_figures() -> None:
    text = plain(plan_doc(make_plan()), 100)
    assert text[: text.index("How the arrays")] == snapshot("""\
train_step on tpu-v5e:2x4
mesh data=2 x model=4 (8 devices), models.gpt:workload size=tiny

step, predicted  4 ms  compute + communication, not overlapped
compute          3 ms  2.5 GFLOP a device
communication    1 ms  197 kB in collectives
peak memory      5 MB  a device, of 16 GB allowed (under 1%)
gap                 0  proven the best for this mesh

time    ████████████████████████████████████▓▓▓▓▓▓▓▓▓▓▓▓  4 ms
memory  ················································  5 MB of 16 GB
        █ compute   ▓ communication   ▒ arguments   ░ all else at the peak

""")


def test_repeated_layers_and_moments_take_one_row() -> None:
    text = plain(plan_doc(make_plan()), 100)
    rows = [re.sub(" {2,}", " | ", row) for row in rows_of(text, "Arguments") if not row.startswith("--")]
    assert rows == snapshot([
        "argument | and alike | shape | dims | stored | used as | each device",
        "state/params/embed | mu | float32[512,64] | vocab embed | (model, None) | (None, model) | 65.5 kB",
        "state/params/layers/*/up x 3 | mu | float32[64,256] | embed mlp | (data, model) | (None, model) | 49.2 kB",
        "state/params/layers/*/scale x 3 | mu | float32[64] | embed | (None) | same | 1.54 kB",
        "batch/tokens | int32[16,32] | batch seq | (data, None) pinned | same | 1.02 kB",
    ])


def test_every_section_of_a_plan_is_there_in_text_and_html() -> None:
    doc = plan_doc(make_plan())
    headings = [
        "How the arrays lie on the devices", "Arguments", "Results", "Collectives", "Memory at the peak",
        "Mesh shapes tried", "Pins", "Axes of named dims", "Notes",
    ]
    text, page = plain(doc), Page(html(doc))
    for heading in headings:
        assert f"\n{heading}\n" in text
        assert heading in page.text
    for said in ("14 results take over the memory of a donated argument", "models/gpt.py:12", "primitive 'sort'"):
        assert said in text
        assert said in page.text
    assert "/home/someone" not in text + page.text, "source lines are shortened"


def test_a_plan_without_extras_has_no_empty_sections() -> None:
    bare = make_plan(collectives=(), at_peak=(), candidates=(), pins=(), rules=(), notes=(), memory_limit=float("inf"))
    text = plain(plan_doc(bare))
    assert "None: nothing moves between devices." in text
    for heading in ("Memory at the peak", "Mesh shapes tried", "Pins", "Axes of named dims", "Notes"):
        assert heading not in text
    assert "peak memory      5 MB  a device\n" in text


# ----------------------------------------------------------------------------------------------------- pictures


def test_pictures_of_one_and_two_dims() -> None:
    data = make_plan()
    drawn = [
        array("up", (64, 256), spec("data", "model"), dims=("embed", "mlp")), array("bias", (256,), spec("model")),
        array("whole", (4, 4), spec(None, None)), array("down", (256, 64), spec("model+data", None)),
    ]
    from meshplan.report._text import split_lines

    text = "\n\n".join("\n".join(split_lines(split_picture(a, data))) for a in drawn)
    assert text == snapshot("""\
up
float32[64,256]: embed over data (2), mlp over model (4)

               mlp / model
             ┌───┬───┬───┬───┐
embed / data │ 0 │ 1 │ 2 │ 3 │
             ├───┼───┼───┼───┤
             │ 4 │ 5 │ 6 │ 7 │
             └───┴───┴───┴───┘

bias
float32[256]: dim 0 over model (4), 2 copies

  dim 0 / model
┌─────┬─────┬─────┬─────┐
│ 0 4 │ 1 5 │ 2 6 │ 3 7 │
└─────┴─────┴─────┴─────┘

whole
float32[4,4]: whole on every device

        dim 1
      ┌─────┐
dim 0 │ 0-7 │
      └─────┘

down
float32[256,64]: dim 0 over model+data (8)

                     dim 1
                   ┌───┐
                   │ 0 │
                   │ 4 │
                   │ 1 │
dim 0 / model+data │ 5 │
                   │ 2 │
                   │ 6 │
                   │ 3 │
                   │ 7 │
                   └───┘\
""")


@given(st.permutations(("a", "b", "c")), st.integers(0, 3), st.integers(0, 3))
def test_every_device_holds_one_piece_and_all_pieces_are_held_equally(axes: list[str], first: int, second: int) -> None:
    mesh = MeshShape((("a", 2), ("b", 3), ("c", 2)))
    stored = Spec((tuple(axes[:first]), tuple(axes[first : first + second])))
    grid = split_grid(stored, mesh, 0, 1)
    cells = [cell for row in grid for cell in row]
    assert sorted(d for cell in cells for d in cell) == list(range(12))
    assert len(cells) == stored.shards(mesh)
    assert len({len(cell) for cell in cells}) == 1


def test_jax_places_the_pieces_where_the_picture_says() -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    stored = spec("model", "data")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    grid = split_grid(stored, MESH, 0, 1)
    placed = NamedSharding(mesh, stored.partition_spec()).devices_indices_map((4, 2))
    for device, (rows, columns) in placed.items():
        assert device.id in grid[rows.start or 0][columns.start or 0]


def test_large_pictures_are_cut() -> None:
    mesh = MeshShape((("data", 64),))
    data = replace(make_plan(arguments=()), mesh=mesh, arguments=(array("x", (64, 8), spec("data", None)),))
    picture = split_picture(data.arguments[0], data)
    assert len(picture.grid) == 8
    assert picture.subtitle.endswith("; 56 more pieces")


def test_split_dims_are_drawn_before_long_ones() -> None:
    assert picture_dims(spec(None, "data", None), (512, 8, 64)) == (0, 1)
    assert picture_dims(spec("data", None, "model"), (4, 512, 4)) == (0, 2)
    assert picture_dims(spec("data"), (8,)) == (-1, 0)
    assert picture_dims(spec(), ()) == (-1, -1)


def test_runs_of_devices_are_shortened() -> None:
    assert ranges([0, 1, 2, 3, 8, 9, 12]) == "0-3 8 9 12"


# --------------------------------------------------------------------------------------------------------- html


def test_a_page_needs_nothing_from_elsewhere() -> None:
    page = html(plan_doc(make_plan()))
    read = Page(page)
    assert read.addresses == []
    assert not read.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in page and "@import" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page


def test_text_of_a_user_is_escaped() -> None:
    evil = '<script>alert("x")</script>&'
    data = make_plan(
        step=evil, notes=(evil,), pins=((evil, evil),), workload=evil, rules=((evil, ("data",)),),
        arguments=(array(evil, (8, 8), spec("data", None), dims=(evil, "")),),
    )
    page = html(plan_doc(data))
    assert "<script" not in page
    assert evil in Page(page).text


@settings(max_examples=25)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_makes_a_well_formed_page(name: str, note: str) -> None:
    page = Page(html(plan_doc(make_plan(step=name, notes=(note,)))))
    assert "Notes" in page.text


def test_the_report_is_the_same_every_time() -> None:
    assert html(plan_doc(make_plan())) == html(plan_doc(make_plan()))


# ----------------------------------------------------------------------------------------------------- terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    show(plan_doc(make_plan()), out, width=160)
    assert "\x1b[" in out.getvalue()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    for said in ("train_step on tpu-v5e:2x4", "state/params/layers/*/up x 3", "models/gpt.py:12", "└───┴───┴───┴───┘"):
        assert said in bare


def test_files_and_machines_without_rich_get_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    doc = plan_doc(make_plan())
    out = io.StringIO()
    show(doc, out, width=100)
    assert out.getvalue() == plain(doc, 100)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    show(doc, terminal)
    assert terminal.getvalue() == plain(doc, 100)


# -------------------------------------------------------------------------------------------------- other faces


def test_a_difference_as_a_report() -> None:
    changed = make_plan(peak_bytes=4e6, machine="h100:1x8", collectives=(), ops=())
    doc = diff_doc(diff(make_plan(), changed), "a.json", "b.json")
    text, page = plain(doc), Page(html(doc))
    last = "2 operations are constrained differently."
    for said in ("machine", "h100:1x8", "peak memory", "-20.0%", "all-gather", last):
        assert said in text
        assert said in page.text
    assert "The two plans say the same." in plain(diff_doc(diff(make_plan(), make_plan())))


def test_a_comparison_puts_the_fastest_that_fits_first() -> None:
    rows = [
        CompareRow(
            name="dp", mesh=MESH, step_seconds=2e-3, peak_bytes=9e9, feasible=False, bytes_by_kind={"all-reduce": 5e6}
        ),
        CompareRow(
            name="fsdp", mesh=MESH, step_seconds=9e-3, peak_bytes=2e9, feasible=True, bytes_by_kind={"all-gather": 7e6},
            compiled={"seconds": 3e-3, "peak_bytes": 1e9, "bytes_by_kind": {"all-gather": 6e6}},
        ),
        CompareRow.of("plan", make_plan(), {"seconds": 1e-3}),
    ]
    text = plain(compare_doc(rows, "compared"), 100)
    assert text == snapshot("""\
compared

plan  ████████████████································  1 ms
fsdp  ████████████████████████████████████████████████  3 ms
dp    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓················  2 ms, does not fit

      mesh              step  compiled  peak memory  fits  all-reduce  all-gather
----  ----------------  ----  --------  -----------  ----  ----------  ----------
plan  data=2 x model=4  4 ms      1 ms         5 MB  yes          4 B      197 kB
fsdp  data=2 x model=4  9 ms      3 ms         1 GB  yes            0        6 MB
dp    data=2 x model=4  2 ms         ?         9 GB  no          5 MB           0

Bytes of collectives, per device and step, of the compiled modules where there are any.
""")
    assert "does not fit" in Page(html(compare_doc(rows))).text


def make_audit(**changes: Any) -> Audit:
    found = Collective(kind="all-gather", nbytes=1_000_000, group_size=2, count=4.0, axes=("data",), dtype="bfloat16",
                       source="/x/models/gpt.py:12")  # fmt: skip
    memory = MemoryUse(argument_bytes=4_000_000, output_bytes=3_000_000, temp_bytes=2_000_000, alias_bytes=3_000_000)
    fields: dict[str, Any] = {
        "name": "train_step", "target": "h100:1x8", "mesh_shape": MESH, "collectives": (found,),
        "flops_by_dtype": {"bfloat16": 2e9}, "memory": memory, "memory_limit": 80_000_000, "estimated_cycles": None,
        "compile_seconds": 1.5, "compute_seconds": 1e-3, "collective_seconds": 2e-3,
        "predicted": Prediction(collectives=(found,), flops=2e9, peak_bytes=6e6), "notes": ("one note",),
    }
    return Audit(**{**fields, **changes})


def test_an_audit_holds_predictions_against_the_module() -> None:
    assert plain(audit_doc(make_audit()), 100) == snapshot("""\
train_step compiled for h100:1x8
mesh data=2 x model=4

It compiles, fits, and is what the plan predicted.

peak memory     6 MB  of 80 MB a device
work         2 GFLOP  in dots and convolutions, a device
collectives     4 MB  a device and step
priced          3 ms  1 ms FLOPs at peak + 2 ms collectives
compiled in    1.5 s

memory  ▒▒░░············································  6 MB of 80 MB
        ▒ arguments   ░ temporaries   █ results of their own

Predicted against compiled
--------------------------

figure       predicted  compiled  compiled / predicted
-----------  ---------  --------  --------------------  -----
all-gather        4 MB      4 MB                 1.000  holds
peak memory       6 MB      6 MB                 1.000  holds
flops          2 GFLOP   2 GFLOP                 1.000  holds

Collectives
-----------

kind        over  devices  runs  bytes  dtype     source
----------  ----  -------  ----  -----  --------  ----------------
all-gather  data        2     4   4 MB  bfloat16  models/gpt.py:12

Notes
-----

one note
""")
    wrong = plain(audit_doc(make_audit(flops_by_dtype={"bfloat16": 4e9})))
    assert "predictions that do not hold: flops." in wrong
    assert re.search(r"flops +2 GFLOP +4 GFLOP +2\.000 +off", wrong)
    assert "It compiles and fits." in plain(audit_doc(make_audit(predicted=None)))


def test_an_audit_that_does_not_fit_says_so() -> None:
    assert "above the device's memory" in plain(audit_doc(make_audit(memory_limit=1_000_000)))
    gone = OutOfMemory(needed_bytes=20_000_000, limit_bytes=16_000_000, message="oom", seconds=1.0)
    page = Page(html(audit_doc(make_audit(memory=None, out_of_memory=gone, collectives=(), compute_seconds=None)))).text
    assert "the compiler gave up" in page
    assert "20 MB" in page and "of 16 MB" in page


@dataclass(frozen=True)
class Leaf:
    path: str
    relative_error: float
    absolute_error: float
    tolerance: float
    ok: bool


@dataclass(frozen=True)
class Checked:
    ok: bool
    leaves: tuple[Leaf, ...]


def test_a_verification_shows_the_worst_leaf_first() -> None:
    good, bad = Leaf("0/params/up", 1e-7, 1e-8, 1e-5, True), Leaf("0/params/down", 3e-2, 1.0, 1e-5, False)
    text = plain(verify_doc(Checked(False, (good, bad))))
    assert "1 of 2 result leaves differ by more than their tolerance." in text
    assert text.index("0/params/down") < text.index("0/params/up")
    assert "All 1 result leaves agree." in plain(verify_doc(Checked(True, (good,))))


def test_an_empty_report_is_its_title() -> None:
    assert plain(Doc("nothing", "", ())) == "nothing\n"
    assert Page(html(Doc("nothing", "", ()))).text.count("nothing") == 2


def test_wide_tables_fit_a_terminal_without_losing_a_figure() -> None:
    from meshplan.report._doc import Table
    from meshplan.report._rich import column_widths

    table = next(part for part in plan_doc(make_plan()).parts if isinstance(part, Table))
    for width in (160, 110, 90, 72):
        sizes = column_widths(table, width)
        assert sum(sizes.values()) + 2 * len(sizes) <= width
        assert sizes[6] == len("each device")
    assert 3 in column_widths(table, 160) and 3 not in column_widths(table, 110), "names of dims are given up first"
