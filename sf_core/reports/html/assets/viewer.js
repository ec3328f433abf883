/* The trajectory viewer: find a session, choose a branch, read its turns token by token. */

const LIST_ROWS = 200, TURN_TOKENS = 3000, NUM_VERSION_COLOURS = 8;
const PROBABILITIES = [0.9, 0.7, 0.5, 0.3, 0.1, 0.01, 0];
const COLOURINGS = [["logprob", "log-prob"], ["version", "policy version"], ["none", "none"]];
const ORDERS = {
  newest: (a, b) => b.number - a.number || compare(a.session_id, b.session_id),
  "highest reward": (a, b) => compare(b.reward, a.reward),
  "lowest reward": (a, b) => compare(a.reward, b.reward),
  longest: (a, b) => b.tokens - a.tokens,
  "most interruptions": (a, b) => b.interruptions - a.interruptions,
  "most branches": (a, b) => b.branches - a.branches,
};

class Viewer {
  constructor(sessions) {
    this.sessions = sessions;
    this.found = [];
    this.group = null; // the only one in the list, until somebody searches
    this.rows = LIST_ROWS;
    this.colouring = "logprob";
    const left = sessions.numAll - sessions.list.length;
    byId("left-out").textContent = left
      ? `${whole(sessions.list.length)} of ${whole(sessions.numAll)} sessions are in this page, the newest and the most telling of every iteration; ${whole(left)} were left out to keep it small. sf inspect shows them, and sf report --max-mb makes room for more.`
      : `All ${whole(sessions.numAll)} sessions of the run are in this page.`;
    const origins = [...new Map(sessions.list.map((s) => [`${s.kind} ${s.number}`, s])).values()].sort(ORDERS.newest);
    byId("origin").append(el("option", { value: "" }, "all"), ...origins.map((s) => el("option", {}, `${s.kind} ${s.number}`)));
    byId("order").append(...Object.keys(ORDERS).map((name) => el("option", {}, name)));
    byId("search").addEventListener("input", () => { this.group = null; });
    for (const id of ["search", "origin", "reward-min", "reward-max", "interrupted", "branched", "mixed", "order"])
      byId(id).addEventListener("input", () => this.find());
    byId("list").addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
      if (step) { event.preventDefault(); this.step(step); }
    });
    byId("list").addEventListener("click", (event) => {
      const row = event.target.closest("[role=option]");
      if (row) this.show(this.found[Number(row.dataset.row)]);
    });
    byId("session").addEventListener("pointerover", (event) => this.readToken(event.target.closest("[data-token]")));
    this.find();
    byId("session").replaceChildren(el("p", { class: "note" }, "Choose a session to read it turn by turn."));
  }

  openGroup(group) {
    for (const id of ["interrupted", "branched", "mixed"]) byId(id).checked = false;
    for (const id of ["origin", "reward-min", "reward-max"]) byId(id).value = "";
    byId("search").value = this.group = group;
    this.find();
    byId("sessions").scrollIntoView();
    if (this.found.length) this.show(this.found[0]);
  }

  find() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const origin = byId("origin").value;
    const [least, most] = ["reward-min", "reward-max"].map((id) => (byId(id).value === "" ? null : Number(byId(id).value)));
    this.found = this.sessions.list.filter((s) => {
      const text = `${s.session_id} ${s.task_id} ${s.group_id ?? ""} ${s.environment} ${s.status}`.toLowerCase();
      // the name of a group is the beginning of others
      return (this.group == null ? words.every((word) => text.includes(word)) : s.group_id === this.group)
        && (!origin || origin === `${s.kind} ${s.number}`)
        && (least == null || (isNumber(s.reward) && s.reward >= least))
        && (most == null || (isNumber(s.reward) && s.reward <= most))
        && (!byId("interrupted").checked || s.interruptions > 0)
        && (!byId("branched").checked || s.branches > 1)
        && (!byId("mixed").checked || s.min_version !== s.max_version);
    }).sort(ORDERS[byId("order").value]);
    this.rows = LIST_ROWS;
    this.drawList();
  }

  drawList() {
    const rows = this.found.slice(0, this.rows).map((s, i) => el("li",
      { role: "option", id: `row-${i}`, "data-row": i, "aria-selected": String(s === this.facts) },
      el("b", {}, visible(s.task_id)), el("span", { class: "reward" }, isNumber(s.reward) ? short(s.reward) : s.status),
      el("small", {}, visible(s.session_id)), el("small", { class: "badges" }, badges(s))));
    const left = this.found.length - rows.length;
    const more = left > 0 ? el("li", {}, el("button", { type: "button", class: "more", onclick: () => { this.rows += 5 * LIST_ROWS; this.drawList(); } }, `more (${whole(left)})`)) : null;
    byId("list").replaceChildren(...rows, ...(more ? [more] : []));
    byId("count").textContent = `${whole(this.found.length)} of ${whole(this.sessions.list.length)} sessions`;
  }

  step(by) {
    const at = this.found.indexOf(this.facts);
    const next = this.found[at < 0 ? 0 : Math.min(Math.max(at + by, 0), this.found.length - 1)];
    if (next) this.show(next);
  }

  async show(facts, branchId = null) {
    this.facts = facts;
    byId("list").querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const row = byId(`row-${this.found.indexOf(facts)}`);
    row?.setAttribute("aria-selected", "true");
    row?.scrollIntoView({ block: "nearest" });
    if (row) byId("list").setAttribute("aria-activedescendant", row.id);
    history.replaceState(null, "", `#session=${encodeURIComponent(facts.session_id)}`);
    const session = await this.sessions.open(facts);
    if (this.facts !== facts) return; // another was chosen meanwhile
    this.session = session;
    this.showBranch(branchId ?? session.branches.keys().next().value);
  }

  /* Open the session that the address names, if this page holds it. */
  followAddress() {
    const facts = this.sessions.list.find((s) => location.hash === `#session=${encodeURIComponent(s.session_id)}`);
    if (facts) { byId("sessions").scrollIntoView(); this.show(facts); }
  }

  stepBranch(by) {
    if (!this.session) return;
    const ids = [...this.session.branches.keys()];
    this.showBranch(ids[(ids.indexOf(this.branch.id) + by + ids.length) % ids.length]);
  }

  showBranch(id) {
    this.branch = this.session.branches.get(id);
    const { branch, facts, session } = this;
    const parts = Object.entries(session.reward_parts).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    const pairs = [
      ["task", facts.task_id], ["environment", facts.environment], ["group", facts.group_id ?? "none"],
      ["reward", isNumber(facts.reward) ? short(facts.reward) + (parts ? ` (${parts})` : "") : "none"],
      ["status", facts.status], ["origin", `${facts.kind} ${facts.number}`], ["took", `${short(session.seconds)} s`],
      ["tokens", `${whole(branch.ids.length)}, ${whole(branch.states.filter((s) => s !== GIVEN).length)} sampled, ${whole(branch.states.filter((s) => s === TRAINED).length)} of them counted in this branch`],
      ["interruptions", String(branch.interruptions)],
    ];
    this.note = el("output", { class: "token-note" }, "Point at a sampled token to read its figures.");
    this.body = el("div", { class: `turns by-${this.colouring}` }, ...this.turns(branch));
    byId("session").replaceChildren(
      el("h3", {}, visible(facts.session_id)),
      el("dl", {}, ...pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value))))),
      ...(session.branches.size > 1 ? [el("nav", { class: "tree", "aria-label": "Branches" }, this.tree(null))] : []),
      el("div", { class: "toolbar" }, this.colourSwitch(), this.legend = el("ul", { class: "legend" })),
      this.note, this.body,
      ...(session.output == null ? [] : [this.output(session.output)]));
    this.drawLegend();
  }

  output(text) {
    return el("details", {}, el("summary", {}, "what the command wrote last"), el("pre", { class: "tokens" }, visible(text)));
  }

  tree(parent) {
    const children = [...this.session.branches.values()].filter((b) => b.parent === parent);
    return children.length ? el("ul", {}, ...children.map((b) => el("li", {},
      el("button", { type: "button", "aria-pressed": String(b === this.branch), onclick: () => this.showBranch(b.id) },
        visible(this.shortId(b.id)), el("small", {}, ` ${whole(b.length)} own tokens` + (b.interruptions ? `, ${b.interruptions} interruptions` : ""))),
      this.tree(b.id)))) : null;
  }

  shortId(id) {
    return id.startsWith(this.session.id + ".") ? "branch " + id.slice(this.session.id.length + 1) : "branch " + id;
  }

  colourSwitch() {
    return el("fieldset", { class: "switch" }, el("legend", {}, "colour by"), ...COLOURINGS.map(([value, name]) => el("label", {},
      el("input", { type: "radio", name: "colouring", value, checked: value === this.colouring, onchange: () => this.colourBy(value) }), name)));
  }

  colourBy(value) {
    this.colouring = value;
    if (!this.session) return;
    this.body.className = `turns by-${value}`;
    byId("session").querySelector(`input[value=${value}]`).checked = true;
    this.drawLegend();
  }

  nextColouring() {
    const at = COLOURINGS.findIndex(([value]) => value === this.colouring);
    this.colourBy(COLOURINGS[(at + 1) % COLOURINGS.length][0]);
  }

  drawLegend() {
    const names = PROBABILITIES.map((least, i) => (i ? `${least}` : `p > ${least}`));
    const versions = [...new Set(this.branch.versions)].filter((v) => v >= 0).sort((a, b) => a - b);
    const entries = {
      logprob: names.map((name, i) => el("li", { class: `tok p${i}` }, name)),
      version: versions.map((v) => el("li", { class: `tok v${v % NUM_VERSION_COLOURS}` }, `v${v}`)),
      none: [],
    }[this.colouring];
    this.legend.className = `legend by-${this.colouring}`;
    this.legend.replaceChildren(...entries, el("li", { class: "tok trained" }, this.facts.marks[0]), el("li", { class: "tok carried" }, this.facts.marks[1]), el("li", { class: "given" }, "not sampled"));
  }

  /* The turns of a branch; what it shares with its parent is folded. */
  turns(branch) {
    const shared = branch.turns.filter(([, , end]) => end <= branch.shared), own = branch.turns.slice(shared.length);
    let reached = 0;
    const spans = (turns) => turns.map((turn, i) => { const begin = i ? reached : Math.min(reached, turn[1]); reached = turn[2]; return [begin, turn]; });
    const folded = spans(shared), open = spans(own);
    const blocks = open.map(([begin, turn]) => this.turn(branch, begin, turn));
    if (!folded.length) return blocks;
    const details = el("details", { ontoggle: () => details.childElementCount === 1 && details.append(...folded.map(([begin, turn]) => this.turn(branch, begin, turn))) },
      el("summary", {}, `${folded.length} turns as in ${this.shortId(branch.parent)}`));
    return [details, ...blocks];
  }

  turn(branch, begin, [role, , end, finish, engine, temperature, topP, topK, reward]) {
    const sampled = engine != null || finish != null;
    const facts = [`tokens ${begin}-${end}`, finish, engine && `engine ${engine}`, sampled && isNumber(temperature) && `temperature ${short(temperature)}`,
      isNumber(topP) && topP < 1 && `top-p ${short(topP)}`, isNumber(topK) && topK > 0 && `top-k ${topK}`,
      isNumber(reward) && `reward ${short(reward)}`].filter(Boolean).join(" \u00b7 ");
    const text = el("div", { class: "tokens" });
    const section = el("section", { class: `turn ${sampled ? "sampled" : ""}` }, el("header", {}, el("b", {}, visible(role)), el("small", {}, visible(facts))), text);
    const more = (from) => {
      const to = Math.min(from + TURN_TOKENS, end);
      text.append(...this.tokens(branch, from, to));
      if (to < end) text.append(el("button", { type: "button", class: "more", onclick: (event) => { event.target.remove(); more(to); } }, `${whole(end - to)} more tokens`));
    };
    more(begin);
    return section;
  }

  tokens(branch, begin, end) {
    const nodes = [];
    let given = "", before = null;
    const flush = () => { if (given) nodes.push(el("span", { class: "given" }, given)); given = ""; };
    for (let i = begin - 1; i >= 0 && before == null; i--) if (branch.states[i] !== GIVEN) before = branch.versions[i];
    for (let i = begin; i < end; i++) {
      const picture = branch.images.find(([start, length]) => start <= i && i < start + length);
      if (picture) { flush(); nodes.push(this.picture(picture)); i = picture[0] + picture[1] - 1; continue; }
      const text = branch.texts[i];
      if (branch.states[i] === GIVEN) { given += text == null ? "" : visible(text); continue; }
      flush();
      const version = branch.versions[i];
      if (before != null && version !== before) nodes.push(el("span", { class: "cut", title: `from here on sampled by version ${version}` }, `v${before}\u2192v${version}`));
      before = version;
      const level = PROBABILITIES.findIndex((least) => Math.exp(branch.logprobs[i] / 1000) > least);
      nodes.push(el("span", {
        class: `tok p${level < 0 ? PROBABILITIES.length - 1 : level} v${version % NUM_VERSION_COLOURS} ${branch.states[i] === TRAINED ? "trained" : "carried"}${text == null ? " partial" : ""}`,
        "data-token": i,
      }, text == null ? "\u22ef" : visible(text)));
    }
    flush();
    return nodes;
  }

  picture([start, length, sha256]) {
    const small = this.session.pictures[sha256], name = `picture ${sha256.slice(0, 12)}, ${whole(length)} tokens`;
    return small ? el("img", { src: small, alt: name, title: name }) : el("span", { class: "given" }, `[${name}]`);
  }

  isTraining() {
    return this.facts.kind.startsWith("trains");
  }

  readToken(node) {
    if (!node) return;
    const i = Number(node.dataset.token), { branch, facts } = this, logprob = branch.logprobs[i] / 1000, id = branch.ids[i];
    this.note.textContent = [
      `token ${i}`, `id ${id}`, branch.texts[i] == null ? `bytes ${this.sessions.hex(id)}, part of a character` : JSON.stringify(branch.texts[i]),
      branch.logprobs[i] > 0 ? "no log-prob" : `log-prob ${logprob.toFixed(3)} (p ${Math.exp(logprob).toFixed(3)})`,
      `version ${branch.versions[i]}` + (this.isTraining() ? `, lag ${facts.number - branch.versions[i]}` : ""),
      branch.states[i] === TRAINED ? facts.marks[0] : facts.marks[1],
    ].join(" \u00b7 ");
  }
}

function badges(s) {
  const versions = s.min_version == null ? "" : s.min_version === s.max_version ? `v${s.min_version}` : `v${s.min_version}\u2192v${s.max_version}`;
  return [`${s.kind.split(" ")[0]} ${s.number}`, versions, `${whole(s.tokens)} tok`, s.branches > 1 && `${s.branches} branches`, s.interruptions && `${s.interruptions} interr.`].filter(Boolean).join(" \u00b7 ");
}
