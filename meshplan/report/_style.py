"""How the HTML report looks."""

STYLE = """\
:root {
  --page: #f7f8fa; --card: #ffffff; --ink: #1a2230; --quiet: #667085; --line: #e3e7ee; --head: #f1f4f8;
  --s0: #3b7ddd; --s1: #e8833a; --s2: #8e63ce; --s3: #36a183; --good: #1c7d54; --bad: #c5362f;
  --bar: rgba(59, 125, 221, .16); --piece-s: 62%; --piece-l: 86%; --piece-ink: #1a2230;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1a202a; --ink: #e3e8f0; --quiet: #93a0b4; --line: #2b3442; --head: #202835;
    --s0: #5b9bf5; --s1: #f0a061; --s2: #b08ce6; --s3: #55c2a1; --good: #5ccb97; --bad: #ff8078;
    --bar: rgba(91, 155, 245, .22); --piece-s: 42%; --piece-l: 32%; --piece-ink: #f1f4f9;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1200px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 24px 0 8px; }
p { margin: 8px 0; max-width: 80ch; }
.sub { color: var(--quiet); margin: 6px 0 24px; font-size: 16px; }
.quiet { color: var(--quiet); }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
code, pre, td.code, .pieces {
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
pre {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; overflow-x: auto;
  font-size: 13px;
}
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile .what { color: var(--quiet); font-size: 13px; }
.tile .value { font-size: 24px; font-weight: 650; letter-spacing: -.01em; font-variant-numeric: tabular-nums; }
.tile .more { color: var(--quiet); font-size: 13px; }
.scroll {
  overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 12px 0;
}
.scroll table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
.scroll th {
  text-align: left; font-weight: 600; color: var(--quiet); background: var(--head); padding: 8px 12px;
  border-bottom: 1px solid var(--line); white-space: nowrap;
}
.scroll td { padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
.scroll tbody tr:last-child td { border-bottom: 0; }
.scroll tbody tr:hover td { background-color: var(--head); }
th.figure, td.figure { text-align: right !important; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.code { font-size: 12.5px; }
td.bar { background: linear-gradient(to left, var(--bar) var(--share), transparent var(--share)); }
.bars {
  display: grid; grid-template-columns: max-content minmax(120px, 1fr) max-content; gap: 8px 14px; align-items: center;
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; margin: 12px 0 6px;
  font-size: 13.5px;
}
.track { display: flex; height: 16px; background: var(--head); border-radius: 4px; overflow: hidden; }
.track span { display: block; height: 100%; }
.bartext { color: var(--quiet); font-variant-numeric: tabular-nums; }
.s0 { background: var(--s0); } .s1 { background: var(--s1); }
.s2 { background: var(--s2); } .s3 { background: var(--s3); }
.legend { font-size: 13px; color: var(--quiet); display: flex; gap: 16px; flex-wrap: wrap; margin: 0 4px 12px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.splits { display: flex; flex-wrap: wrap; gap: 16px; margin: 12px 0; }
.split {
  margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  max-width: 100%; overflow-x: auto;
}
.split figcaption { font-size: 13px; color: var(--quiet); margin-bottom: 10px; }
.split figcaption b { color: var(--ink); font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.picture { display: flex; align-items: center; gap: 8px; }
.down { writing-mode: vertical-rl; transform: rotate(180deg); font-size: 12px; color: var(--quiet); }
.across { text-align: center; font-size: 12px; color: var(--quiet); margin-bottom: 3px; }
.pieces { border-collapse: separate; border-spacing: 2px; font-size: 12px; margin: 0 auto; }
.pieces td {
  background: hsl(var(--hue), var(--piece-s), var(--piece-l)); color: var(--piece-ink); text-align: center;
  min-width: 44px; height: 30px; padding: 3px 8px; border-radius: 4px;
}
.pieces.tall td { min-width: 150px; height: 20px; }
.pieces td.whole { background: var(--head); min-width: 120px; height: 62px; border: 1px dashed var(--line); }
@media print { body { background: none; } .scroll, .tile, .bars, .split { break-inside: avoid; } }
"""
