"""How the page looks: one style sheet, light and dark, for screens of any width and for paper."""

from __future__ import annotations

#: What each colour stands for is in the page itself, beside every use of it.
CSS = """
:root{color-scheme:light dark;--page:#fff;--panel:#f6f7f9;--line:#dfe3e8;--ink:#1b1f24;--dim:#626c78;--link:#0b57d0;
--warn:#8a5300;--warnback:#fff6e5;--warnline:#f0b429;--good:#186a2c;--goodback:#eefaf0;--goodline:#51b56b;
--useful:#2f9e44;--precision:#7048e8;--hardware:#8a94a0;--memory:#1c7ed6;--recompute:#a8682a;--optimizer:#0c8599;
--communication:#e8730c;--pipeline:#d6336c;--unexplained:#9aa3ad;--compute:#4c6ef5;--copy:#94760a;
--input:#f08c00;--sync:#d6336c;--launch:#f06595;--device:#c3cad2;--other:#dde1e6}
@media (prefers-color-scheme:dark){:root{--page:#14171b;--panel:#1c2127;--line:#333a43;--ink:#e4e8ed;--dim:#98a3af;
--warn:#f5c265;--warnback:#2b2312;--warnline:#a87a14;--good:#7fd494;--goodback:#14251a;--goodline:#347a47;
--useful:#51b866;--precision:#9775fa;--hardware:#7d8894;--memory:#4dabf7;--recompute:#c98a4b;--optimizer:#22b8cf;
--communication:#ff922b;--pipeline:#f06595;--unexplained:#6c7682;--compute:#6f8bff;--copy:#c4a43a;
--input:#ffa94d;--sync:#f06595;--launch:#faa2c1;--device:#5a646f;--other:#444d57}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:1080px;padding:28px 24px 64px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{margin:0;font:600 19px/1.35 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
h2{margin:40px 0 10px;font-size:17px;line-height:1.3}
h2 small,h3 small{font-weight:400;font-size:13px;color:var(--dim);margin-left:8px}
h3{margin:20px 0 6px;font-size:14px}
p{margin:6px 0}
p.dim{margin:8px 0;font-size:13px}
code,.mono{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code,td,dd,li,h1,.name{unicode-bidi:isolate}
.dim,.dot{color:var(--dim)}
.warn{color:var(--warn)}
.facts{color:var(--dim);margin:4px 0 0}
.banner{font-weight:600;color:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:20px 0 0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.card h3{margin:0;font-size:12.5px;font-weight:600;color:var(--dim)}
.card .value{font-size:25px;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.card .value small{font-size:14px;font-weight:400;color:var(--dim)}
.card .none{font-size:17px}
.card p{margin:2px 0 0;font-size:12.5px;line-height:1.45;color:var(--dim)}
.card svg{width:100%;height:6px;margin:4px 0 2px;border-radius:3px;background:var(--line)}
.verdict{margin:14px 0 0;padding:10px 14px;border:1px solid var(--line);border-left-width:5px;border-radius:6px}
.verdict ul{margin:4px 0 0;padding-left:20px}
.verdict.good{background:var(--goodback);border-color:var(--goodline)}
.verdict.good b{color:var(--good)}
.verdict.bad{background:var(--warnback);border-color:var(--warnline)}
.verdict.bad b{color:var(--warn)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;font-weight:500;font-size:12.5px;color:var(--dim);vertical-align:bottom;padding:4px 10px 4px 0}
td{padding:5px 10px 5px 0;vertical-align:top;border-top:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
.num{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
td.err{color:var(--dim);padding-left:0}
tr.sum td{font-weight:650;border-top:2px solid var(--line)}
.bar{width:34%;min-width:120px}
.bar svg{display:block;width:100%;height:17px}
.track{fill:var(--panel)}
.small td{padding-top:3px;padding-bottom:3px}
.kernel{max-width:430px}
.kernel code{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:2;overflow:hidden;font-size:12.5px}
.badge{display:inline-block;padding:0 8px;border-radius:9px;font-size:12px;line-height:18px;border:1px solid;white-space:nowrap}
.meter{display:inline-block;width:56px;height:8px;margin-right:6px;background:var(--line);border-radius:2px}
.keys{display:flex;flex-wrap:wrap;gap:2px 16px;margin:8px 0;padding:0;list-style:none;font-size:12.5px;color:var(--dim)}
.keys svg{width:11px;height:11px;margin-right:5px;vertical-align:-1px}
.stack svg{display:block;width:100%;height:22px}
.map{display:grid;grid-template-columns:auto minmax(0,1fr);gap:3px 8px;font-size:12px;color:var(--dim)}
.map .y{min-width:5em;display:flex;flex-direction:column;justify-content:space-between;text-align:right;white-space:nowrap;line-height:1.1}
.map .x{grid-column:2;display:flex;justify-content:space-between}
.map img,.map svg{display:block;width:100%;background:var(--panel);border:1px solid var(--line)}
.map img{image-rendering:pixelated}
.map svg.marks{background:none;border:0;height:18px}
.map svg.profile{height:150px}
.hover{fill:transparent}
.hover:hover{fill:var(--ink);fill-opacity:.12}
.finding{border:1px solid var(--line);border-radius:8px;padding:12px 14px;margin:0 0 10px;break-inside:avoid}
.finding header{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}
.finding header b{font-size:15px}
.finding .gain{font-weight:650;color:var(--good);margin-left:auto}
.finding .do{margin-top:8px;padding:8px 10px;background:var(--panel);border-left:3px solid var(--goodline);border-radius:3px}
.finding .places code{margin-right:12px}
dl{display:grid;grid-template-columns:150px minmax(0,1fr);gap:5px 14px;margin:0;font-size:13.5px}
dt{color:var(--dim)}
dd{margin:0}
dl+.wide{margin-top:12px}
ul.notes{margin:0;padding-left:18px;font-size:13.5px}
ul.notes li{margin:3px 0}
footer{margin-top:40px;padding-top:10px;border-top:1px solid var(--line);font-size:12.5px;color:var(--dim)}
.useful{fill:var(--useful)}.precision{fill:var(--precision)}.hardware{fill:var(--hardware)}.memory{fill:var(--memory)}
.recompute{fill:var(--recompute)}.optimizer{fill:var(--optimizer)}.communication{fill:var(--communication)}
.pipeline{fill:var(--pipeline)}.unexplained{fill:var(--unexplained)}.compute{fill:var(--compute)}.copy{fill:var(--copy)}
.idle_input{fill:var(--input)}.idle_sync{fill:var(--sync)}.idle_launch{fill:var(--launch)}.idle_device{fill:var(--device)}
.idle_other{fill:var(--other)}
.is-compute{color:var(--compute)}.is-memory{color:var(--memory)}.is-latency{color:var(--pipeline)}
.is-communication{color:var(--communication)}.is-copy{color:var(--copy)}.is-none{color:var(--dim)}
@media (max-width:640px){
body{padding:18px 14px 48px}
h1{font-size:16px}
h2{margin-top:30px}
.cards{grid-template-columns:1fr 1fr;gap:8px}
.card:first-child{grid-column:1/-1}
.card{padding:10px 11px}
.card .value{font-size:20px}
.less{display:none}
.lines thead{display:none}
.lines tr{display:grid;grid-template-columns:minmax(0,1fr) 4.2em 3.3em;column-gap:10px;border-top:1px solid var(--line);padding:5px 0}
.lines.gains tr{grid-template-columns:minmax(0,1fr) 4.2em 3.3em 3.3em}
.lines td{border:0;padding:0}
.lines td.bar{grid-column:1/-1;grid-row:2;width:auto}
.lines td.bar svg{height:9px}
.lines td.err{display:none}
.lines tr.sum td{border:0}
th,td{padding-right:6px}
.kernel{max-width:none;min-width:130px}
.badge{padding:0 5px;font-size:11px}
dl{grid-template-columns:1fr}
dt{margin-top:6px}
}
@media print{
body{max-width:none;padding:0;font-size:11pt}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
h2{break-after:avoid}
tr,.card,.map{break-inside:avoid}
.kernel code{-webkit-line-clamp:4}
}
"""
