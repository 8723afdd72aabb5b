# SPDX-License-Identifier: Apache-2.0
"""The look of the page: light and dark by the reader's setting, from a phone's width on. No script, nothing fetched."""

from verl_sync_plugin.report.sync_report import PHASE_STAGES

LIGHT = """
  --ground: #fbfbfa; --sheet: #ffffff; --ink: #1c2024; --soft: #5f6873; --line: #e2e5e9;
  --good: #1a7f4b; --bad: #b3261e;
  --sleep: #7a67c7; --before: #b9b2dd; --resume_weights: #2f7fc9; --update_weights: #e0702c; --offload: #93683a;
  --after: #d3b45c; --barrier: #9aa3ad; --resume_kv: #1f9484; --detail: #e0702c; --engine: #2f7fc9;
"""
DARK = """
  --ground: #14171a; --sheet: #1c2024; --ink: #e6e9ec; --soft: #9aa4ae; --line: #343a41;
  --good: #58c98c; --bad: #ff8a80;
  --sleep: #9d8ce6; --before: #6d6699; --resume_weights: #5aa3ea; --update_weights: #f08a4b; --offload: #b58a5c;
  --after: #d9bf72; --barrier: #78828c; --resume_kv: #3fb8a6; --detail: #f08a4b; --engine: #5aa3ea;
"""
RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
p { margin: 0 0 10px; color: var(--soft); max-width: 76ch; overflow-wrap: anywhere; }
section { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px; padding: 18px;
  margin-top: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 16px; }
.tiles div { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.tiles b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 8px 0; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.bar { display: flex; align-items: center; gap: 10px; margin: 4px 0; }
.track { flex: 1; display: flex; height: 22px; background: var(--ground); border-radius: 4px; overflow: hidden; }
.track i { min-width: 1px; }
.said { flex: 0 0 76px; text-align: right; font-size: 13px; font-variant-numeric: tabular-nums; }
.columns { display: grid; grid-template: 220px 22px auto / 58px 1fr; margin-top: 10px; }
.columns svg { width: 100%; height: 100%; display: block; overflow: visible; }
.columns line { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
.columns g:hover { opacity: .75; }
.yaxis, .xaxis { position: relative; font-size: 12px; color: var(--soft); font-variant-numeric: tabular-nums; }
.yaxis span { position: absolute; right: 8px; transform: translateY(50%); white-space: nowrap; }
.xaxis { grid-column: 2; }
.xaxis span { position: absolute; top: 4px; transform: translateX(-50%); }
.axis { grid-column: 2; text-align: center; font-size: 12px; color: var(--soft); }
.waterfall { display: grid; grid-template-columns: 126px 1fr; gap: 3px 10px; margin: 8px 0; font-size: 13px; }
.waterfall dt { overflow-wrap: anywhere; } .waterfall dd { margin: 0; display: flex; gap: 10px; align-items: center; }
.lane { position: relative; flex: 1; height: 16px; background: var(--ground); border-radius: 3px; overflow: hidden; }
.lane i { position: absolute; top: 0; bottom: 0; min-width: 1px; }
.scale { justify-content: space-between; color: var(--soft); padding-right: 86px; }
.rows { display: grid; grid-template-columns: 190px 1fr; gap: 2px 10px; align-items: center; font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin-top: 6px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 500; color: var(--soft); }
th:first-child { text-align: left; white-space: normal; min-width: 130px; padding-left: 0; }
tbody th { color: var(--ink); }
summary { cursor: pointer; }
@media (max-width: 560px) {
  thead th { white-space: normal; vertical-align: bottom; } th, td { padding: 4px 6px; }
  section { padding: 14px 12px; } .waterfall { grid-template-columns: 1fr; gap: 0; } 
  .waterfall dt:not(:empty) { margin-top: 4px; }
  .rows { grid-template-columns: 1fr; } .said { flex-basis: 64px; } .scale { padding-right: 74px; }
  .columns { grid-template-columns: 48px 1fr; }
}
@media print { section { break-inside: avoid; } }
"""
# The colour of every part of a chart that has not the name of a colour; stages that are not listed are details
COLOURS = {
    **{"engine_load": "engine", "own_direct": "resume_kv", "peer_direct": "resume_weights"},
    **{"own_staged": "update_weights", "peer_staged": "after", "gathered": "sleep"},
    **{"trainer": "resume_weights", "staging": "after", "others": "barrier"},
    **{"weights": "update_weights", "kv_cache": "resume_kv"},
    **{stage: stage for stage in PHASE_STAGES},
}
_PARTS = "\n".join(f".c-{part} {{ background: var(--{name}); fill: var(--{name}); }}" for part, name in COLOURS.items())
STYLE = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"
    f"{RULES}[class^=c-] {{ background: var(--detail); }}\n{_PARTS}"
)
