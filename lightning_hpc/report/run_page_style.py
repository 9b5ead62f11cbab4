"""The look of a run's page. Follows the reader's light or dark scheme; fits a phone, a laptop and paper."""

PHASE_COLOURS = {
    "data_prep": "#e69f00",
    "h2d": "#b8a300",
    "schedule": "#8b929b",
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "comm": "#d55e00",
    "optimizer": "#009e73",
    "unattributed": "#c3a6c9",
}
"""Okabe and Ito's palette, which readers with any colour vision can tell apart (jfly.uni-koeln.de/color), with a darker
yellow, and greys for what is nobody's work. The same on light and dark ground."""

SPAN_COLOURS = {
    "training": "#0072b2",
    "startup": "#8b929b",
    "loader_start": "#e69f00",
    "validation": "#009e73",
    "checkpoint": "#d55e00",
    "logging": "#c3a6c9",
    "between_epochs": "#b8a300",
    "shutdown": "#b6bcc4",
    "unfinished_iteration": "#56b4e9",
}
"""What a run's time was spent on."""

RANK_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#b8a300", "#8b929b")
"""Lines of up to eight ranks."""

_RULES = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1a1d21;--faint:#5c6670;--rule:#e2e5e9;
--accent:#0a62b0;--good:#10713a;--warn:#a64b00;--band:#0072b233}
@media (prefers-color-scheme:dark){:root{--ground:#0f1216;--card:#171b21;--ink:#e8ebee;--faint:#9ba5b0;--rule:#2a313a;
--accent:#79b8ff;--good:#6fd398;--warn:#ffa657;--band:#56b4e940}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:1.15rem;margin:44px 0 4px}
p{margin:6px 0}
.faint,.unit{color:var(--faint)}
.unit{font-weight:400}
section>p.faint{max-width:70ch}
.card{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px;margin:14px 0}
p,h1,h3,li,.tile{overflow-wrap:anywhere}
.verdict{font-size:1.25rem;font-weight:650;line-height:1.35;margin:0}
.healthy .verdict{color:var(--good)}.ill .verdict{color:var(--warn)}
.finding{border-top:1px solid var(--rule);margin-top:14px;padding-top:12px}
.finding h3{font-size:1rem;margin:0}
.meter{height:6px;border-radius:3px;background:var(--rule);margin:6px 0 8px;max-width:420px}
.meter i{display:block;height:100%;border-radius:3px;background:var(--warn)}
.try{border-left:3px solid var(--accent);padding-left:10px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:14px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:12px 14px}
.tile b{display:block;font-size:1.5rem;line-height:1.25;font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.tile small,.tile span{display:block;color:var(--faint);font-size:.82rem;line-height:1.4}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:14px}
figure{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:14px 16px 10px;margin:0;
min-width:0}
figcaption{font-weight:600;font-size:.95rem;margin-bottom:10px}
.plot{position:relative;padding:6px 6px 40px 48px}
.plot svg{display:block;width:100%;height:200px;overflow:visible}
.y,.x{position:absolute;font-size:.75rem;color:var(--faint);font-variant-numeric:tabular-nums}
.y{left:0;top:6px;width:42px;height:200px}
.y span{position:absolute;right:0;transform:translateY(-50%)}
.x{left:48px;right:6px;top:210px;height:18px}
.x span{position:absolute;transform:translateX(-50%)}
.x-unit{position:absolute;left:48px;right:6px;top:228px;text-align:center;font-size:.75rem;color:var(--faint)}
svg *{vector-effect:non-scaling-stroke}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .line{fill:none;stroke:var(--accent);stroke-width:1.75;stroke-linejoin:round}
svg .limit{fill:none;stroke:var(--faint);stroke-width:1.25;stroke-dasharray:5 4}
svg .band{fill:var(--band);stroke:none}
svg .bar{fill:var(--accent);stroke:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:10px 0;padding:0;font-size:.85rem}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.stack{display:flex;height:22px;border-radius:5px;overflow:hidden;background:var(--rule)}
.stack span{display:block;height:100%;min-width:0}
.lane{display:grid;grid-template-columns:minmax(64px,auto) 1fr minmax(72px,auto);gap:10px;align-items:center;
margin:6px 0;font-size:.85rem;font-variant-numeric:tabular-nums}
.lane :last-child{text-align:right}
.strip{display:block;width:100%;height:34px;border-radius:5px;background:var(--rule)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 10px;border-bottom:1px solid var(--rule);text-align:right;vertical-align:top}
th{color:var(--faint);font-weight:500}
th:first-child,td:first-child{text-align:left}
.text{text-align:left}td.text{overflow-wrap:anywhere}td.text:first-child{overflow-wrap:normal;white-space:nowrap}
code{font-size:.92em;background:var(--rule);border-radius:4px;padding:1px 4px}
details{margin:10px 0}summary{cursor:pointer;color:var(--accent)}
@media (max-width:520px){main{padding:18px 12px 40px}.tile b{font-size:1.25rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.lane{grid-template-columns:52px 1fr 64px}}
@media print{body{background:#fff}.card,.tile,figure{break-inside:avoid}}
"""


def style() -> str:
    """The style sheet."""
    rules = [_RULES]
    named = {**PHASE_COLOURS, **SPAN_COLOURS, **{f"rank{index}": colour for index, colour in enumerate(RANK_COLOURS)}}
    for name, colour in named.items():
        rules.append(f"i.{name},.stack .{name}{{background:{colour}}}svg .{name}{{fill:{colour};stroke:none}}")
    for index, colour in enumerate(RANK_COLOURS):
        rules.append(f"svg .rank{index}{{fill:none;stroke:{colour};stroke-width:1.75}}")
    return "".join(rules)
