"use strict";
// The page of a report: its chart, its slider and its list of events. For the data, see controller/replay/report/page.py.

const SHOWN_MAX = 300; // events shown in the list at a time
const byId = (id) => document.getElementById(id);

const shownAt = (at) => new Date(at).toISOString().slice(0, 23).replace("T", " "); // as in the chart: UTC, without a time zone
const readAt = (text) => new Date(`${String(text).replace(" ", "T")}Z`).getTime();
const clock = (at) => new Date(at).toISOString().slice(11, 23);

async function unpacked() {
  const bytes = Uint8Array.from(atob(byId("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function element(name, text, more = {}) {
  const made = Object.assign(document.createElement(name), more);
  made.textContent = text;
  return made;
}

// --- the chart

function colors() {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  return { "font.color": text, "xaxis.gridcolor": line, "yaxis.gridcolor": line, "yaxis2.gridcolor": line };
}

async function draw(figure) {
  const chart = byId("chart"), whole = figure.layout.xaxis.range.slice();
  await Plotly.newPlot(chart, figure.data, figure.layout, { displayModeBar: false, responsive: true });
  await Plotly.relayout(chart, colors());
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => Plotly.relayout(chart, colors()));
  }
  const zoom = (factor) => {
    const [from, to] = chart.layout.xaxis.range.map(readAt);
    const middle = (from + to) / 2, half = ((to - from) / 2) * factor;
    const range = [Math.max(readAt(whole[0]), middle - half), Math.min(readAt(whole[1]), middle + half)];
    Plotly.relayout(chart, { "xaxis.range": range.map(shownAt) });
  };
  byId("zoom-in").addEventListener("click", () => zoom(0.5));
  byId("zoom-out").addEventListener("click", () => zoom(2));
  byId("zoom-all").addEventListener("click", () => Plotly.relayout(chart, { "xaxis.range": whole.slice() }));
}

function place(at) {
  const full = byId("chart")._fullLayout, cursor = byId("cursor");
  if (!full) return;
  const x = full.xaxis.d2p(shownAt(at)), inside = x >= 0 && x <= full.xaxis._length;
  cursor.style.display = inside ? "block" : "none";
  cursor.style.left = `${full.xaxis._offset + x}px`;
  cursor.style.top = `${full._size.t}px`;
  cursor.style.height = `${full._size.h}px`;
}

// --- the slider: the state of the fleet at each event that changed it

const EVERY = 64; // the full state is kept for every 64th frame, so that a step back is as fast as one forward

class Past {
  constructor(frames) {
    this.frames = frames;
    this.kept = [];
    const state = new Map();
    frames.forEach((frame, n) => {
      this.apply(state, frame);
      if (n % EVERY === 0) this.kept.push(new Map(state));
    });
  }

  apply(state, frame) {
    for (const [worker, shown] of Object.entries(frame.workers)) {
      if (shown === null) state.delete(worker);
      else state.set(worker, shown);
    }
  }

  at(number) {
    const state = new Map(this.kept[Math.floor(number / EVERY)]);
    for (let n = Math.floor(number / EVERY) * EVERY + 1; n <= number; n += 1) this.apply(state, this.frames[n]);
    return state;
  }
}

function slider(data) {
  const past = new Past(data.frames), time = byId("time"), body = byId("state").tBodies[0];
  const rows = new Map(data.lanes.map((worker) => {
    const row = body.insertRow();
    row.append(element("th", worker, { scope: "row" }), ...["td", "td", "td", "td"].map((name) => element(name, "")));
    return [worker, row];
  }));
  const show = () => {
    const number = Number(time.value), frame = data.frames[number], state = past.at(number);
    for (const [worker, row] of rows) {
      const shown = state.get(worker);
      const said = shown ? [shown.health, String(Number(shown.weight.toFixed(3))), shown.breaker, shown.reason]
        : ["absent", "", "", ""];
      said.forEach((text, n) => { if (row.cells[n + 1].textContent !== text) row.cells[n + 1].textContent = text; });
      row.cells[1].querySelector(".state")?.remove();
      const mark = element("span", "", { className: "state" });
      mark.style.background = shown ? data.colors[shown.state] : "transparent";
      row.cells[1].prepend(mark);
    }
    const elsewhere = [...state].filter(([worker]) => !rows.has(worker)).length;
    const levels = Object.entries(frame.levels).filter(([, level]) => level > 0);
    byId("others").textContent = `${elsewhere} more workers unaffected; ${(100 * frame.capacity).toFixed(0)} % of the fleet serves` +
      levels.map(([model, level]) => `; ${model} at degradation level ${level}`).join("");
    const said = `${clock(frame.at)} UTC, event ${frame.seq}`;
    byId("moment").textContent = said;
    time.setAttribute("aria-valuetext", said);
    place(frame.at);
  };
  const step = (by) => { time.value = String(Number(time.value) + by); show(); };
  time.max = String(data.frames.length - 1);
  time.value = String(data.first);
  time.addEventListener("input", show);
  byId("back").addEventListener("click", () => step(-1));
  byId("on").addEventListener("click", () => step(1));
  const chart = byId("chart");
  chart.on("plotly_relayout", () => place(data.frames[Number(time.value)].at));
  chart.on("plotly_click", (clicked) => {
    const at = readAt(clicked.points[0].x);
    const later = data.frames.findIndex((frame) => new Date(frame.at).getTime() > at);
    time.value = String(later < 0 ? data.frames.length - 1 : Math.max(0, later - 1));
    show();
  });
  show();
}

// --- the list

function list(events) {
  const body = byId("list").tBodies[0], filter = byId("filter"), routine = byId("routine");
  for (const event of events) event.found = JSON.stringify([event.kind, event.text, event.name, event.body]).toLowerCase();
  let matching = [];
  const show = (named = 0) => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    matching = events.filter((event) => (event.seq === named || routine.checked || !event.routine || words.length) &&
      words.every((word) => event.found.includes(word)));
    const at = named ? Math.max(0, matching.findIndex((event) => event.seq === named) - 20) : 0;
    body.replaceChildren(...matching.slice(at, at + SHOWN_MAX).map((event) => row(event, named)));
    const some = matching.length > SHOWN_MAX ? `, ${SHOWN_MAX} of them shown` : "";
    byId("shown").textContent = `${matching.length} of ${events.length} events${some}`;
  };
  let late = 0;
  filter.addEventListener("input", () => { clearTimeout(late); late = setTimeout(show, 120); });
  routine.addEventListener("change", () => show());
  byId("download").addEventListener("click", () => {
    const told = matching.map(({ found, ...event }) => JSON.stringify(event)).join("\n");
    const link = element("a", "", { download: "events.jsonl", href: URL.createObjectURL(new Blob([told + "\n"])) });
    link.click();
    URL.revokeObjectURL(link.href);
  });
  document.addEventListener("click", (clicked) => {
    const seq = Number(clicked.target.dataset?.seq);
    if (!seq) return;
    clicked.preventDefault();
    filter.value = "";
    show(seq);
    byId(`event-${seq}`)?.scrollIntoView({ block: "center" });
  });
  show();
}

function row(event, named) {
  const made = document.createElement("tr"), what = document.createElement("td"), more = document.createElement("details");
  made.id = `event-${event.seq}`;
  if (event.seq === named) made.className = "named";
  more.append(element("summary", event.text));
  more.addEventListener("toggle", () => {
    if (more.open && more.children.length === 1) {
      const { found, ...told } = event;
      more.append(element("pre", JSON.stringify(told, null, 1)));
    }
  });
  what.append(more);
  made.append(element("th", String(event.seq), { scope: "row" }), element("td", clock(event.at)),
    element("td", event.kind), what);
  return made;
}

unpacked().then(async (data) => {
  list(data.events);
  await draw(data.figure);
  slider(data);
  document.documentElement.dataset.ready = "yes";
});
