/* Puts the page together: figures first, then the list of sessions; tokens are decoded when a session is opened. */

function drawOverview(figures) {
  const rows = figures.iterations, rollouts = rows.filter((row) => row.rollout);
  const of = (name) => rollouts.map((row) => [row.iteration, row.rollout[name]]);
  const training = (name) => rows.map((row) => [row.iteration, row.training[name]]);
  const timed = rows.filter((row) => row.seconds);
  const speed = timed.map((row) => [row.iteration, row.sampled_tokens / row.seconds]);
  const heldOut = figures.held_out.map(([version, reward]) => [version, reward]);
  const device = (name) => rows.map((row) => [row.iteration, row.devices[name]]);
  const idle = idleNames(rows);
  const counted = rows.filter((row) => row.groups);
  const kind = (name, legend, colour) => ({ name, legend, colour, values: counted.map((row) => row.groups[name]) });
  const seconds = timed.reduce((sum, row) => sum + row.seconds, 0);
  const tiles = [
    ["held-out reward", heldOut.length ? [...new Set([heldOut[0], heldOut.at(-1)])].map(([, r]) => fixed(2)(r)).join(" \u2192 ") : "none"],
    ["training reward", rollouts.length ? fixed(2)(rollouts.at(-1).rollout.reward_mean) : "none"],
    ["iterations", whole(rows.length)],
    ["sampled tokens", whole(figures.tokens_sampled)],
    ["tokens/s", seconds ? whole(timed.reduce((sum, row) => sum + row.sampled_tokens, 0) / seconds) : ""],
    ["time in iterations", seconds ? `${whole(seconds)} s` : ""],
    ["idle, all devices", percent(mean(rows.map(idleShare).filter(isNumber)))],
    ["greatest lag", rollouts.length ? String(Math.max(...rollouts.map((row) => row.rollout.lag_max))) : ""],
  ];
  byId("tiles").append(...tiles.filter(([, value]) => value).map(([name, value]) => el("div", { class: "card" }, el("dt", {}, name), el("dd", {}, value))));
  const charts = [
    lineChart("Reward", [{ name: "held-out", points: heldOut, dots: true }, { name: "training", points: of("reward_mean") }], { format: short }),
    bandChart("Groups", counted.map((row) => row.iteration),
      [kind("right", "all right", "s3"), kind("mixed", "mixed", "s0"), kind("wrong", "all wrong", "s2")]),
    lineChart("Tokens per session and per trajectory", [
      { name: "sampled, session", points: rollouts.map((row) => [row.iteration, row.rollout.tokens_sampled / row.rollout.sessions]) },
      { name: "trajectory", points: training("length_mean") }], { from: 0 }),
    lineChart("Lag of sampled tokens, versions", [{ name: "mean", points: of("lag_mean") }, { name: "max", points: of("lag_max") }], { from: 0 }),
    lineChart("Idle share of devices", idle.map((name) => ({ name: name.slice("idle_".length), points: device(name) })), { format: percent, from: 0 }),
    lineChart("Sampled tokens per second", [{ name: "tokens/s", points: speed }], { from: 0, format: whole }),
    lineChart("Switching a device, seconds", [{ name: "to train", points: device("to_train_mean_s") }, { name: "to rollout", points: device("to_rollout_mean_s") }], { from: 0 }),
    lineChart("Entropy", [{ name: "entropy", points: training("entropy") }]),
    lineChart("KL to the sampling policy, clipped share", [{ name: "kl", points: training("kl") }, { name: "clipped", points: training("clip_fraction") }]),
    lineChart("KL to the teacher", [{ name: "kl", points: training("teacher_kl") }]),
    lineChart("Gradient norm", [{ name: "norm", points: training("grad_norm") }], { from: 0 }),
  ];
  byId("charts").append(...charts.filter(Boolean));
  drawTimeline(byId("timeline"), figures.timeline);
}

function listenToKeys(viewer) {
  const actions = {
    t: nextTheme, c: () => viewer.nextColouring(), j: () => viewer.step(1), k: () => viewer.step(-1),
    "[": () => viewer.stepBranch(-1), "]": () => viewer.stepBranch(1), "/": () => byId("search").focus(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") document.activeElement.blur();
    if (event.target.matches("input:not([type=checkbox], [type=radio]), select")) return;
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });
}

async function main() {
  beginTheme();
  const [figures, list, vocabulary] = await Promise.all(["figures", "sessions", "vocabulary"].map((name) => decodeJson(`data-${name}`)));
  drawOverview(figures);
  drawEvaluations(byId("evaluations"), figures);
  byId("iterations").append(iterationTable(figures));
  if (figures.judges.length) byId("judges").append(judgeTable(figures.judges));
  const viewer = new Viewer(new Sessions(list, vocabulary));
  byId("groups").append(groupTable(figures.groups, (group) => viewer.openGroup(group)));
  listenToKeys(viewer);
  window.addEventListener("hashchange", () => viewer.followAddress());
  viewer.followAddress();
  document.documentElement.dataset.ready = "yes";
}

main().catch((error) => {
  byId("subtitle").textContent = `This page could not be drawn: ${error.message}. It needs a browser of 2024 or later.`;
  throw error;
});
