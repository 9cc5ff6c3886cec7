// The curves of a run, from the rows of its metrics.jsonl: loss and validation first, then every other figure.

import { chart, smoothed } from './chart.js';
import { fill, h } from './dom.js';
import { bytes, number } from './format.js';
import { has, t } from './text.js';

const PLAIN = ['kind', 'step', 'epoch', 'loss', 'tokens', 'learned_tokens', 'seconds', 'machine', 'best'];
const FIRST = ['learning_rate', 'grad_norm', 'tokens_per_second', 'memory'];
const PER_DEVICE = /^device(\d+)_(\w+)$/;

// What a metric is called: a text of the page, or its own name.
export function metricName(key) {
  return has(`metric.${key}`) ? t(`metric.${key}`) : key;
}

// Follows one run: `add({rows, reset})` takes new rows, `element` shows them.
export function curves(total = () => 0) {
  const element = h('div', { class: 'charts' });
  let columns = new Map();
  let charts = new Map();

  function add({ rows, reset }) {
    if (reset) {
      columns = new Map();
      for (const one of charts.values()) one.close();
      charts = new Map();
      fill(element);
    }
    for (const row of rows) take(row);
    draw();
  }

  function take(row) {
    const group = row.kind === 'eval' ? 'eval' : 'train';
    push(`${group}.loss`, row.step, row.loss);
    for (const [key, value] of Object.entries(row)) {
      if (!PLAIN.includes(key) && (typeof value === 'number' || value === null)) push(`${group}.${key}`, row.step, value);
    }
    for (const [key, value] of Object.entries(row.machine ?? {})) push(`machine.${key}`, row.step, value);
  }

  function push(key, step, value) {
    let column = columns.get(key);
    if (!column) columns.set(key, column = { x: [], y: [] });
    const last = column.x.length - 1;
    if (last >= 0 && column.x[last] >= step) return; // a row that came twice
    column.x.push(step);
    column.y.push(value ?? null);
  }

  function draw() {
    const names = [...new Set([...columns.keys()].filter((key) => !key.startsWith('machine.') && !key.endsWith('.loss'))
      .map((key) => key.slice(key.indexOf('.') + 1)))];
    names.sort((one, two) => rank(one) - rank(two));
    drawLoss();
    for (const key of names) drawOne(key);
    const figures = new Set([...columns.keys()].filter((key) => key.startsWith('machine.'))
      .map((key) => key.slice('machine.'.length).replace(PER_DEVICE, '$2')));
    for (const figure of figures) drawDevices(figure);
  }

  function rank(key) {
    const place = FIRST.indexOf(key);
    return place < 0 ? -1 : place;
  }

  function drawLoss() {
    const train = columns.get('train.loss');
    const validation = columns.get('eval.loss');
    const series = [];
    if (train) {
      series.push({ label: t('chart.raw'), x: train.x, y: train.y, colour: 0, faint: true });
      const mean = smoothed(train.y, Math.max(total(), train.x[train.x.length - 1]));
      series.push({ label: t('chart.training'), x: train.x, y: mean, colour: 0 });
    }
    if (validation) series.push({ label: t('chart.validation'), ...validation, colour: 1, dots: true });
    if (series.length) at('loss', metricName('loss'), {}).set(series);
  }

  function drawOne(key) {
    const series = [];
    const [train, validation] = [columns.get(`train.${key}`), columns.get(`eval.${key}`)];
    if (train) series.push({ label: validation ? t('chart.training') : '', ...train, colour: 0 });
    if (validation) series.push({ label: t('chart.validation'), ...validation, colour: 1, dots: true });
    const write = key === 'memory' ? bytes : number;
    at(key, metricName(key), { write }).set(series);
  }

  function drawDevices(figure) {
    const series = [];
    for (const [key, column] of columns) {
      const match = key.startsWith('machine.') && key.slice('machine.'.length).match(PER_DEVICE);
      if (match ? match[2] === figure : key === `machine.${figure}`) {
        series.push({ label: match ? t('chart.device', { device: match[1] }) : '', ...column, colour: Number(match ? match[1] : 0) % 6 });
      }
    }
    at(`machine.${figure}`, metricName(`device_${figure}`), { write: figure.endsWith('memory') ? bytes : number }).set(series);
  }

  function at(key, title, options) {
    let one = charts.get(key);
    if (!one) {
      charts.set(key, one = chart(title, options));
      element.append(one.element);
    }
    return one;
  }

  return { element, add, close: () => charts.forEach((one) => one.close()) };
}
