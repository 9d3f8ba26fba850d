"use strict";
// Charts in SVG. A chart shows lines over steps, areas on top of each other, or bars; the legend has the values at the
// cursor, which all charts share, or the last ones. Pointer and arrow keys move the cursor, Enter and a click pick a step.

const PLOT = { left: 46, right: 10, top: 8, bottom: 18 };
const COLORS = 8;
const color = (place) => `c${place % COLORS}`;

/** What all charts share: the axis, the smoothing, the cursor, and which lines are hidden. */
const shared = { axis: "step", smooth: 0, cursor: null, hidden: new Set(), charts: new Set(), pick: null };

class Chart {
  constructor(title, { what = "", zero = false, top = null, format = number, stacked = false, small = false, axis = null } = {}) {
    Object.assign(this, { title, zero, top, format, stacked, axis });
    this.lines = [];
    this.svg = s("svg", { tabindex: 0, role: "img", "aria-label": `${title}: a chart over steps; arrow keys move the cursor` });
    this.legend = h("ul.legend");
    this.where = h("span.where");
    this.node = h("figure", { class: `box chart${small ? " small" : ""}`, "data-key": `chart ${title}` },
      h("div.head", null, h("h3", null, title, what && h("span.what", null, ` ${what}`)), this.where), this.svg, this.legend);
    this.layer = s("g");
    this.line = s("line", { class: "cursor", visibility: "hidden" });
    this.svg.append(this.layer, this.line);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => moveCursor(null));
    this.svg.addEventListener("click", () => shared.pick && shared.cursor !== null && shared.axis === "step" && shared.pick(shared.cursor));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    this.svg.addEventListener("blur", () => moveCursor(null));
    new ResizeObserver(() => this.paint()).observe(this.svg);
    shared.charts.add(this);
  }

  /** `lines`: [{label, color, x, y, dashed, dots}], with x rising. */
  draw(lines) {
    this.lines = lines.filter((line) => line.y.some(isNumber));
    this.node.hidden = !this.lines.length;
    this.paint();
  }

  paint() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !this.lines.length) return;
    const shown = this.lines.filter((line) => !shared.hidden.has(line.label));
    const stack = this.stacked ? stackUp(shown) : null;
    const smooth = this.stacked ? 0 : shared.smooth;
    const curves = stack || shown.map((line) => ({ ...line, raw: line.y, y: smooth && !line.dots ? smoothed(line.y, smooth) : line.y }));
    const [low, high] = this.#range(curves);
    const xs = this.lines.map((line) => line.x).filter((x) => x.length);
    const first = Math.min(...xs.map((x) => x[0])), last = Math.max(...xs.map((x) => x[x.length - 1]));
    const inner = { width: width - PLOT.left - PLOT.right, height: height - PLOT.top - PLOT.bottom };
    this.toX = (x) => PLOT.left + (last > first ? (x - first) / (last - first) : 0.5) * inner.width;
    this.toY = (y) => PLOT.top + (1 - (y - low) / (high - low || 1)) * inner.height;
    this.span = [first, last];
    const parts = [];
    const levels = ticks(low, high, 4);
    for (const tick of levels) {
      const y = this.toY(tick).toFixed(1);
      parts.push(s("line", { class: "axis", x1: PLOT.left, x2: width - PLOT.right, y1: y, y2: y }),
        s("text", { class: "tick", x: PLOT.left - 6, y: Number(y) + 4, "text-anchor": "end" }, this.format === number ? level(tick, levels) : this.format(tick)));
    }
    const along = shared.axis === "time" && !this.axis ? duration : (tick) => number(tick, 0);
    const spots = last > first ? ticks(first, last, Math.max(2, Math.floor(inner.width / 90))) : [first];
    for (const tick of spots) parts.push(s("text", { class: "tick", x: this.toX(tick).toFixed(1), y: height - 4, "text-anchor": "middle" }, along(tick)));
    for (const line of curves) this.#curve(parts, line, smooth);
    this.layer.replaceChildren(...parts);
    this.line.setAttribute("y1", PLOT.top);
    this.line.setAttribute("y2", height - PLOT.bottom);
    this.point();
  }

  #curve(parts, line, smooth) {
    if (line.base) return parts.push(s("path", { class: `area ${line.color}`, d: this.#areaPath(line) }));
    if (smooth && !line.dots && !line.dashed) parts.push(s("path", { class: `curve faint ${line.color}`, d: this.#path(line.x, line.raw) }));
    if (!line.dotsOnly) parts.push(s("path", { class: `curve ${line.color}${line.dashed ? " dashed" : ""}`, d: this.#path(line.x, line.y) }));
    if (line.dots || line.y.filter(isNumber).length === 1) {
      line.y.forEach((y, place) => isNumber(y) && parts.push(s("circle", { class: `dot ${line.color}`, r: 3, cx: this.toX(line.x[place]).toFixed(1), cy: this.toY(y).toFixed(1) })));
    }
    return null;
  }

  #range(curves) {
    let low = Infinity, high = -Infinity;
    for (const { y, base } of curves) {
      for (const value of y) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
      if (base) low = Math.min(low, 0);
    }
    if (low > high) return [0, 1];
    if (this.zero || this.stacked) low = Math.min(0, low);
    if (isNumber(this.top)) high = Math.max(high, this.top);
    const slack = (high - low || Math.abs(high) || 1) * 0.05;
    return [low === 0 ? 0 : low - slack, high + slack];
  }

  #path(x, y) {
    let d = "", pen = "M";
    for (let i = 0; i < x.length; i++) {
      if (!isNumber(y[i])) continue;
      d += `${pen}${this.toX(x[i]).toFixed(1)} ${this.toY(y[i]).toFixed(1)}`;
      pen = "L";
    }
    return d;
  }

  #areaPath(line) {
    const there = line.x.map((x, i) => `${this.toX(x).toFixed(1)} ${this.toY(line.y[i]).toFixed(1)}`);
    const back = line.x.map((x, i) => `${this.toX(x).toFixed(1)} ${this.toY(line.base[i]).toFixed(1)}`).reverse();
    return there.length ? `M${[...there, ...back].join("L")}Z` : "";
  }

  /** The legend with the values at the cursor, or the last ones. */
  point() {
    const cursor = shared.cursor;
    const inside = cursor !== null && !this.axis && this.span && cursor >= this.span[0] && cursor <= this.span[1];
    if (this.toX) {
      this.line.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) for (const end of ["x1", "x2"]) this.line.setAttribute(end, this.toX(cursor).toFixed(1));
    }
    this.where.textContent = inside ? `${shared.axis === "step" ? "step " : ""}${shared.axis === "time" ? duration(cursor) : number(cursor)}` : "";
    fill(this.legend, this.lines.filter((line) => !line.quiet).map((line) => {
      const place = inside ? nearest(line.x, cursor, line.y) : lastKnown(line.y);
      return h("li", { class: line.color, "data-key": line.label }, h("button", {
        type: "button", "aria-pressed": shared.hidden.has(line.label) ? "false" : "true", title: "show or hide",
        click: () => { shared.hidden.delete(line.label) || shared.hidden.add(line.label); for (const chart of shared.charts) chart.paint(); },
      }, h("span.swatch"), line.label, h("b", null, place < 0 ? "–" : this.format(line.y[place]))));
    }));
  }

  #point(event) {
    if (!this.span || this.axis) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const share = (at - PLOT.left) / (this.svg.clientWidth - PLOT.left - PLOT.right);
    moveCursor(this.#snap(this.span[0] + Math.max(0, Math.min(1, share)) * (this.span[1] - this.span[0])));
  }

  #snap(x) {
    const longest = this.lines.reduce((best, line) => (line.x.length > best.length ? line.x : best), []);
    const place = nearest(longest, x);
    return place < 0 ? null : longest[place];
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && shared.pick && shared.cursor !== null && shared.axis === "step") return shared.pick(shared.cursor);
    if (!(event.key in moves) || this.axis) return null;
    const longest = this.lines.reduce((best, line) => (line.x.length > best.length ? line.x : best), []);
    const from = shared.cursor === null ? longest.length - 1 : nearest(longest, shared.cursor);
    moveCursor(longest[Math.max(0, Math.min(longest.length - 1, from + moves[event.key]))]);
    return event.preventDefault();
  }
}

function moveCursor(x) {
  if (shared.cursor === x) return;
  shared.cursor = x;
  for (const chart of shared.charts) if (chart.node.isConnected && !chart.node.hidden) chart.point();
}

/** Lines as areas on top of each other; what is not known counts as nothing. */
function stackUp(lines) {
  let below = lines.length ? lines[0].x.map(() => 0) : [];
  return lines.map((line) => {
    const base = below;
    below = base.map((value, i) => value + (isNumber(line.y[i]) ? line.y[i] : 0));
    return { ...line, base, y: below };
  });
}

/** The mean of each value and the ones before it, as many as `over` and weighted towards the newer ones. */
function smoothed(values, over) {
  const keep = 1 - 2 / (over + 1);
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

function nearest(xs, x, ys = null) {
  let low = 0, high = xs.length - 1;
  if (high < 0) return -1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  const best = Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  if (!ys || isNumber(ys[best])) return best;
  for (let away = 1; away < xs.length; away++) {
    if (isNumber(ys[best - away])) return best - away;
    if (isNumber(ys[best + away])) return best + away;
  }
  return -1;
}

function lastKnown(values) {
  for (let i = values.length - 1; i >= 0; i--) if (isNumber(values[i])) return i;
  return -1;
}

function ticks(low, high, most) {
  const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(Number((n * step).toPrecision(12)));
  return found;
}

/** The text of a level with as many digits as its neighbours need. */
function level(tick, levels) {
  const step = levels.length > 1 ? levels[1] - levels[0] : 1;
  if (Math.abs(tick) >= 1e4 || step < 1e-4) return number(tick);
  return tick.toFixed(Math.max(0, Math.min(4, -Math.floor(Math.log10(step) + 1e-9))));
}

/** Counts as bars with their names below. */
function bars(title, names, counts, what = "") {
  const most = Math.max(1, ...counts), total = counts.reduce((a, b) => a + b, 0) || 1;
  const width = 400, height = 120, step = (width - 8) / Math.max(1, counts.length);
  const every = Math.ceil(counts.length / 10);
  return h("figure.box.chart.small", { "data-key": `bars ${title}` }, h("div.head", null, h("h3", null, title, h("span.what", null, ` ${what}`))),
    s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${names.map((name, i) => `${name}: ${counts[i]}`).join(", ")}` },
      s("g", { class: "bars" }, counts.map((count, i) => {
        const tall = (count / most) * (height - 32);
        return s("rect", { x: (4 + i * step).toFixed(1), width: Math.max(1, step - 2).toFixed(1), y: (height - 16 - tall).toFixed(1), height: Math.max(count ? 1 : 0, tall).toFixed(1) },
          s("title", null, `${names[i]}: ${count} (${percent(count / total)})`));
      })),
      counts.map((count, i) => (i % every ? null : s("text", { class: "tick", x: (4 + (i + 0.5) * step).toFixed(1), y: height - 3, "text-anchor": "middle" }, names[i]))),
      counts.map((count, i) => (count / total < 0.05 || counts.length > 14 ? null : s("text", { class: "tick", x: (4 + (i + 0.5) * step).toFixed(1), y: (height - 20 - (count / most) * (height - 32)).toFixed(1), "text-anchor": "middle" }, `${Math.round((100 * count) / total)} %`)))));
}
