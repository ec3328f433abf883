/* Tables that sort by their heads, filter by a text and show more rows when asked. */

const PAGE_ROWS = 60;

/* columns: [{name, value(row), cell(row)?, text?}]; value sorts and filters, cell shows. */
function table(rows, columns, { search = null, onrow = null } = {}) {
  let order = null, descending = false, shown = PAGE_ROWS, wanted = "";
  const body = el("tbody"), more = el("button", { type: "button", class: "more", onclick: () => { shown += 5 * PAGE_ROWS; draw(); } });
  const heads = columns.map((column) => el("th", { scope: "col", class: column.text ? "text" : null },
    el("button", { type: "button", onclick: () => { descending = order === column && !descending; order = column; draw(); } }, column.name)));
  const filter = search && el("input", { type: "search", placeholder: search, "aria-label": search, oninput: (event) => { wanted = event.target.value.toLowerCase(); draw(); } });

  function draw() {
    let found = wanted ? rows.filter((row) => columns.some((c) => String(c.value(row) ?? "").toLowerCase().includes(wanted))) : rows;
    if (order) found = [...found].sort((a, b) => (descending ? -1 : 1) * compare(order.value(a), order.value(b)));
    heads.forEach((head, i) => head.setAttribute("aria-sort", columns[i] !== order ? "none" : descending ? "descending" : "ascending"));
    body.replaceChildren(...found.slice(0, shown).map((row) => el("tr", { onclick: onrow && (() => onrow(row)), class: onrow && "link" },
      ...columns.map((c) => el("td", { class: c.text ? "text" : null }, c.cell ? c.cell(row) : visible(String(c.value(row) ?? "")))))));
    more.hidden = found.length <= shown;
    more.textContent = `more (${whole(found.length - shown)})`;
  }
  draw();
  return el("div", {}, filter, el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body)), more);
}

function compare(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function iterationTable(figures) {
  const heldOut = new Map(figures.held_out);
  const of = (name) => (row) => row.rollout?.[name];
  const speed = (row) => (row.seconds ? row.sampled_tokens / row.seconds : null);
  const number = (name, value, show) => ({ name, value, cell: (row) => show(value(row)) });
  return table(figures.iterations, [
    { name: "iteration", value: (row) => row.iteration },
    number("reward", of("reward_mean"), fixed(3)),
    number("held-out after", (row) => heldOut.get(row.iteration + 1), fixed(3)),
    number("sessions", of("sessions"), whole),
    { name: "failed", text: true, value: (row) => failuresText(row.rollout?.failures) },
    number("tokens", of("tokens_sampled"), whole),
    number("lag mean", of("lag_mean"), fixed(2)),
    number("lag max", of("lag_max"), whole),
    number("seconds", (row) => row.seconds, fixed(2)),
    number("tokens/s", speed, whole),
    number("idle", idleShare, percent),
    number("of it loading", loadingShare, percent),
    { name: "missing", text: true, value: (row) => row.missing.join(" ") },
  ]);
}

function judgeTable(rows) {
  const number = (name, of, show) => ({ name, value: (row) => row[of], cell: (row) => show(row[of]) });
  return table(rows, [
    { name: "iteration", value: (row) => row.iteration },
    { name: "sessions", text: true, value: (row) => row.sessions },
    { name: "judge", text: true, value: (row) => row.judge },
    number("calls", "calls", whole),
    number("tokens", "tokens", whole),
    number("known before", "cached", whole),
    number("not readable", "unread", whole),
    { name: "discarded", text: true, value: (row) => failuresText(row.discarded) },
    number("p95, seconds", "p95_seconds", fixed(2)),
    number("orders agree", "agreement", percent),
  ]);
}

function failuresText(failures) {
  return Object.entries(failures ?? {}).map(([reason, number]) => `${reason} ${number}`).join(", ");
}

function idleNames(rows) {
  return [...new Set(rows.flatMap((row) => Object.keys(row.devices)))].filter((name) => name.startsWith("idle_")).sort();
}

/* Of all devices, in one iteration; null where it is not recorded. */
function idleShare(row) {
  const shares = idleNames([row]).map((name) => row.devices[name]);
  return shares.length ? mean(shares) : null;
}

/* The part of the idle time in which devices loaded engines, weights or trainers. */
function loadingShare(row) {
  const shares = Object.keys(row.devices).filter((name) => name.startsWith("loading_")).map((name) => row.devices[name]);
  return shares.length ? mean(shares) : null;
}

function groupTable(groups, openGroup) {
  const rows = [...groups].reverse().map(([iteration, group, task, rewards, decision]) => {
    const known = rewards.filter(isNumber), centre = known.length ? mean(known) : null;
    const spread = known.length ? Math.sqrt(mean(known.map((r) => (r - centre) ** 2))) : null;
    return { iteration, group, task, rewards, decision, centre, spread, known };
  });
  const [low, high] = range(rows.flatMap((row) => row.known));
  return table(rows, [
    { name: "iteration", value: (row) => row.iteration },
    { name: "group", text: true, value: (row) => row.group },
    { name: "task", text: true, value: (row) => row.task },
    { name: "rewards", text: true, value: (row) => row.rewards.map((r) => short(r) || "none").join(" "), cell: (row) => rewardBars(row.rewards, low, high) },
    { name: "mean", value: (row) => row.centre, cell: (row) => fixed(3)(row.centre) },
    { name: "spread", value: (row) => row.spread, cell: (row) => fixed(3)(row.spread) },
    { name: "decision", text: true, value: (row) => row.decision + (row.spread === 0 ? ", equal rewards" : "") },
  ], { search: "filter groups", onrow: (row) => openGroup(row.group) });
}

function rewardBars(rewards, low, high) {
  const width = 9, height = 18;
  return svg("svg", { class: "bars", width: width * rewards.length, height, role: "img", "aria-label": rewards.map((r) => short(r) || "none").join(", ") },
    svg("title", {}, rewards.map((r) => short(r) || "none").join("  ")),
    ...rewards.flatMap((r, i) => {
      const tall = isNumber(r) ? Math.max(2, ((r - low) / (high - low)) * height) : 0;
      return [svg("rect", { class: "lane", x: i * width, width: width - 2, y: 0, height }), svg("rect", { class: "bar", x: i * width, width: width - 2, y: height - tall, height: tall })];
    }));
}
