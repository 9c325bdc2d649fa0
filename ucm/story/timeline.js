"use strict";
// Draws lanes of bars. All that logs say is set as text or compared, never made markup.
(() => {
  const SVG = "http" + "://www.w3.org/2000/svg"; // a name, not an address
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = {
    event_wait: "#cdd8e6", gather: "#3b78c2", gather_wait: "#a9c8ec", transfer: "#1f9e89",
    confirm: "#b5e2d8", commit: "#7a5195", fetch: "#e08a1e", scatter: "#b8520c",
    scatter_wait: "#fbd3a4", publish: "#c2417c",
  };
  const DARK = new Set(["gather", "transfer", "commit", "scatter", "publish"]);
  // How each end looks: a colour, a sign, and whether the bar is dashed or hatched.
  const CHECK = "M2 6.5 5 9.5 10 3";
  const ENDS = {
    finished: { colour: "#2b7a3d", sign: CHECK, says: "the request finished" },
    committed: { colour: "#2b7a3d", sign: CHECK, says: "all blocks arrived" },
    skipped: { colour: "#5c6877", sign: "M2 4H10M2 8H10", says: "the store had them already" },
    preempted: { colour: "#7b4bb5", sign: "M10 6A4 4 0 1 1 8.5 3M8.5 0.5V3.4H5.6", says: "the engine took its blocks; it began again" },
    aborted: { colour: "#444", sign: "M3 3H9V9H3Z", fill: true, hatch: true, says: "the client gave up" },
    refused: { colour: "#a15c00", sign: "M6 1.5A4.5 4.5 0 1 1 5.99 1.5M3 3 9 9", dash: "5 3", says: "nothing was begun: no room, or no time" },
    cancelled: { colour: "#a15c00", sign: "M2 6H10", dash: "2 3", hatch: true, says: "it was begun and dropped" },
    failed: { colour: "#c4161c", sign: "M2.5 2.5 9.5 9.5M9.5 2.5 2.5 9.5", heavy: true, says: "something went wrong; the engine computed instead" },
    open: { colour: "#5c6877", sign: "M2 6H2.5M5.8 6H6.2M9.5 6H10", dash: "1 3", says: "its end is not in the log" },
  };
  const END_OTHER = { colour: "#5c6877", sign: "M5 2H7", says: "" };
  const endOf = (word) => (Object.hasOwn(ENDS, word) ? ENDS[word] : END_OTHER);
  const colourOf = (stage) => (Object.hasOwn(COLOURS, stage) ? COLOURS[stage] : "#8b96a3");
  const ROW = 22, BAR = 18, AXIS = 26, GAP = 12, CHAR = 6.4, LEFT = 96;
  const chart = document.getElementById("chart");
  // Time in which nothing happened is drawn short: what follows counts squeezed seconds.
  const idle = data.gaps.reduce((sum, [begin, end]) => sum + end - begin, 0);
  const SHORT = 0.03 * Math.max(data.span_s - idle, 1e-6);
  const squeeze = (at) => {
    let squeezed = at;
    for (const [begin, end] of data.gaps) {
      if (at <= begin) break;
      const share = Math.min((at - begin) / (end - begin), 1);
      squeezed -= share * (end - begin - SHORT);
    }
    return squeezed;
  };
  const span = Math.max(squeeze(data.span_s), 1e-6);
  let from = -0.01 * span, to = 1.02 * span, chosen = null, sought = "";

  const make = (parent, name, attributes, text) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const html = (parent, name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    parent.append(node);
    return node;
  };
  const duration = (seconds, digits = 4) => {
    const size = Math.abs(seconds);
    if (size === 0) return "0";
    if (size < 1e-3) return +(seconds * 1e6).toPrecision(digits) + " us";
    if (size < 1) return +(seconds * 1e3).toPrecision(digits) + " ms";
    return +seconds.toPrecision(digits) + " s";
  };
  const cut = (text, width) => {
    const most = Math.floor(width / CHAR);
    if (text.length <= most) return text;
    return most > 3 ? text.slice(0, most - 1) + "\u2026" : "";
  };
  const sign = (parent, word, x, y, onDark) => {
    const end = endOf(word);
    const colour = onDark ? "#fff" : end.colour;
    make(parent, "path", {
      d: end.sign, transform: `translate(${x} ${y})`, stroke: colour, "stroke-width": 2,
      fill: end.fill ? colour : "none", "stroke-linecap": "round", class: "sign",
    });
  };

  const words = (text, count) => `${count} ${text}${count === 1 ? "" : "s"}`;
  const all = data.lanes.flatMap((lane) => lane.bars.map((bar) => ({ lane, bar })));
  const count = (kind) => all.filter(({ lane }) => (lane.kind === "requests") === kind).length;
  document.getElementById("summary").textContent =
    `${words("request", count(true))}, ${words("save and load", count(false)).replace("save and loads", "saves and loads")} ` +
    `in ${duration(data.span_s)}, from ${new Date(data.began_s * 1000).toISOString().replace("T", " ").slice(0, 19)} UTC. ` +
    "A bar is a request, or a save or load of its blocks; its colours are the stages that it passed.";
  for (const note of data.notes) html(document.getElementById("notes"), "li", note);

  const legend = document.getElementById("legend");
  const row = (title) => {
    html(legend, "dt", title);
    return html(legend, "div", undefined, "items");
  };
  const item = (parent, text, hint, draw) => {
    const node = html(parent, "span", undefined, "item");
    node.title = hint;
    draw(make(node, "svg", { width: 14, height: 14, "aria-hidden": "true" }));
    node.append(text);
  };
  const stagesOf = (isOf) =>
    new Set(all.filter(({ lane }) => isOf(lane.kind)).flatMap(({ bar }) => bar.stages.map((stage) => stage[0])));
  for (const [title, isOf] of [
    ["Stages of a save", (kind) => kind === "save"],
    ["Stages of a load", (kind) => kind === "load"],
    ["Other stages", (kind) => kind !== "save" && kind !== "load"],
  ]) {
    const here = stagesOf(isOf);
    const known = Object.keys(data.stages).filter((name) => here.delete(name));
    const shown = [...known, ...[...here].slice(0, 12)];
    if (!shown.length) continue;
    const items = row(title);
    item(items, "waiting", "it waits for its turn: no stage has it", (svg) =>
      make(svg, "rect", { x: 0.5, y: 0.5, width: 13, height: 13, rx: 2, fill: "#eef1f5", stroke: "#9aa5b3" }));
    for (const name of shown) {
      item(items, name.replace("_", " "), data.stages[name] || name, (svg) =>
        make(svg, "rect", { width: 14, height: 14, rx: 2, fill: colourOf(name) }));
    }
    if (title === "Stages of a save" && all.some(({ bar }) => bar.released !== null)) {
      item(items, "blocks released", "from here on the engine may reuse the blocks", (svg) =>
        make(svg, "path", { d: "M3 0H11L7 6ZM7 6V14", fill: "#000", stroke: "#000" }));
    }
  }
  const ends = row("Ends");
  const ended = new Set(all.flatMap(({ bar }) => [bar.outcome, ...bar.marks]));
  for (const word of Object.keys(ENDS)) {
    if (ended.has(word)) {
      item(ends, `${word}: ${ENDS[word].says}`, ENDS[word].says, (svg) => sign(svg, word, 1, 1));
    }
  }

  const seen = stagesOf(() => true);
  const explain = (body) => {
    for (const [name, text] of Object.entries(data.stages)) {
      if (!seen.has(name)) continue;
      const line = html(body, "tr");
      html(line, "td", name.replace("_", " "));
      html(line, "td", text);
    }
  };
  const tell = (bar) => {
    const facts = document.getElementById("facts");
    facts.replaceChildren();
    if (!bar) {
      html(facts, "p", "Point at a bar to read what it is; click it to keep it and to see what belongs to it.");
      explain(html(html(facts, "table"), "tbody"));
      return;
    }
    html(facts, "h2", bar.name);
    const body = html(html(facts, "table"), "tbody");
    for (const [name, text] of bar.facts) {
      const line = html(body, "tr");
      html(line, "td", name.replace("_", " "));
      html(line, "td", text);
    }
  };
  const isShown = (bar) => {
    if (sought && !bar.owners.some((owner) => owner.includes(sought))) return false;
    return !chosen || bar === chosen || bar.owners.some((owner) => chosen.owners.includes(owner));
  };

  const drawBar = (parent, lane, bar, x, y) => {
    const end = endOf(bar.outcome), troubles = bar.marks.map(endOf);
    const worst = troubles.find((each) => each.heavy) || troubles[0] || end;
    const left = x(bar.begin), width = Math.max(x(bar.end) - left, 2);
    const isRequest = lane.kind === "requests";
    const group = make(parent, "g", {
      class: "bar " + (isShown(bar) ? "" : "dim"), tabindex: 0, role: "img",
      "data-kind": lane.kind, "data-outcome": bar.outcome, "data-marks": bar.marks.join(" "),
    });
    const ending = [bar.outcome, ...bar.marks].join(", ");
    group.setAttribute("aria-label", `${bar.name}, ${ending}, ${duration(bar.end - bar.begin)}`);
    const fill = isRequest ? "#dbe5f1" : "#eef1f5";
    make(group, "rect", { x: left, y, width, height: BAR, rx: 2, fill });
    for (const [name, begin, until] of bar.stages) {
      const a = x(bar.begin + begin), b = Math.max(x(bar.begin + until), a + 0.5);
      make(group, "rect", { x: a, y, width: b - a, height: BAR, fill: colourOf(name), class: "stage", "data-stage": name });
      const label = cut(name.replace("_", " "), b - a - 24);
      if (label === name.replace("_", " ")) {
        make(group, "text", { x: a + 4, y: y + 13, fill: DARK.has(name) ? "#fff" : "#1b2430" }, label);
      }
    }
    if (end.hatch) make(group, "rect", { x: left, y, width, height: BAR, fill: "url(#hatch)" });
    make(group, "rect", {
      x: left + 0.5, y: y + 0.5, width: Math.max(width - 1, 1), height: BAR - 1, rx: 2, fill: "none",
      stroke: worst.colour, "stroke-width": worst.heavy ? 2.5 : 1.2, class: "frame",
      ...(worst.dash ? { "stroke-dasharray": worst.dash } : {}),
    });
    if (bar.released !== null && width > 10) {
      const at = x(bar.begin + bar.released);
      make(group, "path", { d: `M${at - 4} ${y - 2}H${at + 4}L${at} ${y + 4}ZM${at} ${y + 4}V${y + BAR}`, fill: "#000", stroke: "#000", class: "released" });
    }
    const signs = [bar.outcome, ...bar.marks];
    const room = 15 * signs.length + 3;
    if (isRequest) {
      const label = cut(`${bar.name}  ${ending}`, width - room - 6);
      if (label) make(group, "text", { x: Math.max(left, x.left) + 5, y: y + 13 }, label);
    }
    // Within the bar if there is room; else behind it, if there is trouble to tell of.
    const isWide = width > (isRequest ? 2 : 6) * room, isWell = worst === ENDS.finished || worst === ENDS.committed;
    if (isWide || !isWell) {
      const at = left + width + (isWide ? -room : 2);
      make(group, "rect", { x: at, y: y + 2, width: room - 2, height: BAR - 4, rx: 2, fill: "#fff" });
      signs.forEach((word, number) => sign(group, word, at + 1.5 + 15 * number, y + 3));
    }
    group.addEventListener("pointerenter", () => chosen || tell(bar));
    group.addEventListener("focus", () => chosen || tell(bar));
    const choose = (event) => {
      event.stopPropagation();
      chosen = chosen === bar ? null : bar;
      tell(bar);
      draw();
    };
    group.addEventListener("click", (event) => hasMoved || choose(event));
    group.addEventListener("keydown", (event) => event.key === "Enter" && choose(event));
    group.addEventListener("dblclick", (event) => {
      event.stopPropagation();
      around([bar]);
    });
  };

  const roleOf = (lane) => lane.process.replace(/-\d+$/, "");
  const roles = data.lanes.map((lane) => lane.kind + roleOf(lane));
  const axis = (width, left, height, x) => {
    const rough = ((to - from) * 90) / (width - left);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((times) => unit * times >= rough);
    const tickAt = (at, limit) => {
      make(chart, "line", { x1: x(at), x2: x(at), y1: AXIS, y2: height, stroke: "#e3e7ec" });
      if (x(at) < limit - 50) make(chart, "text", { x: x(at) + 3, y: 17, class: "tick" }, duration(+at.toPrecision(9), 9));
    };
    const starts = [0, ...data.gaps.map((gap) => gap[1])];
    const stops = [...data.gaps.map((gap) => gap[0]), data.span_s * 1.02];
    let room = 100;
    starts.forEach((start, segment) => {
      const stop = Math.min(stops[segment], start + Math.max(to - squeeze(start), 0));
      const since = Math.max(start, start + from - squeeze(start));
      const first = Math.ceil(since / step);
      for (let number = 0; (first + number) * step <= stop && room > 0; number += 1, room -= 1) {
        tickAt((first + number) * step, Math.min(x(stops[segment]), width));
      }
    });
    for (const [begin, end] of data.gaps) {
      if (squeeze(end) < from || squeeze(begin) > to) continue;
      const at = Math.max(x(begin), left);
      make(chart, "rect", { x: at, y: AXIS, width: Math.max(x(end) - at, 0), height: height - AXIS, fill: "url(#idle)", class: "gap" });
      const middle = `${(x(begin) + x(end)) / 2 + 4} ${(AXIS + height) / 2}`;
      make(chart, "text", { transform: `translate(${middle}) rotate(-90)`, class: "tick", "text-anchor": "middle" }, duration(end - begin, 2) + " idle");
    }
  };
  const draw = () => {
    const width = chart.parentElement.clientWidth;
    const left = LEFT;
    const inView = (bar) => squeeze(bar.end) >= from && squeeze(bar.begin) <= to;
    const lanes = data.lanes.filter((lane) => lane.bars.some(inView));
    const height = AXIS + lanes.reduce((sum, lane) => sum + lane.rows * ROW + GAP, 0);
    const x = (at) => left + ((squeeze(at) - from) / (to - from)) * (width - left);
    x.left = left;
    chart.replaceChildren();
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("height", height);
    const defs = make(chart, "defs");
    const hatch = make(defs, "pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    make(hatch, "rect", { width: 2, height: 6, fill: "#000", opacity: 0.28 });
    const quiet = make(defs, "pattern", { id: "idle", width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    make(quiet, "rect", { width: 8, height: 8, fill: "#f5f6f8" });
    make(quiet, "rect", { width: 1, height: 8, fill: "#cfd6de" });
    make(make(defs, "clipPath", { id: "inside" }), "rect", { x: left, y: 0, width: width - left, height });
    axis(width, left, height, x);
    let top = AXIS;
    for (const lane of lanes) {
      const tall = lane.rows * ROW + GAP;
      make(chart, "line", { x1: 0, x2: width, y1: top, y2: top, stroke: "#cfd6de" });
      const name = { requests: "requests", save: "saves", load: "loads" }[lane.kind] || lane.kind;
      make(chart, "text", { x: 10, y: top + 17, class: "lane" }, cut(name, left - 14));
      if (lane.process) {
        const role = lane.kind + roleOf(lane);
        const whose = make(chart, "text", { x: 10, y: top + 29, class: "whose" });
        whose.textContent = cut(roles.indexOf(role) === roles.lastIndexOf(role) ? roleOf(lane) : lane.process, left);
        make(whose, "title", {}, lane.process);
      }
      const inside = make(chart, "g", { "clip-path": "url(#inside)" });
      for (const bar of lane.bars) {
        if (inView(bar)) drawBar(inside, lane, bar, x, top + GAP / 2 + bar.row * ROW + 2);
      }
      top += tall;
    }
  };
  const show = (begin, until) => {
    const length = Math.min(Math.max(until - begin, 2e-6), 1.5 * span);
    from = Math.min(Math.max(begin, -0.25 * span), 1.25 * span - length);
    to = from + length;
    draw();
  };
  const zoom = (factor, at) => {
    const middle = at === undefined ? (from + to) / 2 : at;
    show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  };
  const around = (bars) => {
    const begin = Math.min(...bars.map((bar) => squeeze(bar.begin)));
    const end = Math.max(...bars.map((bar) => squeeze(bar.end)));
    const margin = Math.max((end - begin) * 0.1, 1e-6);
    show(begin - margin, end + margin);
  };
  // The next request, or the one before, with all that belongs to it.
  const step = (by) => {
    const requests = all.filter(({ lane }) => lane.kind === "requests").map(({ bar }) => bar);
    if (!requests.length) return;
    const at = requests.indexOf(chosen);
    chosen = requests[at < 0 ? 0 : Math.min(Math.max(at + by, 0), requests.length - 1)];
    tell(chosen);
    around(all.map(({ bar }) => bar).filter((bar) => bar === chosen || (isShown(bar) && bar.begin <= chosen.end && bar.end >= chosen.begin)));
  };
  const reset = () => show(-0.01 * span, 1.02 * span);

  let grip = null, hasMoved = false;
  const perPixel = () => (to - from) / (chart.clientWidth - LEFT);
  chart.addEventListener("pointerdown", (event) => { grip = event.clientX; hasMoved = false; });
  addEventListener("pointermove", (event) => {
    if (grip === null || Math.abs(event.clientX - grip) < (hasMoved ? 1 : 4)) return;
    hasMoved = true;
    chart.classList.add("moving");
    const by = (event.clientX - grip) * perPixel();
    grip = event.clientX;
    show(from - by, to - by);
  });
  addEventListener("pointerup", () => { grip = null; chart.classList.remove("moving"); });
  chart.addEventListener("click", () => { if (!hasMoved && chosen) { chosen = null; tell(null); draw(); } });
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = chart.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, to - (box.right - event.clientX) * perPixel());
  }, { passive: false });
  document.getElementById("in").addEventListener("click", () => zoom(0.5));
  document.getElementById("out").addEventListener("click", () => zoom(2));
  document.getElementById("all").addEventListener("click", reset);
  document.getElementById("before").addEventListener("click", () => step(-1));
  document.getElementById("next").addEventListener("click", () => step(1));
  document.getElementById("find").addEventListener("input", (event) => { sought = event.target.value; draw(); });
  addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = (to - from) * 0.2;
    const keys = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset,
      n: () => step(1), p: () => step(-1),
      ArrowLeft: () => show(from - by, to - by), ArrowRight: () => show(from + by, to + by),
      Escape: () => { chosen = null; tell(null); draw(); },
    };
    if (Object.hasOwn(keys, event.key)) keys[event.key]();
  });
  addEventListener("resize", draw);
  tell(null);
  draw();
})();
