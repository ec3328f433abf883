/* Line charts, bands and the device timeline, as plain SVG that is drawn again when its place changes width. */

const MARGIN = { left: 46, right: 12, top: 10, bottom: 24 };

function drawAtWidth(place, draw) {
  let drawn = 0;
  const redraw = () => {
    const width = Math.round(place.clientWidth);
    if (width > 0) place.replaceChildren(draw((drawn = width)));
  };
  new ResizeObserver(() => Math.round(place.clientWidth) !== drawn && redraw()).observe(place);
  return redraw;
}

/* A round number that divides a range into about `count` parts. */
function stepOf(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}

/* The multiples of that number in the range. */
function ticks(low, high, count) {
  const step = stepOf(low, high, count), values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) values.push(Number((i * step).toPrecision(12)));
  return values;
}

function range(values, { from = null, to = null } = {}) {
  let low = from ?? Infinity, high = to ?? -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) return [low - (low ? Math.abs(low) / 10 : 0), high + (high ? Math.abs(high) / 10 : 1)];
  return [low, high];
}

/* A range whose ends are ticks. */
function rounded([low, high]) {
  const step = stepOf(low, high, 4);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

/* series: [{name, points: [[x, y]], dots, colour}]; points without a number are left out. With `each`, the reading
   has the point of each series that is nearest to the pointer, else the points at the nearest x. */
function lineChart(title, series, { format = short, from = null, to = null, x = "iteration", each = false } = {}) {
  series = series.map((s) => ({ ...s, points: s.points.filter(([, y]) => isNumber(y)) })).filter((s) => s.points.length);
  if (!series.length) return null;
  series = series.map((s, i) => ({ ...s, colour: s.colour ?? `s${i % 6}` }));
  const legend = (series.length > 1 || each) && el("ul", { class: "legend" }, ...series.map((s) => el("li", { class: s.colour }, s.name)));
  const plot = el("div", { class: "plot" }), reading = el("output");
  const figure = el("figure", { class: "card chart" }, el("figcaption", {}, el("b", {}, title), reading), plot, legend || null);
  const points = series.flatMap((s) => s.points);
  const [x0, x1] = range(points.map((p) => p[0])), [y0, y1] = rounded(range(points.map((p) => p[1]), { from, to }));

  drawAtWidth(plot, (width) => {
    const height = 190;
    const px = (v) => MARGIN.left + ((v - x0) / (x1 - x0)) * (width - MARGIN.left - MARGIN.right);
    const py = (v) => height - MARGIN.bottom - ((v - y0) / (y1 - y0)) * (height - MARGIN.top - MARGIN.bottom);
    const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, x1: -9, x2: -9 });
    const picture = svg("svg", { width, height, role: "img", "aria-label": title },
      ...ticks(y0, y1, 4).flatMap((v) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(v), y2: py(v) }),
        svg("text", { x: MARGIN.left - 6, y: py(v) + 4, "text-anchor": "end" }, format(v))]),
      ...ticks(x0, x1, Math.min(width / 70, x1 - x0)).map((v) => svg("text", { x: px(v), y: height - 7, "text-anchor": "middle" }, short(v))),
      ...series.flatMap((s) => [
        svg("path", { class: `line ${s.colour}`, d: "M" + s.points.map(([a, b]) => `${px(a).toFixed(1)},${py(b).toFixed(1)}`).join("L") }),
        ...(s.dots || s.points.length === 1 ? s.points : []).map(([a, b]) => svg("circle", { class: s.colour, cx: px(a), cy: py(b), r: 3.2 }))]),
      cursor);
    const read = (event) => {
      const at = x0 + ((event.offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (x1 - x0);
      const nearestOf = (some) => some.reduce((best, [a]) => (Math.abs(a - at) < Math.abs(best - at) ? a : best), some[0][0]);
      const nearest = nearestOf(points);
      const values = series.map((s) => [s.name, s.points.find(([a]) => a === (each ? nearestOf(s.points) : nearest))]).filter(([, p]) => p);
      reading.textContent = `${x} ${short(nearest)}: ` + values.map(([name, p]) => (series.length > 1 ? `${name} ` : "") + format(p[1])).join(", ");
      cursor.setAttribute("x1", px(nearest)); cursor.setAttribute("x2", px(nearest));
    };
    picture.addEventListener("pointermove", read);
    picture.addEventListener("pointerleave", () => { reading.textContent = ""; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); });
    return picture;
  });
  return figure;
}

/* parts: [{name, legend, colour, values}], one value for each of `at`, stacked from below in their order. */
function bandChart(title, at, parts, { x = "iteration" } = {}) {
  if (!at.length) return null;
  const legend = el("ul", { class: "legend" }, ...parts.map((part) => el("li", { class: part.colour }, part.legend)));
  const plot = el("div", { class: "plot" }), reading = el("output");
  const figure = el("figure", { class: "card chart" }, el("figcaption", {}, el("b", {}, title), reading), plot, legend);
  const [x0, x1] = [at[0] - 0.5, at.at(-1) + 0.5];
  const [, top] = rounded(range(at.map((_, i) => parts.reduce((sum, part) => sum + part.values[i], 0)), { from: 0 }));

  drawAtWidth(plot, (width) => {
    const height = 190;
    const px = (v) => MARGIN.left + ((v - x0) / (x1 - x0)) * (width - MARGIN.left - MARGIN.right);
    const py = (v) => height - MARGIN.bottom - (v / top) * (height - MARGIN.top - MARGIN.bottom);
    const gap = Math.min(1, (px(1) - px(0)) / 8);
    const bars = at.flatMap((k, i) => {
      let below = 0;
      return parts.map((part) => {
        const from = below; below += part.values[i];
        return svg("rect", { class: part.colour, x: px(k - 0.5) + gap / 2, width: px(k + 0.5) - px(k - 0.5) - gap, y: py(below), height: py(from) - py(below) });
      });
    });
    const picture = svg("svg", { width, height, role: "img", "aria-label": `${title} by ${x}: ${parts.map((part) => part.legend).join(", ")}` },
      ...ticks(0, top, 4).flatMap((v) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(v), y2: py(v) }),
        svg("text", { x: MARGIN.left - 6, y: py(v) + 4, "text-anchor": "end" }, short(v))]),
      ...ticks(at[0], at.at(-1), Math.min(width / 70, at.at(-1) - at[0])).map((v) => svg("text", { x: px(v), y: height - 7, "text-anchor": "middle" }, short(v))),
      ...bars);
    picture.addEventListener("pointermove", (event) => {
      const pointed = x0 + ((event.offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (x1 - x0);
      const nearest = at.reduce((best, k, i) => (Math.abs(k - pointed) < Math.abs(at[best] - pointed) ? i : best), 0);
      reading.textContent = `${x} ${at[nearest]}: ` + parts.map((part) => `${part.name} ${short(part.values[nearest])}`).join(", ");
    });
    picture.addEventListener("pointerleave", () => { reading.textContent = ""; });
    return picture;
  });
  return figure;
}

/* What every device did: wide pale bars while it is held, full ones while it computes. */
function drawTimeline(figure, { seconds, boundaries, workers }) {
  const names = Object.keys(workers);
  if (!names.length) return figure.remove();
  const plot = el("div", { class: "plot", tabindex: 0, "aria-label": "Device timeline" }), reading = el("output");
  const sorts = new Map();
  for (const bars of Object.values(workers)) for (const [tag, kind] of bars) sorts.set(`${tag} ${kind}`, [tag, kind]);
  const words = { busy: "", held: ", held" };
  const legend = el("ul", { class: "legend" }, ...[...sorts.values()].sort().map(([tag, kind]) => el("li", { class: sortClass(tag, kind) }, tag + (words[kind] ?? `, ${kind}`))));
  figure.replaceChildren(el("figcaption", {}, el("b", {}, "Devices"), reading), plot, legend);
  let from = 0, to = seconds || 1;

  const draw = drawAtWidth(plot, (width) => {
    const lane = 30, height = MARGIN.top + lane * names.length + MARGIN.bottom, left = 60;
    const px = (v) => left + ((v - from) / (to - from)) * (width - left - MARGIN.right);
    const clip = (v) => Math.min(Math.max(px(v), left), width - MARGIN.right);
    const rank = { held: 0, wait: 1, moving: 2, busy: 3 };
    const bars = names.flatMap((name, row) => workers[name]
      .filter(([, , , a, b]) => b >= from && a <= to).sort((a, b) => (rank[a[1]] ?? 2) - (rank[b[1]] ?? 2))
      .map(([tag, kind, label, a, b]) => svg("rect", {
        class: sortClass(tag, kind), x: clip(a), width: Math.max(clip(b) - clip(a), 0.6), y: MARGIN.top + row * lane + 3, height: lane - 6,
        "data-note": `${name}: ${tag}${words[kind] ?? ", " + kind}${label ? ", " + label : ""}, ${(b - a).toFixed(2)} s from ${a.toFixed(2)}` })));
    return svg("svg", { width, height, role: "img", "aria-label": "What every device did" },
      ...names.map((name, row) => svg("text", { x: left - 8, y: MARGIN.top + row * lane + lane / 2 + 4, "text-anchor": "end" }, name)),
      ...names.map((_, row) => svg("rect", { class: "lane", x: left, width: width - left - MARGIN.right, y: MARGIN.top + row * lane + 3, height: lane - 6 })),
      ...bars,
      ...boundaries.filter((b) => b > from && b < to).map((b) => svg("line", { class: "boundary", x1: px(b), x2: px(b), y1: MARGIN.top, y2: height - MARGIN.bottom })),
      ...ticks(from, to, width / 90).map((v) => svg("text", { x: px(v), y: height - 7, "text-anchor": "middle" }, `${short(v)} s`)));
  });
  const show = (a, b) => {
    const length = Math.min(Math.max(b - a, seconds / 1000), seconds);
    from = Math.min(Math.max(a, 0), seconds - length); to = from + length;
    draw();
  };
  const secondAt = (event) => from + ((event.clientX - plot.getBoundingClientRect().left - 60) / (plot.clientWidth - 60 - MARGIN.right)) * (to - from);
  let pressed = null;
  plot.addEventListener("pointerdown", (event) => { pressed = secondAt(event); });
  plot.addEventListener("pointerup", (event) => {
    const released = secondAt(event);
    if (pressed != null && Math.abs(released - pressed) > (to - from) / 100) show(Math.min(pressed, released), Math.max(pressed, released));
    pressed = null;
  });
  plot.addEventListener("dblclick", () => show(0, seconds));
  plot.addEventListener("pointermove", (event) => { reading.textContent = event.target.dataset?.note ?? ""; });
  plot.addEventListener("keydown", (event) => {
    const length = to - from;
    const moves = { "+": [from + length / 4, to - length / 4], "-": [from - length / 2, to + length / 2], "0": [0, seconds],
      ArrowLeft: [from - length / 4, to - length / 4], ArrowRight: [from + length / 4, to + length / 4] };
    if (moves[event.key]) { event.preventDefault(); show(...moves[event.key]); }
  });
}

const TAGS = new Set(["rollout", "train"]), KINDS = new Set(["held", "wait", "moving", "busy"]);
const sortClass = (tag, kind) => `tag-${TAGS.has(tag) ? tag : "other"} kind-${KINDS.has(kind) ? kind : "other"}`;
