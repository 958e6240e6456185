"use strict";
// Everything from rows becomes a text node: no string is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const { figures, timeline } = data, PAGE = 50, LEVELS = [-0.11, -0.7, -1.6, -3];
const at = (id) => document.getElementById(id);
const count = (number) => Number(number).toLocaleString("en");
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "-");
const sum = (values) => values.reduce((total, value) => total + value, 0);

function make(name, properties, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children.filter(Boolean));
  return element;
}

function table(target, names, rows) {
  const cells = (row) => row.map((cell) => typeof cell === "number" ? make("td", { className: "number" }, count(cell)) : make("td", {}, cell));
  target.append(make("table", {}, names && make("tr", {}, ...names.map((name) => make("th", {}, name))),
    ...rows.map((row) => make("tr", {}, ...cells(row)))));
  target.hidden = false;
}

// A point for each sample of the timeline, with the time between runs left out.
const points = [];
let gap = 0, end = timeline.length && timeline[0].began;
timeline.forEach((run, number) => {
  gap += Math.max(0, run.began - end);
  end = Math.max(end, run.began + run.end);
  const first = run.began - timeline[0].began - gap;
  run.output_tokens.forEach((tokens, index) => {
    const start = index * run.seconds, length = Math.min(run.seconds, run.end - start), of = (name) => run[name][index] / length;
    points.push({ run: number, seconds: first + start + length / 2, generated: tokens / length, prompt: of("prompt_tokens"),
      running: of("running_seconds"), kv: of("kv_use_seconds") });
  });
});
const peak = (name) => points.reduce((most, point) => Math.max(most, point[name]), 0);

function tiles() {
  const seconds = points.length && end - timeline[0].began - gap, generated = sum(timeline.flatMap((run) => run.output_tokens));
  const shared = figures.prompt_tokens - figures.distinct_prompt_tokens;
  const { met = 0, failed = 0 } = figures.constraints;
  for (const [name, value, more] of [
    ["rows", count(figures.rows), `${count(data.samples)} samples`],
    ["failed rows", count(figures.rows_error), share(figures.rows_error, figures.rows)],
    ["prompt tokens", count(figures.prompt_tokens), `${count(figures.distinct_prompt_tokens)} distinct`],
    ["shared in the prefix tree", share(shared, figures.prompt_tokens), `${count(shared)} tokens not computed`],
    ["output tokens", count(figures.completion_tokens), figures.copied_tokens && `${count(figures.copied_tokens)} copied`],
    points.length && ["generated tokens/s", count(Math.round(generated / seconds)), `in ${seconds.toFixed(1)} s`],
    points.length && ["most samples in the batch", count(Math.round(peak("running"))), `KV pages ${share(peak("kv"), 1)}`],
    met + failed && ["constraints met", share(met, met + failed), `${count(failed)} failed`],
  ].filter(Boolean)) at("tiles").append(make("div", {}, make("span", {}, name), make("b", {}, value), more && make("span", {}, more)));
}

function charts() {
  const number = (field, title = null, more = {}) => ({ field, title, type: "quantitative", ...more });
  const chart = (values, type, encoding, height = 150) => ({ data: { values }, height, mark: { type, tooltip: true }, encoding });
  const line = (names, format) => chart(names.flatMap((kind) => points.map((point) => ({ ...point, kind, value: point[kind] }))), "line",
    { x: number("seconds", "seconds"), y: number("value", null, { axis: { format } }), detail: { field: "run" },
      ...(names.length > 1 && { color: { field: "kind", legend: { title: null, orient: "top" } } }) });
  const lengths = (name) => chart(data.lengths[name].map(([first, last, samples]) => ({ first, last, samples })), "bar",
    { x: number("first", "tokens", { bin: { binned: true } }), x2: { field: "last" }, y: number("samples", "samples") });
  const bars = (counts, title) => chart(Object.entries(counts).map(([name, value]) => ({ name, value })), "bar",
    { x: number("value", title), y: { field: "name", sort: "-x", title: null } }, 26 * Object.keys(counts).length);
  const style = getComputedStyle(document.documentElement);
  const [accent, dim, rule] = ["--accent", "--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
  const config = { background: "transparent", font: "system-ui, sans-serif", view: { stroke: null }, legend: { labelColor: dim },
    axis: { labelColor: dim, titleColor: dim, gridColor: rule, domainColor: rule, tickColor: rule, titleFontWeight: "normal", tickCount: 4 },
    bar: { color: accent }, line: { color: accent }, range: { category: [accent, "#d98324"] } };
  const options = { actions: false, ast: true, renderer: "canvas", defaultStyle: false, tooltip: { disableDefaultStyle: true } };
  at("charts").replaceChildren(...[
    points.length && ["Throughput, tokens/s", line(["generated", "prompt"], "~s")],
    points.length && ["Samples in the batch", line(["running"], "~s")],
    points.length && ["Share of the KV pages in use", line(["kv"], "%")],
    ["Prompt lengths", lengths("prompt_tokens")],
    ["Answer lengths", lengths("completion_tokens")],
    ["Finish reasons and errors", bars({ ...figures.finish_reasons, ...figures.errors }, "samples")],
    ["Prompt tokens", bars({ distinct: figures.distinct_prompt_tokens, shared: figures.prompt_tokens - figures.distinct_prompt_tokens }, "tokens")],
  ].filter(Boolean).map(([caption, spec]) => {
    const box = make("div");
    vegaEmbed(box, { width: "container", autosize: { type: "fit-x", contains: "padding" }, ...spec, config }, options)
      .then(({ view }) => view.addEventListener("click", (_, item) => item?.datum?.name && filter(item.datum.name)));
    return make("figure", {}, make("figcaption", {}, caption), box);
  }));
}

function filter(tag) {
  if (![...at("tag").options].some((option) => option.value === tag)) return;
  at("tag").value = tag;
  at("search").value = "";
  browse();
  at("controls").scrollIntoView();
}

function tables() {
  const link = (text, onclick) => make("button", { className: "link", type: "button", onclick }, text);
  const codes = Object.entries(figures.errors).sort((a, b) => b[1] - a[1]);
  if (codes.length) table(at("errors"), ["error", "samples", "example"], codes.map(([code, number]) => {
    const example = data.rows.find((row) => row.tags.includes(code));
    return [link(code, () => filter(code)), number, example && `row ${example.row[0]}: ${example.text}`];
  }));
  const slow = timeline.flatMap((run) => run.slowest).sort((a, b) => b[1] - a[1]).slice(0, 12);
  const show = (index) => () => {
    list(data.rows.filter((row) => row.row[0] === index));
    at("controls").scrollIntoView();
  };
  if (slow.length) table(at("slow"), ["row", "seconds from its start to its end"], slow.map(([row, took]) => [link(`row ${row}`, show(row)), took]));
}

const likely = (row) => (row.tokens ? sum(row.tokens.map((token) => token[1])) / row.tokens.length : 1);
const ORDERS = {
  "input order": () => 0,
  "longest answer first": (a, b) => b.length[2] - a.length[2],
  "longest prompt first": (a, b) => b.length[0] - a.length[0],
  "least likely first": (a, b) => likely(a) - likely(b),
};
let shown = [];

function browse() {
  const text = at("search").value.toLowerCase(), tag = at("tag").value;
  const words = (row) => row.words ??= [row.id, row.text, row.thoughts, row.calls, row.extra, ...(row.prompt || []).flat()].join("\n").toLowerCase();
  list(data.rows.filter((row) => (!tag || row.tags.includes(tag)) && (!text || words(row).includes(text))).sort(ORDERS[at("order").value]));
}

function list(rows) {
  shown = rows;
  const all = data.rows.length < data.samples ? `, a sample of all ${count(data.samples)}` : "";
  at("count").textContent = `${count(shown.length)} of the ${count(data.rows.length)} samples on this page${all}`;
  at("rows").replaceChildren();
  more();
}

function more() {
  const there = at("rows").childElementCount;
  at("rows").append(...shown.slice(there, there + PAGE).map(entry));
  at("more").hidden = shown.length <= there + PAGE;
}

function entry(row) {
  const [index, prompt, sample] = row.row, failed = row.tags.includes("error") ? " bad" : "";
  const details = make("details", {}, make("summary", {}, make("small", {}, prompt || sample ? row.row.join(".") : `${index}`),
    make("span", { className: `text${failed}`, dir: "auto" }, (row.text || row.calls || "").slice(0, 200)),
    make("span", { className: "tag" }, row.tags[1] || row.tags[0])));
  details.addEventListener("toggle", () => details.open && details.append(...contents(row, failed)), { once: true });
  return details;
}

function contents(row, failed) {
  const pre = (text) => make("pre", { dir: "auto" }, text);
  const block = (kind, title, content) => make("div", { className: `block ${kind}` }, make("small", {}, title), content);
  const text = (kind, title, content) => content && block(kind, title, pre(content));
  const token = ([piece, logprob]) => make("span", { className: `l${LEVELS.filter((level) => logprob < level).length}`,
    title: `logprob ${logprob}, probability ${Math.exp(logprob).toPrecision(2)}` }, piece);
  const [prompt, shared, generated] = row.length;
  const facts = [`${count(prompt)} prompt tokens, ${count(shared)} of them shared`, `${count(generated)} generated`,
    row.stop && `stopped by ${row.stop}`, row.seconds && `${row.seconds} s`].filter(Boolean).join(", ");
  const picture = (number) => make("img", { src: data.pictures[number], alt: "picture of the prompt" });
  const answer = at("coloured").checked && row.tokens
    ? [block("answer", "generated tokens", make("pre", {}, ...row.tokens.map(token)))]
    : [text("thoughts", "thoughts", row.thoughts), text(`answer${failed}`, failed ? "error" : "answer", row.text)];
  return [
    make("div", {}, ...row.tags.map((tag) => make("span", { className: "tag" }, tag))),
    make("small", {}, make("bdi", {}, row.id), `: ${facts}`),
    ...(row.prompt || []).map(([role, content]) => text("", role || "prompt", content)),
    row.pictures && block("", "pictures", make("div", {}, ...row.pictures.map(picture))),
    ...answer, text("answer", "tool calls", row.calls), text("", "carried fields", row.extra),
  ].filter(Boolean);
}

const tags = new Map();
data.rows.forEach((row) => row.tags.forEach((tag) => tags.set(tag, (tags.get(tag) || 0) + 1)));
const option = (value, text = value) => make("option", { value }, text);
at("output").textContent = data.output + (data.complete ? "" : " (unfinished)");
at("notes").textContent = data.notes.join("\n");
at("tag").append(option("", "all"), ...[...tags].sort().map(([tag, number]) => option(tag, `${tag} (${number})`)));
at("order").append(...Object.keys(ORDERS).map((name) => option(name)));
at("coloured").parentElement.hidden = !data.rows.some((row) => row.tokens);
for (const id of ["tag", "order", "coloured"]) at(id).addEventListener("change", browse);
at("search").addEventListener("input", browse);
at("controls").addEventListener("submit", (event) => event.preventDefault());
at("more").addEventListener("click", more);
table(at("environment"), null, data.environment);
tiles();
tables();
browse();
charts();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts);
