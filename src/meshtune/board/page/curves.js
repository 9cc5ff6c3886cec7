// The curves of a run, from the rows of its metrics.jsonl: loss and validation first, then every other figure.

import { chart, smoothed, spanOf } from './chart.js';
import { fill, h } from './dom.js';
import { number } from './format.js';
import { has, t } from './text.js';

const PLAIN = ['kind', 'step', 'epoch', 'loss', 'tokens', 'learned_tokens', 'seconds', 'rollout_seconds', 'machine', 'best'];
const FIRST = ['learning_rate', 'grad_norm', 'tokens_per_second', 'memory'];
const EXACT = ['learning_rate', 'memory']; // are drawn as they are
const PER_DEVICE = /^device(\d+)_(\w+)$/;
const SETTINGS = 'charts';
const PLACES = ['updates', 'tokens', 'time'];
const MOST_SPAN = 200;
const TIMES = [[1, 'seconds'], [60, 'minutes'], [3600, 'hours']];

// What a metric is called: a text of the page, or its own name.
export function metricName(key) {
  const [, name, figure] = /^rewards\/(.+)\/(mean|std)$/.exec(key) ?? [];
  if (name) return t(figure === 'mean' ? 'metric.reward_mean' : 'metric.reward_spread', { name });
  return has(`metric.${key}`) ? t(`metric.${key}`) : key;
}

// What a loss is averaged over, from a row of it: tokens, pairs, or answers, as objectives.stages has it.
export function lossUnit(row) {
  const keys = Object.keys(row ?? {});
  if (keys.includes('reward')) return t('chart.ofpolicy');
  if (keys.includes('kl')) return t('chart.peranswer');
  return keys.some((key) => key.startsWith('rewards/')) ? t('chart.perpair') : t('chart.pertoken');
}

// How charts are drawn: {element, place, span(total), logarithmic}. `changed` is called when a person chooses otherwise; the browser keeps it.
export function chartSettings(changed) {
  const known = { place: 'updates', logarithmic: false, span: null, ...JSON.parse(localStorage.getItem(SETTINGS) ?? '{}') };
  const place = h('select', { id: 'chart-x', onchange: () => keep({ place: place.value }) },
    PLACES.map((name) => h('option', { value: name, selected: name === known.place }, t(`chart.${name}`))));
  const logarithmic = h('input', { type: 'checkbox', id: 'chart-log', checked: known.logarithmic, onchange: () => keep({ logarithmic: logarithmic.checked }) });
  const span = h('input', { type: 'range', id: 'chart-span', min: 0, max: MOST_SPAN, value: known.span ?? 0, oninput: () => keep({ span: Number(span.value) || null }) });
  const said = h('output', { for: 'chart-span' });
  const say = () => fill(said, known.span ? t('chart.span', { n: known.span, count: number(known.span) }) : t('chart.auto'));
  const element = h('div', { class: 'row chart-settings' }, h('label', { for: 'chart-x' }, t('chart.over'), ' ', place),
    h('label', { for: 'chart-span' }, t('chart.smoothing'), ' ', span), said, h('label', { for: 'chart-log' }, logarithmic, ' ', t('chart.logarithmic')));

  function keep(change) {
    Object.assign(known, change);
    localStorage.setItem(SETTINGS, JSON.stringify(known));
    say();
    changed();
  }

  say();
  return { element, get place() { return known.place; }, get logarithmic() { return known.logarithmic; }, span: (total) => known.span ?? spanOf(total) };
}

// Where rows stand: update, tokens and seconds so far. A row of every n-th update counts for those before it.
export function placed(rows) {
  let [step, tokens, time] = [0, 0, 0];
  return rows.map((row) => {
    const updates = row.kind === 'eval' ? 1 : Math.max(1, row.step - step);
    if (row.kind !== 'eval') step = row.step;
    tokens += (Number.isFinite(row.tokens) ? row.tokens : 0) * updates;
    time += (Number.isFinite(row.seconds) ? row.seconds : 0) * updates;
    return { updates: row.step, tokens, time };
  });
}

// The axis of a place for values up to `most`: its title, what they are divided by, and whether they are whole.
export function axisFor(place, most) {
  if (place === 'updates') return { title: t('chart.x.updates'), size: 1, whole: true };
  if (place === 'tokens') return most < 2e6 ? { title: t('chart.x.tokens'), size: 1, whole: true } : { title: t('chart.x.millions'), size: 1e6 };
  const [size, unit] = TIMES.findLast(([one]) => most >= 3 * one) ?? TIMES[0];
  return { title: t(`chart.x.${unit}`), size };
}

// Follows one run: `add({rows, reset})` takes new rows, `element` shows them.
export function curves(total = () => 0) {
  const grid = h('div', { class: 'charts' });
  const settings = chartSettings(() => draw());
  settings.element.hidden = true;
  const element = h('div', {}, settings.element, grid);
  let rows = [];
  let columns = new Map();
  let charts = new Map();

  function add({ rows: news, reset }) {
    if (reset) {
      rows = [];
      for (const one of charts.values()) one.close();
      charts = new Map();
      fill(grid);
    }
    const last = { train: 0, eval: 0 };
    for (const row of rows) last[row.kind === 'eval' ? 'eval' : 'train'] = row.step;
    for (const row of news) {
      const kind = row.kind === 'eval' ? 'eval' : 'train';
      if (!Number.isFinite(row.step) || row.step <= last[kind]) continue; // damaged, or a row that came twice
      last[kind] = row.step;
      rows.push(row);
    }
    settings.element.hidden = !rows.length;
    draw();
  }

  function take(row, x) {
    const group = row.kind === 'eval' ? 'eval' : 'train';
    push(`${group}.loss`, x, Number.isFinite(row.loss) ? row.loss : null);
    for (const [key, value] of Object.entries(row)) {
      if (!PLAIN.includes(key) && (typeof value === 'number' || value === null)) push(`${group}.${key}`, x, value);
    }
    for (const [key, value] of Object.entries(row.machine ?? {})) push(`machine.${key}`, x, value);
  }

  function push(key, x, value) {
    let column = columns.get(key);
    if (!column) columns.set(key, column = { x: [], y: [] });
    column.x.push(x);
    column.y.push(value ?? null);
  }

  let axis = null;
  function draw() {
    if (!rows.length) return;
    columns = new Map();
    const places = placed(rows).map((one) => one[settings.place]);
    axis = axisFor(settings.place, places[places.length - 1]);
    rows.forEach((row, index) => take(row, places[index] / axis.size));
    const names = [...new Set([...columns.keys()].filter((key) => !key.startsWith('machine.') && !key.endsWith('.loss'))
      .map((key) => key.slice(key.indexOf('.') + 1)))];
    names.sort((one, two) => rank(one) - rank(two));
    drawOne('loss', { unit: lossUnit(rows.find((row) => row.kind !== 'eval')) });
    for (const key of names) drawOne(key, { inBytes: key === 'memory' });
    const figures = new Set([...columns.keys()].filter((key) => key.startsWith('machine.'))
      .map((key) => key.slice('machine.'.length).replace(PER_DEVICE, '$2')));
    for (const figure of figures) drawDevices(figure);
  }

  function rank(key) {
    const place = FIRST.indexOf(key);
    return place < 0 ? -1 : place;
  }

  function drawOne(key, options) {
    const series = [];
    const [train, validation] = [columns.get(`train.${key}`), columns.get(`eval.${key}`)];
    const span = settings.span(Math.max(total(), rows[rows.length - 1].step));
    if (train && (EXACT.includes(key) || span <= 1)) series.push({ label: validation ? t('chart.training') : '', ...train, colour: 0 });
    else if (train) {
      series.push({ label: t('chart.raw'), ...train, colour: 0, faint: true });
      series.push({ label: t('chart.smoothed'), x: train.x, y: smoothed(train.y, span), colour: 0 });
    }
    if (validation) series.push({ label: t('chart.validation'), ...validation, colour: 1, dots: true });
    at(key, metricName(key), options).set(series, axis, settings.logarithmic);
  }

  function drawDevices(figure) {
    const series = [];
    for (const [key, column] of columns) {
      const match = key.startsWith('machine.') && key.slice('machine.'.length).match(PER_DEVICE);
      if (match ? match[2] === figure : key === `machine.${figure}`) {
        series.push({ label: match ? t('chart.device', { device: match[1] }) : '', ...column, colour: Number(match ? match[1] : 0) % 6 });
      }
    }
    at(`machine.${figure}`, metricName(`device_${figure}`), { inBytes: figure.endsWith('memory') }).set(series, axis, settings.logarithmic);
  }

  function at(key, title, options) {
    let one = charts.get(key);
    if (!one) {
      charts.set(key, one = chart(title, options));
      grid.append(one.element);
    }
    return one;
  }

  return { element, add, close: () => charts.forEach((one) => one.close()) };
}
