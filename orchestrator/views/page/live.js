"use strict";
// Where the data comes from: a service that sends what is new (`Live`), or the document itself (`Inside`).

const TOKEN = "orchestrator token";

/** What asks this service, with the token where there is one. */
async function ask(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  return fetch(path, { cache: "no-store", ...options, headers });
}

/** Have the token typed in, once; resolves to whether there is one now. */
function askForToken(why, place = TOKEN) {
  const dialog = byId("ask"), input = byId("token");
  byId("ask-why").textContent = why;
  byId("ask-cancel").onclick = () => dialog.close("");
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      const given = dialog.returnValue === "ok" && input.value.trim();
      if (given) sessionStorage.setItem(place, given);
      input.value = "";
      resolve(Boolean(given));
    };
  });
}

class Live {
  constructor(show, say) {
    Object.assign(this, { show, say, run: null, wait: 1000 });
  }

  /** Read the stream for ever; a stream that ends or falls silent is asked for again, from the last step on. */
  async follow() {
    for (;;) {
      const silent = new AbortController();
      try {
        await this.#read(silent);
      } catch (error) {
        if (error.name === "NeedsToken") {
          this.say("a token is needed");
          while (!(await askForToken(error.message)));
          continue;
        }
      }
      if (this.run?.status.state === "finished") this.say("the run has ended; orchestrator view shows it from now on");
      else this.say(`connection lost${this.run ? "; this is what was known at " + new Date(1000 * this.run.now).toLocaleTimeString() : ""}; trying again`);
      await new Promise((resolve) => setTimeout(resolve, this.wait));
      this.wait = Math.min(5000, this.wait * 1.5);
    }
  }

  async #read(silent) {
    const known = this.run?.series;
    const have = known?.last ? `?${new URLSearchParams({ run: this.run.run, step: known.last, width: known.width, at: pythonFloat(known.run.at[known.run.at.length - 1]) })}` : "";
    let alarm = setTimeout(() => silent.abort(), 10000);
    const reply = await ask(`/api/events${have}`, { signal: silent.signal });
    if (reply.status === 401) {
      clearTimeout(alarm);
      const again = sessionStorage.getItem(TOKEN) !== null;
      sessionStorage.removeItem(TOKEN);
      const error = new Error(again ? "That was not the token of this run." : "This run asks for a token.");
      error.name = "NeedsToken";
      throw error;
    }
    if (!reply.ok) throw new Error(await reply.text());
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(alarm);
      alarm = setTimeout(() => silent.abort(), 10000);
      text += value;
      const frames = text.split("\n\n");
      text = frames.pop();
      for (const frame of frames) this.#take(JSON.parse(frame.slice(6)));
      if (frames.length) { this.wait = 1000; this.say(""); }
    }
  }

  #take(frame) {
    const before = this.run && this.run.run === frame.run ? this.run : {};
    const series = frame.series ? joined(before.series, frame.series) : before.series;
    this.run = { ...before, ...frame, series, color: color(0) };
    this.show([this.run], Boolean(frame.series));
  }

  async find(_, wanted) { return this.#get(`/api/rollouts?${new URLSearchParams(wanted)}`); }
  async group(_, seq) { return this.#get(`/api/rollouts/${encodeURIComponent(seq)}`); }
  async failures() { return this.#get("/api/failures"); }

  async #get(path) {
    const reply = await ask(path);
    if (!reply.ok) throw new Error((await reply.text()).trim());
    return reply.json();
  }
}

/** A time as the service writes it: with a decimal point always. */
const pythonFloat = (value) => (Number.isInteger(value) ? value.toFixed(1) : String(value));

/** Columns with the buckets of a later moment put in their places. */
function joined(old, fresh) {
  if (!old || old.width !== fresh.width || fresh.from === 0) return fresh;
  const length = fresh.from + fresh.steps.length;
  const put = (before, after) => {
    const column = (before || []).slice(0, fresh.from);
    while (column.length < fresh.from) column.push(null);
    return column.concat(after || new Array(length - fresh.from).fill(null));
  };
  const all = (before, after) => Object.fromEntries([...new Set([...Object.keys(before), ...Object.keys(after)])].map((name) => [name, put(before[name], after[name])]));
  const envs = [...new Set([...Object.keys(old.envs), ...Object.keys(fresh.envs)])];
  return {
    ...fresh, steps: put(old.steps, fresh.steps), run: all(old.run, fresh.run), trainer: all(old.trainer, fresh.trainer),
    envs: Object.fromEntries(envs.map((env) => [env, all(old.envs[env] || {}, fresh.envs[env] || {})])),
  };
}

/** The data of a report, which stands in the document; rollouts are a sample. */
class Inside {
  constructor(data) {
    this.runs = data.runs.map((run, place) => ({ ...run, color: color(place) }));
  }

  async find(place, wanted) {
    const groups = (this.runs[place].groups || []).filter((group) => fits(group, wanted));
    const limit = 100, from = groups.findIndex((group) => String(group.seq) === wanted.after) + 1;
    return { groups: groups.slice(from, from + limit), next: groups.length > from + limit ? groups[from + limit - 1].seq : null, ...this.runs[place].kinds };
  }

  async group(place, seq) { return (this.runs[place].groups || []).find((group) => String(group.seq) === String(seq)) || null; }
  async failures() { return this.runs[0].failures || []; }
}

function fits(group, wanted) {
  const step = (wanted.step || "").split("-").map(Number);
  const low = wanted.min_reward ? Number(wanted.min_reward) : -Infinity, high = wanted.max_reward ? Number(wanted.max_reward) : Infinity;
  const text = (wanted.contains || "").toLowerCase();
  return (!wanted.env || group.env === wanted.env) && (!wanted.outcome || group.outcome === wanted.outcome)
    && (!wanted.task || String(group.task) === wanted.task)
    && (!wanted.step || (group.step !== null && group.step >= step[0] && group.step <= step[step.length - 1]))
    && ((low === -Infinity && high === Infinity) || group.rewards.some((reward) => reward >= low && reward <= high))
    && (!text || group.rollouts.some((one) => one.messages.some((message) => `${message.text}\n${message.calls.map((call) => call.join("(")).join("\n")}`.toLowerCase().includes(text))));
}
