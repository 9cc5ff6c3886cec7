// Compare: runs as a table with the keys in which they differ, their curves over one another, their samples side by side.

import { get } from '../api.js';
import { chart, smoothed } from '../chart.js';
import { fill, h } from '../dom.js';
import { bytes, duration, number } from '../format.js';
import { t } from '../text.js';
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
  const loss = chart(t('compare.loss'));
  const validation = chart(t('compare.validation'));
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
      if (!body.contains(loss.element)) fill(body, h('div', { class: 'scroll table', tabindex: 0, role: 'region', 'aria-label': t('compare.table') }), h('div', { class: 'charts pair' }, loss.element, validation.element), h('div', { class: 'samples' }));
      fill(body.querySelector('.table'), table(runs, keys, labels));
      loss.set(metrics.map((list, index) => curve(list.filter((row) => row.kind !== 'eval'), labels[index], index, true)));
      validation.set(metrics.map((list, index) => ({ ...curve(list.filter((row) => row.kind === 'eval'), labels[index], index, false), dots: true })));
      fill(body.querySelector('.samples'), sideBySide(samples, labels));
      if (runs.some((run) => run.state === 'running')) timer = setTimeout(draw, SECONDS * 1000);
    } catch (error) {
      if (!over) fill(body, problems(error));
    }
  }

  list();
  draw();
  return () => {
    over = true;
    clearTimeout(timer);
    loss.close();
    validation.close();
  };
}

function curve(rows, label, colour, smooth) {
  const x = rows.map((row) => row.step);
  const y = rows.map((row) => row.loss ?? null);
  return { label, colour, x, y: smooth ? smoothed(y, x[x.length - 1] ?? 0) : y };
}

function table(runs, keys, labels) {
  const figures = Object.keys(FIGURES).filter((key) => runs.some((run) => typeof run.figures[key] === 'number'));
  return h('table', {},
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, t('compare.key')), runs.map((run, index) => h('th', { scope: 'col' },
      h('span', { class: `swatch curve-${index}` }), h('a', { href: `#/runs/${run.id}` }, labels[index]))))),
    h('tbody', {},
      figures.map((key) => row(t(`compare.${key}`), runs.map((run) => FIGURES[key](run.figures[key])), best(key, runs))),
      h('tr', { class: 'divider' }, h('th', { scope: 'colgroup', colspan: runs.length + 1 }, keys.length ? t('compare.keys') : t('compare.same'))),
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

function written(value) {
  if (value === null || value === undefined) return '–';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

// The newest sample of each run, by prompt.
function sideBySide(samples, labels) {
  const newest = samples.map((rows) => new Map(rows.map((row) => [row.prompt, row])));
  const prompts = [...new Set(newest.flatMap((one) => [...one.keys()]))];
  if (!prompts.length) return null;
  return [h('h2', {}, t('compare.samples')), h('div', { class: 'list' }, prompts.map((prompt) => h('section', { class: 'card' }, h('p', { class: 'quiet answer' }, prompt),
    h('div', { class: 'answers' }, newest.map((one, index) => h('div', {}, h('div', { class: 'who' }, h('span', {}, h('span', { class: `swatch curve-${index}` }), labels[index]),
      one.get(prompt) && t('runs.after', { step: number(one.get(prompt).step) })), h('p', { class: 'answer' }, one.get(prompt)?.text ?? '–')))))))];
}
