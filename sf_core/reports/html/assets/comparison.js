/* The page that compares runs: curves over each other, what came out, and the settings that differ. */

/* What a curve is drawn over. Held-out rewards are of the policy after so many iterations. */
const AXES = [
  ["iterations", "iterations", "Number of iterations. A held-out reward is that of the policy after this many iterations."],
  ["seconds", "seconds", "Seconds spent in iterations. The start of a run and the time while it stood still do not count."],
  ["tokens", "sampled tokens", "Tokens that the engines sampled, evaluations included."],
];
const COLOURS = ["s0", "s2", "s3", "s4", "s5", "s1"], DASHES = ["", "d1", "d2"];
const CHARTS = [
  ["Held-out reward", "held_out", {}], ["Training reward", "reward", {}], ["Loss", "loss", {}], ["Entropy", "entropy", {}],
  ["KL to the sampling policy", "kl", {}], ["Clipped share", "clip_fraction", { format: percent, from: 0 }],
  ["Gradient norm", "grad_norm", { from: 0 }], ["Lag of trained tokens, versions", "lag", { from: 0 }],
  ["Sampled tokens per second", "tokens_per_second", { from: 0, format: whole }],
  ["Tokens per trajectory", "length_mean", { from: 0, format: whole }],
];

const colourOf = (i) => `${COLOURS[i % COLOURS.length]} ${DASHES[Math.floor(i / COLOURS.length) % DASHES.length]}`;

/* Points [x, y] of a figure of one run over an axis. */
function pointsOf(run, figure, axis) {
  if (figure === "held_out") return run.held_out.map(([version, y]) => [version === 0 ? 0 : run.reached[version - 1]?.[axis], y]).filter(([x]) => isNumber(x));
  return run.reached.map((reached, i) => [reached[axis], run.rows[i][figure]]);
}

function drawCharts(runs, axis) {
  const [, name, about] = AXES.find(([key]) => key === axis);
  byId("axis-note").textContent = `x: ${about}`;
  const charts = CHARTS.map(([title, figure, options]) => lineChart(title,
    runs.map((run, i) => ({ name: visible(run.name), colour: colourOf(i), points: pointsOf(run, figure, axis), dots: figure === "held_out" })),
    { ...options, x: name, each: true }));
  byId("charts").replaceChildren(...charts.filter(Boolean));
}

function axisSwitch(runs) {
  return el("fieldset", { class: "switch" }, el("legend", {}, "x-axis"), ...AXES.map(([key, name], i) => el("label", {},
    el("input", { type: "radio", name: "axis", value: key, checked: i === 0, onchange: () => drawCharts(runs, key) }), name)));
}

function resultTable(runs) {
  const number = (name, of, show) => ({ name, value: of, cell: (run) => show(of(run)) });
  const measured = (name, key) => ({ name, value: (run) => run[key]?.reward, cell: (run) => measuredText(run[key]) });
  return table(runs.map((run, i) => ({ ...run, colour: colourOf(i) })), [
    { name: "run", text: true, value: (run) => run.name, cell: (run) => el("span", { class: `key ${run.colour}` }, visible(run.name)) },
    measured("best held-out", "best"), measured("last held-out", "last"),
    number("last training", (run) => run.rows.at(-1)?.reward, fixed(3)),
    { name: "iterations", value: (run) => run.reached.length, cell: (run) => `${run.reached.length} of ${run.due}` },
    number("seconds", (run) => run.reached.at(-1)?.seconds, whole),
    number("sampled tokens", (run) => run.reached.at(-1)?.tokens, whole),
    number("failed sessions", (run) => run.failed, whole),
  ]);
}

/* A reward with its standard error over tasks and the version that earned it. */
function measuredText(measured) {
  if (!measured) return "none";
  const error = isNumber(measured.error) ? ` \u00b1 ${fixed(3)(measured.error)}` : "";
  return `${fixed(3)(measured.reward)}${error} (v${measured.version})`;
}

function settingTable(runs, settings) {
  if (!settings.length) return el("p", { class: "note" }, "The runs have equal settings but for their names.");
  return table(settings, [{ name: "setting", text: true, value: (row) => row.key },
    ...runs.map((run, i) => ({ name: run.name, text: true, value: (row) => row.values[i] }))]);
}

async function main() {
  beginTheme();
  const { runs, settings } = await decodeJson("data-figures");
  byId("axis").append(axisSwitch(runs));
  drawCharts(runs, AXES[0][0]);
  byId("results").append(resultTable(runs));
  byId("settings-that-differ").append(settingTable(runs, settings));
  document.addEventListener("keydown", (event) => { if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) nextTheme(); });
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => {
  byId("subtitle").textContent = `This page could not be drawn: ${error.message}. It needs a browser of 2024 or later.`;
  throw error;
});
