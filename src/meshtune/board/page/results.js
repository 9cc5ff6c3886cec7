// Jobs of some kinds with what they have written: answers, figures, the report, files to download.

import { follow, get } from './api.js';
import { fill, h } from './dom.js';
import { bytes, duration, moment, number } from './format.js';
import { has, t } from './text.js';
import { copyable, problems, stageBar } from './widgets.js';

const ENDED = ['finished', 'stopped', 'failed', 'lost'];
const LOG_CHARACTERS = 4000;
const LOG_SECONDS = 1;
const LONG = 400; // characters, or LINES, of a cell that is folded
const LINES = 10;

// A list of the jobs of `kinds`, newest first. `open` is the id of one that is shown unfolded. `details(id)` shows what a
// job has written: `element`, and `update(job)`, which is called again while the job runs.
export function jobResults(kinds, details = figures) {
  const list = h('div', { class: 'list' }, h('p', { class: 'empty' }, t('results.none')));
  const element = h('section', {}, h('h2', {}, t('results.title')), list);
  const cards = new Map();
  let opened = null;

  function draw({ jobs }) {
    const shown = jobs.filter((job) => kinds.includes(job.kind));
    for (const job of shown) {
      if (!cards.has(job.id)) cards.set(job.id, card(job.id, details(job.id)));
      cards.get(job.id).set(job);
    }
    const elements = shown.map((job) => cards.get(job.id).element);
    if (!elements.length || elements.length !== list.children.length || elements.some((one, index) => list.children[index] !== one)) {
      fill(list, elements.length ? elements : h('p', { class: 'empty' }, t('results.none')));
    }
    unfold();
  }

  // A job may be listed before or after the page hears that it was started.
  function unfold() {
    if (!cards.has(opened)) return;
    cards.get(opened).element.open = true;
    cards.get(opened).element.scrollIntoView({ block: 'start' });
    opened = null;
  }

  const close = follow(null, { jobs: draw });
  return { element, close, open: (id) => { opened = id; unfold(); } };
}

function card(id, written) {
  const head = h('summary', { class: 'result' });
  const body = h('div');
  const stage = h('span', { class: 'stage' });
  const element = h('details', { class: 'card' }, head, body);
  const log = h('pre', { class: 'log', tabindex: 0, 'aria-label': t('results.log') });
  let state = null;
  let timer = null;
  element.addEventListener('toggle', load);

  async function load() {
    clearTimeout(timer);
    if (!element.open) return;
    const job = await get(`api/jobs/${id}`).catch(() => null);
    const busy = job && !ENDED.includes(job.state);
    fill(body, job && h('p', { class: 'quiet' }, h('a', { href: `#/runs/${id}` }, t('results.log')), ' ', job.command), busy && log,
      job?.reason && h('pre', { class: 'problems' }, job.reason),
      job?.state === 'finished' && place(job), job?.output && written.element);
    if (job?.output) written.update(job);
    if (busy) tail(job);
  }

  // What a job prints shows how far it is; read while somebody looks.
  async function tail(job) {
    clearTimeout(timer);
    const news = await get(`api/jobs/${id}/log?after=${log.dataset.next ?? 0}`).catch(() => null);
    if (news) {
      log.dataset.next = news.next;
      fill(log, (log.textContent + news.text).slice(-LOG_CHARACTERS));
      log.scrollTop = log.scrollHeight;
    }
    if (job.output) written.update(job);
    if (log.isConnected && element.open && !ENDED.includes(state)) timer = setTimeout(() => tail(job), LOG_SECONDS * 1000);
  }

  return {
    element,
    set(job) {
      fill(stage, stageBar(job));
      if (job.state === state) return;
      const first = state === null;
      state = job.state;
      fill(head, h('span', { class: 'name' }, job.name), h('span', { class: `state ${job.state}` }, t(`state.${job.state}`)),
        h('span', { class: 'quiet' }, t(`kind.${job.kind}`)), h('span', { class: 'quiet' }, moment(job.created)),
        h('span', { class: 'quiet' }, ENDED.includes(job.state) ? duration(job.exit?.seconds) : ''), stage);
      if (!first) load();
    },
  };
}

// Where the result of a job lies: a folder below the root, or an address of the hub.
function place(job) {
  const where = job.output ?? job.stage?.result;
  return where && h('div', {}, h('p', { class: 'quiet' }, t('results.lies')), copyable(where));
}

// Figures, answers, the report and the files of an evaluation or an export.
function figures(id) {
  const element = h('div');
  return { element, update: async (job) => {
    if (element.childElementCount && !ENDED.includes(job.state)) return;
    fill(element, await get(`api/results/${id}`).then((written) => shown(id, written), problems));
  } };
}

function shown(id, { report, models, rows, files, folder }) {
  return [
    figuresOf(models),
    report && h('iframe', { class: 'report', sandbox: '', src: `api/results/${id}/report`, title: t('results.report') }),
    rows.length > 0 && wide(t('results.answers'), 'answers-table', [t('results.prompt'), t('results.reference'), ...models.map(({ name }) => modelName(name))],
      rows.map((row) => h('tr', {}, [row.prompt, row.reference, ...row.answers].map((text) => h('td', { class: 'answer' }, folded(said(text))))))),
    files.length > 0 && h('details', { open: !rows.length && !report }, h('summary', {}, t('results.files', { n: files.length, folder })),
      h('ul', { class: 'files' }, files.map((file) => h('li', {},
        h('a', { href: `api/results/${id}/files/${file.path.split('/').map(encodeURIComponent).join('/')}`, download: file.path.split('/').pop() }, file.path), ' ',
        h('span', { class: 'quiet' }, bytes(file.bytes)))))),
  ];
}

// The figures of one model as a list, of two beside each other.
function figuresOf(models) {
  const keys = [...new Set(models.flatMap(({ figures }) => Object.keys(figures)))];
  if (!keys.length) return null;
  if (models.length === 1) return h('dl', { class: 'figures-list' }, keys.map((key) => h('div', {}, h('dt', {}, key), h('dd', {}, number(models[0].figures[key])))));
  return wide(t('results.figures'), 'figures-table', [t('results.figure'), ...models.map(({ name }) => modelName(name))],
    keys.map((key) => h('tr', {}, h('th', { scope: 'row' }, key), models.map(({ figures }) => h('td', {}, number(figures[key]))))));
}

function wide(label, name, heads, rows) {
  return h('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label }, h('table', { class: name },
    h('thead', {}, h('tr', {}, heads.map((head) => h('th', { scope: 'col' }, head)))), h('tbody', {}, rows)));
}

// A long text shows its first lines, and the rest when it is asked for.
function folded(text) {
  if (text.length <= LONG && text.split('\n').length <= LINES) return text;
  const body = h('div', { class: 'clamped' }, text);
  return [body, h('button', { type: 'button', class: 'small plain', 'aria-expanded': 'false', onclick: ({ target }) => {
    const open = !body.classList.toggle('clamped');
    target.setAttribute('aria-expanded', String(open));
    target.textContent = t(open ? 'results.fold' : 'results.whole');
  } }, t('results.whole'))];
}

const modelName = (name) => (has(`results.of.${name}`) ? t(`results.of.${name}`) : t('results.answer'));

// A message's content as text, with a mark in the place of each picture.
function words(content) {
  return Array.isArray(content) ? content.map((part) => part?.text ?? '<image>').join('') : content;
}

function said(value) {
  if (Array.isArray(value)) return value.map((turn) => `${turn?.role}: ${words(turn?.content)}`).join('\n');
  return typeof value === 'string' ? value : JSON.stringify(value ?? null);
}
