// Jobs of some kinds with what they have written: answers, figures, the report, files to download.

import { follow, get } from './api.js';
import { fill, h } from './dom.js';
import { bytes, duration, moment, number } from './format.js';
import { t } from './text.js';
import { problems } from './widgets.js';

const ENDED = ['finished', 'stopped', 'failed', 'lost'];

// A list of the jobs of `kinds`, newest first. `open` is the id of one that is shown unfolded.
export function jobResults(kinds) {
  const list = h('div', { class: 'list' });
  const element = h('section', {}, h('h2', {}, t('results.title')), list);
  const cards = new Map();
  let opened = null;

  function draw({ jobs }) {
    const shown = jobs.filter((job) => kinds.includes(job.kind));
    for (const job of shown) {
      if (!cards.has(job.id)) cards.set(job.id, card(job.id));
      cards.get(job.id).set(job);
    }
    const elements = shown.map((job) => cards.get(job.id).element);
    if (elements.length !== list.children.length || elements.some((one, index) => list.children[index] !== one)) {
      fill(list, elements.length ? elements : h('p', { class: 'empty' }, t('results.none')));
    }
    if (opened && cards.has(opened)) {
      cards.get(opened).element.open = true;
      opened = null;
    }
  }

  const close = follow(null, { jobs: draw });
  return { element, close, open: (id) => { opened = id; } };
}

function card(id) {
  const head = h('summary', { class: 'result' });
  const body = h('div');
  const element = h('details', { class: 'card' }, head, body);
  let state = null;
  element.addEventListener('toggle', load);

  async function load() {
    if (!element.open) return;
    const job = await get(`api/jobs/${id}`).catch(() => null);
    const written = job?.output ? await get(`api/results/${id}`).catch((error) => ({ error })) : null;
    fill(body, job && h('p', { class: 'quiet' }, h('a', { href: `#/runs/${id}` }, t('results.log')), ' ', job.command),
      job?.reason && h('pre', { class: 'problems' }, job.reason),
      written?.error ? problems(written.error) : written && shown(id, written));
  }

  return {
    element,
    set(job) {
      if (job.state === state) return;
      const first = state === null;
      state = job.state;
      fill(head, h('span', { class: 'name' }, job.name), h('span', { class: `state ${job.state}` }, t(`state.${job.state}`)),
        h('span', { class: 'quiet' }, t(`results.${job.kind}`)), h('span', { class: 'quiet' }, moment(job.created)),
        h('span', { class: 'quiet' }, ENDED.includes(job.state) ? duration(job.exit?.seconds) : ''));
      if (!first) load();
    },
  };
}

function shown(id, { report, totals, rows, files, folder }) {
  const figures = Object.entries(totals).filter(([, value]) => typeof value === 'number');
  return [
    figures.length > 0 && h('dl', { class: 'figures-list' }, figures.map(([key, value]) => h('div', {}, h('dt', {}, key), h('dd', {}, number(value))))),
    report && h('iframe', { class: 'report', sandbox: '', src: `api/results/${id}/report`, title: t('results.report') }),
    rows.length > 0 && h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': t('results.answers') }, h('table', {},
      h('thead', {}, h('tr', {}, ['prompt', 'reference', 'answer'].map((key) => h('th', { scope: 'col' }, t(`results.${key}`))))),
      h('tbody', {}, rows.map((row) => h('tr', {}, ['prompt', 'reference', 'answer'].map((key) => h('td', { class: 'answer' }, said(row[key])))))))),
    files.length > 0 && h('details', { open: !rows.length && !report }, h('summary', {}, t('results.files', { n: files.length, folder })),
      h('ul', { class: 'files' }, files.map((file) => h('li', {},
        h('a', { href: `api/results/${id}/files/${file.path.split('/').map(encodeURIComponent).join('/')}`, download: file.path.split('/').pop() }, file.path), ' ',
        h('span', { class: 'quiet' }, bytes(file.bytes)))))),
  ];
}

function said(value) {
  return typeof value === 'string' ? value : JSON.stringify(value ?? null);
}
