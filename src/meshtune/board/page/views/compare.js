// Compare: runs as a table with the keys in which they differ, their curves over one another, their samples side by side.

import { get } from '../api.js';
import { chart, smoothed } from '../chart.js';
import { axisFor, chartSettings, lossUnit, placed } from '../curves.js';
import { fill, h } from '../dom.js';
import { bytes, duration, number } from '../format.js';
import { promptKey, promptView } from '../talk/pictures.js';
import { has, t } from '../text.js';
import { problems } from '../widgets.js';

export const name = 'compare';

const MOST = 6; // as many as there are colours
const FIGURES = {
  step: number, loss: number, first_validation: number, validation: number, best: number, trained_tokens: number,
  step_seconds: number, device_bytes: bytes, seconds: duration,
};
const SECONDS = 5;

export function show(place, path) {
  const chosen = new Set(path);
  const choices = h('fieldset', { class: 'card run-choices' });
  const body = h('div');
  const settings = chartSettings(() => plot());
  const charts = new Map(); // by kind of loss
  let drawn = null;
  let timer = null;
  let over = false;
  fill(place, h('h1', {}, t('compare.title')), choices, body);

  async function list() {
    const { jobs } = await get('api/jobs').catch(() => ({ jobs: [] }));
    const runs = jobs.filter((job) => job.kind === 'train');
    fill(choices, h('legend', {}, t('compare.choose')), runs.length ? runs.map((job) => h('label', { class: 'tick' },
      h('input', { type: 'checkbox', checked: chosen.has(job.id), onchange: (event) => pick(job.id, event.target) }),
      ' ', job.name, ' ', h('span', { class: 'quiet' }, `${job.id.split('-')[0]} · ${t(`state.${job.state}`)}`)))
      : h('p', { class: 'empty' }, t('runs.none')));
  }

  function pick(id, box) {
    if (box.checked && chosen.size >= MOST) box.checked = false;
    else if (box.checked) chosen.add(id);
    else chosen.delete(id);
    history.replaceState(null, '', `#/compare/${[...chosen].map(encodeURIComponent).join('/')}`);
    draw();
  }

  async function draw() {
    clearTimeout(timer);
    const ids = [...chosen];
    if (!ids.length) {
      fill(body, h('p', { class: 'empty' }, t('compare.none')));
      return;
    }
    try {
      const query = new URLSearchParams(ids.map((id) => ['job', id]));
      const [{ runs, keys }, ...rows] = await Promise.all([get(`api/compare?${query}`),
        ...ids.flatMap((id) => [get(`api/jobs/${id}/metrics`), get(`api/jobs/${id}/samples`)])]);
      if (over || ids.join() !== [...chosen].join()) return;
      const metrics = ids.map((_, index) => rows[2 * index].rows);
      const samples = ids.map((_, index) => rows[2 * index + 1].rows);
      const labels = runs.map((run) => `${run.name} (${Number(run.id.split('-')[0])})`);
      if (!body.querySelector('.table')) {
        fill(body, h('div', { class: 'scroll table', tabindex: 0, role: 'region', 'aria-label': t('compare.table') }), settings.element, h('div', { class: 'charts pair' }), h('div', { class: 'samples' }));
      }
      runs.forEach((run, index) => measure(run.figures, metrics[index]));
      fill(body.querySelector('.table'), table(runs, keys, labels));
      drawn = { metrics, labels, stages: keys.find(({ key }) => key === 'stage.kind')?.values };
      plot();
      fill(body.querySelector('.samples'), sideBySide(samples, labels));
      if (runs.some((run) => run.state === 'running')) timer = setTimeout(draw, SECONDS * 1000);
    } catch (error) {
      if (!over) fill(body, problems(error));
    }
  }

  // Losses of different stages are not of one size: each stage has charts of its own.
  function plot() {
    if (!drawn) return;
    const { metrics, labels, stages } = drawn;
    const places = metrics.map((rows) => placed(rows).map((one) => one[settings.place]));
    const axis = axisFor(settings.place, Math.max(0, ...places.map((one) => one[one.length - 1] ?? 0)));
    const elements = [];
    for (const stage of new Set(stages ?? [null])) {
      for (const kind of ['loss', 'validation']) {
        const series = [];
        metrics.forEach((rows, index) => {
          if (stages && stages[index] !== stage) return;
          const chosen = rows.map((row, at) => [row, places[index][at] / axis.size]).filter(([row]) => (row.kind === 'eval') === (kind === 'validation'));
          const [x, y] = [chosen.map(([, place]) => place), chosen.map(([row]) => row.loss ?? null)];
          const span = settings.span(chosen[chosen.length - 1]?.[0].step ?? 0);
          series.push({ label: labels[index], colour: index, x, y: kind === 'loss' ? smoothed(y, span) : y, dots: kind === 'validation', rows });
        });
        if (!series.some((one) => one.x.length)) continue;
        const key = `${kind} ${stage}`;
        const title = [t(`compare.${kind}`), stages && (has(`recipe.kind.${stage}`) ? t(`recipe.kind.${stage}`) : stage)].filter(Boolean).join(': ');
        if (!charts.has(key)) charts.set(key, chart(title, { unit: lossUnit(series.flatMap((one) => one.rows).find((row) => row.kind !== 'eval')) }));
        charts.get(key).set(series, axis, settings.logarithmic);
        elements.push(charts.get(key).element);
      }
    }
    const place = body.querySelector('.charts');
    if (elements.length !== place.children.length || elements.some((one, index) => place.children[index] !== one)) fill(place, elements);
  }

  list();
  draw();
  return () => {
    over = true;
    clearTimeout(timer);
    charts.forEach((one) => one.close());
  };
}

// What the log of a run says where its end has not: the middle of the seconds of its updates, and their sum.
function measure(figures, rows) {
  const seconds = rows.filter((row) => row.kind !== 'eval').map((row) => row.seconds).filter((one) => typeof one === 'number').sort((one, two) => one - two);
  if (!seconds.length) return;
  figures.step_seconds ??= seconds[Math.floor(seconds.length / 2)];
  figures.seconds ??= placed(rows)[rows.length - 1].time;
}

function table(runs, keys, labels) {
  const ofStages = keys.some(({ key }) => key === 'stage.kind'); // whose losses say nothing about one another
  const figures = Object.keys(FIGURES).filter((key) => runs.some((run) => typeof run.figures[key] === 'number'));
  return h('table', {},
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, t('compare.key')), runs.map((run, index) => h('th', { scope: 'col' },
      h('span', { class: `swatch curve-${index}` }), h('a', { href: `#/runs/${run.id}` }, labels[index]))))),
    h('tbody', {},
      figures.map((key) => row(t(`compare.${key}`), runs.map((run) => FIGURES[key](run.figures[key])), ofStages ? -1 : best(key, runs))),
      runs.length > 1 && h('tr', { class: 'divider' }, h('th', { scope: 'colgroup', colspan: runs.length + 1 }, keys.length ? t('compare.keys') : t('compare.same'))),
      keys.map(({ key, values }) => row(h('code', {}, key), values.map(written), -1))));
}

function row(label, values, strong) {
  return h('tr', {}, h('th', { scope: 'row' }, label), values.map((value, index) => h('td', { class: index === strong ? 'best' : null }, value)));
}

// The run with the lowest loss of a row of losses, where there are several.
function best(key, runs) {
  if (!['loss', 'validation', 'best'].includes(key) || runs.length < 2) return -1;
  const values = runs.map((run) => run.figures[key] ?? Infinity);
  return values.indexOf(Math.min(...values));
}

// A value without JSON's marks: parts of a list below one another.
function written(value) {
  if (value === null || value === undefined) return '–';
  if (Array.isArray(value)) return value.map((part) => h('div', {}, written(part)));
  if (typeof value === 'object') return Object.entries(value).map(([key, inner]) => `${key}: ${typeof inner === 'object' ? JSON.stringify(inner) : inner}`).join(', ');
  return typeof value === 'number' ? number(value, 6) : String(value);
}

// The newest sample of each run, by prompt.
function sideBySide(samples, labels) {
  const newest = samples.map((rows) => new Map(rows.map((row) => [promptKey(row), row])));
  const prompts = [...new Set(newest.flatMap((one) => [...one.keys()]))];
  if (!prompts.length) return null;
  return [h('h2', {}, t('compare.samples')), h('div', { class: 'list' }, prompts.map((prompt) => h('section', { class: 'card' }, promptView(newest.find((one) => one.has(prompt)).get(prompt)),
    h('div', { class: 'answers' }, newest.map((one, index) => h('div', {}, h('div', { class: 'who' }, h('span', {}, h('span', { class: `swatch curve-${index}` }), labels[index]),
      one.get(prompt) && t('runs.after', { step: number(one.get(prompt).step) })), h('p', { class: 'answer' }, one.get(prompt)?.text ?? '–')))))))];
}
