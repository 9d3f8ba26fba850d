"use strict";
// The rollout browser: find groups by what they are, read their conversations, compare the members of a group side by
// side, and follow one task over the versions of the policy. What is looked for stands in the address.

const FILTERS = ["run", "env", "outcome", "step", "task", "min_reward", "max_reward", "contains"];

class Browser {
  constructor(source, runs) {
    Object.assign(this, { source, runs, wanted: {}, groups: [], next: null, open: null, asked: 0, loaded: false });
    this.fields = Object.fromEntries(FILTERS.map((name) => [name, this.#field(name)]));
    this.list = h("div");
    this.detail = h("div.detail");
    this.note = h("p.note", { role: "status" });
    this.more = h("button", { type: "button", hidden: true, click: () => this.#find(true) }, "Show more");
    this.task = new Chart("This task over versions", { what: "mean reward of its groups", small: true, axis: "version" });
    this.task.node.hidden = true;
    const labels = { env: "environment", step: "step or range", task: "task", min_reward: "reward from", max_reward: "to", contains: "text", outcome: "outcome", run: "run" };
    const form = h("form.filters", { submit: (event) => { event.preventDefault(); this.#go(); } },
      FILTERS.map((name) => h("span", { hidden: name === "run" && runs.length < 2 }, h("label", { for: `filter-${name}` }, labels[name]), this.fields[name])),
      h("span.buttons", null, h("button", { type: "submit" }, "Find"), h("button", { type: "button", click: () => openRollouts({}) }, "Clear")));
    this.node = h("div", null, form, this.task.node, h("div.browser", null, h("div", null, this.list, this.note, this.more), this.detail));
  }

  #field(name) {
    const id = `filter-${name}`;
    if (["run", "env", "outcome"].includes(name)) {
      const select = h("select", { id, change: () => this.#go() }, h("option", { value: "" }, "any"));
      if (name === "run") fill(select, this.runs.map((run, place) => h("option", { value: place }, run.name)));
      return select;
    }
    if (name === "contains") return h("input.text", { id, type: "search", placeholder: "in any message" });
    return h("input.number", { id, inputmode: "decimal", placeholder: name === "step" ? "12 or 10-20" : "" });
  }

  /** Show what the address asks for. */
  async show(wanted) {
    const { group, ...filters } = wanted;
    for (const name of FILTERS) {
      const field = this.fields[name];
      if (field.tagName === "SELECT" && filters[name] && ![...field.options].some((option) => option.value === filters[name])) field.append(h("option", { value: filters[name] }, filters[name]));
      field.value = filters[name] || (name === "run" ? "0" : "");
    }
    const changed = !this.loaded || JSON.stringify(filters) !== JSON.stringify(this.wanted);
    this.wanted = filters;
    this.loaded = true;
    if (changed) await this.#find(false);
    if (group === undefined) { this.open = null; fill(this.detail, h("p.note", null, "Choose a group to read it.")); }
    else if (changed || String(this.open?.seq) !== String(group)) await this.#read(group);
    this.#rows();
  }

  #go() {
    const wanted = Object.fromEntries(FILTERS.map((name) => [name, this.fields[name].value.trim()]).filter(([name, value]) => value && !(name === "run" && value === "0")));
    openRollouts(wanted);
  }

  get place() { return Number(this.wanted.run || 0); }

  async #find(more) {
    const number = ++this.asked;
    const { run: _, ...wanted } = this.wanted;
    if (more && this.next !== null) wanted.after = String(this.next);
    this.note.textContent = "looking …";
    let found;
    try {
      found = await this.source.find(this.place, wanted);
    } catch (error) {
      if (number === this.asked) { this.note.textContent = error.message; this.more.hidden = true; }
      return;
    }
    if (number !== this.asked) return;
    this.groups = more ? this.groups.concat(found.groups) : found.groups;
    this.next = found.next;
    this.#options(found);
    this.more.hidden = this.next === null;
    this.more.textContent = found.partial ? "Search further back" : "Show more";
    this.note.textContent = (this.groups.length ? `${this.groups.length} groups${this.next !== null ? " so far" : ""}` : found.partial ? "nothing found so far" : "no group fits") + (found.note ? `; ${found.note}` : "");
    this.#followTask();
    this.#rows();
  }

  #options(found) {
    for (const [name, values] of [["env", found.envs], ["outcome", found.outcomes]]) {
      const field = this.fields[name], now = field.value;
      fill(field, h("option", { value: "" }, "any"), [...new Set([...(values || []), now])].filter(Boolean).map((value) => h("option", { value }, value)));
      field.value = now;
    }
  }

  #followTask() {
    const groups = this.wanted.env && this.wanted.task ? [...this.groups].filter((group) => isNumber(group.mean_reward)).sort((a, b) => a.version - b.version) : [];
    this.task.draw([{ label: `${this.wanted.env} task ${this.wanted.task}`, color: "c0", x: groups.map((group) => group.version), y: groups.map((group) => group.mean_reward), dots: true }]);
    this.task.node.hidden = groups.length < 2;
    this.task.paint();
  }

  #rows() {
    const spread = this.groups.flatMap((group) => group.rewards).filter(isNumber);
    const low = Math.min(0, ...spread), high = Math.max(1, ...spread);
    fill(this.list, this.groups.length ? table([
      { name: "step", cell: (group) => h("button.link", { type: "button", click: () => this.#pick(group) }, group.step === null ? "queued" : String(group.step)) },
      { name: "environment", left: true, cls: "name", cell: (group) => group.env + (group.split === "eval" ? " (eval)" : "") },
      { name: "task", cell: (group) => String(group.task) },
      { name: "outcome", left: true, cell: (group) => h("span", { class: ["trained", "queued", "evaluated"].includes(group.outcome) ? "" : "warn" }, group.outcome) },
      { name: "rewards", left: true, cell: (group) => rewardBars(group.rewards, low, high) },
      { name: "mean", cell: (group) => number(group.mean_reward) },
      { name: "tokens", cell: (group) => number(group.tokens) },
      { name: "took", cell: (group) => duration(group.seconds) },
      { name: "version", cell: (group) => (group.version === group.version_end ? String(group.version) : `${group.version}–${group.version_end}`) },
      { name: "text", left: true, cell: (group) => (group.has_text ? "kept" : h("span.dim", null, "–")) },
    ], this.groups, { key: (group) => group.seq, pick: (group) => this.#pick(group), picked: this.open?.seq ?? null }) : []);
  }

  #pick(group) { openRollouts({ ...this.wanted, group: group.seq }); }

  async #read(seq) {
    let group;
    try {
      group = await this.source.group(this.place, seq);
    } catch (error) {
      fill(this.detail, h("p.bad", null, error.message));
      return;
    }
    if (!group) { fill(this.detail, h("p.note", null, "This group is not kept any more.")); return; }
    this.open = group;
    const ranked = [...group.rollouts].sort((a, b) => b.reward - a.reward);
    this.shown = new Set(ranked.length > 2 ? [ranked[0].number, ranked[ranked.length - 1].number] : ranked.map((one) => one.number));
    this.#draw();
  }

  #draw() {
    const group = this.open, common = sharedMessages(group.rollouts);
    const show = (numbers) => { this.shown = new Set(numbers); this.#draw(); };
    const toggle = (one) => { if (!this.shown.delete(one)) this.shown.add(one); this.#draw(); };
    const pairs = [["step", group.step ?? "queued"], ["version", group.version === group.version_end ? group.version : `${group.version} to ${group.version_end}`], ["outcome", group.outcome], ["mean reward", number(group.mean_reward)], ["tokens", number(group.tokens)], ["took", duration(group.seconds)], ["ended", clockTime(group.finished_at)]];
    this.detail.replaceChildren(h("div.box", null,
      h("div.head", null, h("h3", null, `${group.env} · task ${group.task}`)),
      h("div.pairs", null, pairs.map(([name, value]) => h("span", null, name, " ", h("b", null, String(value))))),
      h("div.buttons", null,
        h("button", { type: "button", click: () => openRollouts({ ...(this.wanted.run ? { run: this.wanted.run } : {}), env: group.env, task: String(group.task) }) }, "Follow this task over versions"),
        group.step !== null && h("button", { type: "button", click: () => openRollouts({ ...(this.wanted.run ? { run: this.wanted.run } : {}), step: String(group.step), group: group.seq }) }, `All of step ${group.step}`)),
      h("div.buttons", { role: "group", "aria-label": "members of the group" }, h("span.note", null, "compare:"),
        group.rollouts.map((one) => h("button", { type: "button", "aria-pressed": this.shown.has(one.number) ? "true" : "false", click: () => toggle(one.number) }, `${one.number + 1}: ${number(one.reward)}`)),
        group.rollouts.length > 2 && h("button", { type: "button", click: () => show(group.rollouts.map((one) => one.number)) }, "all")),
      group.has_text ? common.map(message) : h("p.note", null, "The conversation of this group was not kept; the numbers are."),
      h("div.members", null, group.rollouts.filter((one) => this.shown.has(one.number)).map((one) => member(one, common.length)))));
  }
}

function member(one, common) {
  const pairs = [...Object.entries(one.metrics), ...Object.entries(one.seats).map(([seat, reward]) => [`reward of ${seat}`, reward])];
  return h("div.member.box", null,
    h("h3", null, `Rollout ${one.number + 1}: reward ${number(one.reward)}`),
    h("div.pairs", null, h("span", null, "tokens ", h("b", null, number(one.tokens))), one.stop_reason && h("span", null, "ended by ", h("b", null, one.stop_reason)), one.truncated && h("span.warn", null, "cut by a limit"),
      pairs.map(([name, value]) => h("span", null, name, " ", h("b", null, number(value)))),
      Object.entries(one.timings).map(([name, value]) => h("span", null, name, " ", h("b", null, duration(value))))),
    one.messages.slice(common).map(message));
}

function message(told) {
  const known = ["assistant", "tool", "system", "user"].includes(told.role) ? told.role : "";
  return h("div", { class: `said ${known}` }, h("div.role", null, told.name ? `${told.role} ${told.name}` : told.role || "message"),
    told.reasoning && h("pre.thought", null, told.reasoning), told.text && h("pre", null, told.text),
    told.calls.map(([name, given]) => h("pre.call", null, `${name}(${given})`)), told.cut > 0 && h("p.note", null, `${number(told.cut)} more characters are not shown`));
}

/** What every member of a group begins with, up to its first answer, which is shown once. */
function sharedMessages(rollouts) {
  const [first, ...others] = rollouts.map((one) => one.messages);
  if (!first || !others.length) return [];
  let n = 0;
  while (n < first.length && first[n].role !== "assistant" && others.every((messages) => messages[n] && JSON.stringify(messages[n]) === JSON.stringify(first[n]))) n++;
  return first.slice(0, n);
}

function rewardBars(rewards, low, high) {
  const shown = rewards.slice(0, 16);
  return h("span.rewards", { title: rewards.map((reward) => number(reward)).join("  ") }, shown.map((reward) => {
    const bar = h("b");
    bar.style.height = `${Math.round((100 * (reward - low)) / (high - low || 1))}%`;
    return h("i", null, bar);
  }), rewards.length > shown.length && h("span.dim", null, ` +${rewards.length - shown.length}`));
}
