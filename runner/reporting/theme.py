"""The look of the page: type, colours for light and dark, layout.

The setups' and parts' colours follow Okabe and Ito's set for colour-blind readers
(https://jfly.uni-koeln.de/color/), darkened on light and lightened on dark for contrast.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --card: #ffffff; --ink: #1d2127; --soft: #626b76; --line: #e2e4e6;
  --s0: #5b6470; --s1: #0072b2; --s2: #c8510b; --s3: #00855f; --s4: #a8467f;
  --s5: #a87a00; --s6: #3f8fc4; --s7: #6a51a3;
  --p0: #e0a51b; --p1: #7cc4ec; --p2: #2f86c1; --p3: #1d5f93; --p4: #16926d; --p5: #adb3ba;
  --p6: #d18ab5;
  --good: #00714f; --bad: #b23c00; --open: #8a6400;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121417; --card: #1a1d21; --ink: #e7e9ec; --soft: #99a2ad; --line: #30353b;
    --s0: #a9b1bb; --s1: #58a9e0; --s2: #f0894a; --s3: #3cc79b; --s4: #de8fbf;
    --s5: #e2b440; --s6: #86cdf5; --s7: #b3a0e6;
    --good: #4fd3a6; --bad: #ff9a62; --open: #e8bf55;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 36px 28px 60px; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; margin: 0; }
h1 em { font-style: normal; color: var(--soft); font-weight: 450; }
h2 { font-size: 16px; font-weight: 640; margin: 0 0 2px; }
p { margin: 0; }
section > p.quiet { font-size: 13px; margin-bottom: 10px; }
section > p.above { margin-top: 20px; }
table.looks td:first-child { min-width: 12em; }
p.stands { color: var(--soft); font-size: 12.5px; margin-top: 8px; }
.quiet, figcaption, .under { color: var(--soft); }
.work { margin: 8px 0 0; color: var(--soft); }
.device { display: inline-block; margin: 12px 0 0; padding: 2px 10px; border-radius: 99px;
  border: 1px solid var(--line); background: var(--card); font-size: 13px; }
.device.cpu { border-color: var(--open); color: var(--open); }
section { margin-top: 26px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 18px 20px; }
.scroll { overflow-x: auto; }
ul.heads { list-style: none; margin: 0; padding: 0; display: grid; gap: 7px; }
ul.heads li { display: grid; grid-template-columns: 118px 1fr; gap: 12px; align-items: baseline; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 550; color: var(--soft); font-size: 12.5px;
  padding: 0 12px 8px 0; border-bottom: 1px solid var(--line); vertical-align: bottom;
  white-space: nowrap; }
td { padding: 10px 12px 10px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td:last-child, th:last-child { padding-right: 0; }
td .under { display: block; font-size: 12px; line-height: 1.45; }
td .name { font-weight: 600; overflow-wrap: anywhere; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
.badge { display: inline-block; font-size: 12px; font-weight: 600; line-height: 1.5; padding: 0 9px;
  border-radius: 99px; border: 1px solid currentColor; white-space: nowrap; }
.passed, .win { color: var(--good); } .failed, .diverged, .error, .worse { color: var(--bad); }
.unknown, .confounded, .incomparable, .unchecked { color: var(--open); }
.baseline { color: var(--soft); } .win, .worse { font-weight: 600; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 20px;
  margin-top: 20px; align-items: start; }
.column { display: grid; gap: 20px; min-width: 0; grid-template-columns: minmax(0, 1fr); }
figure { min-width: 0; overflow-x: auto; }
.keep { white-space: nowrap; }
@media (max-width: 820px) { .grid { grid-template-columns: 1fr; } }
figure { margin: 0; }
figcaption { font-size: 13px; margin-bottom: 8px; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: inherit; }
figure svg text:not([style*="fill: #"]) { paint-order: stroke; stroke: var(--card);
  stroke-width: 3px; stroke-linejoin: round; }
figure table { font-size: 12.5px; margin-top: 10px; }
figure td { padding: 4px 10px 4px 0; }
figure td:first-child { overflow-wrap: anywhere; min-width: 9em; }
figure th { white-space: normal; }
.chips { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--soft);
  margin: 0 0 8px; }
.chips i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; }
code, pre { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0; padding: 8px 12px;
  background: var(--page); border: 1px solid var(--line); border-radius: 8px; }
ul.notes { margin: 6px 0 0; padding-left: 18px; }
details summary { cursor: pointer; font-weight: 640; }
details table { margin-top: 12px; }
"""
