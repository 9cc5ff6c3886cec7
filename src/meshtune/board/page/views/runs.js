// Runs: what was started, how far it is, and what one of them prints and measures.

import { follow, get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { moment, number } from '../format.js';
import { t } from '../text.js';
import { action, confirmed, copyable } from '../widgets.js';

export const name = 'runs';

const ACTIVE = ['running', 'stopping'];
const LOG_CHARACTERS = 200000;

export function show(place, [job]) {
  return job ? one(place, job) : list(place);
}

function list(place) {
  const rows = h('div', { class: 'list' });
  const connection = connected();
  fill(place, h('h1', {}, t('runs.title'), connection.mark), rows);
  const draw = ({ jobs }) => fill(rows, jobs.length ? jobs.map(summary) : h('p', { class: 'empty' }, t('runs.none')));
  get('api/jobs').then(draw, () => {});
  return follow(null, { jobs: draw }, connection.state);
}

function summary(job) {
  return h('a', { class: 'card run', href: `#/runs/${job.id}` },
    h('span', { class: 'name' }, job.name), stateMark(job.state),
    h('span', { class: 'quiet' }, job.id), progress(job),
    h('span', { class: 'quiet' }, moment(job.created)));
}

export function stateMark(state) {
  return h('span', { class: `state ${state}` }, t(`state.${state}`));
}

function progress(job) {
  const { step, total, loss } = job.progress ?? {};
  if (!step) return h('span', { class: 'progress' });
  return h('span', { class: 'progress' },
    total && h('progress', { value: step, max: total, 'aria-label': t('runs.updates') }),
    t('runs.step', { step: number(step), total: number(total) }), ' ', t('runs.loss', { loss: number(loss) }));
}

function connected() {
  const mark = h('span', { class: 'connection', role: 'status' });
  return { mark, state: (open) => fill(mark, open ? '' : t('shared.disconnected')) };
}

function one(place, id) {
  const connection = connected();
  const head = h('div', { class: 'head' });
  const wrong = h('div');
  const log = h('pre', { class: 'log', tabindex: 0, 'aria-label': t('runs.log') });
  fill(place, head, wrong, h('section', {}, h('h2', {}, t('runs.log')), log));
  let text = '';
  let shown = '';

  async function drawHead() {
    let job;
    try {
      job = await get(`api/jobs/${id}`);
    } catch {
      return;
    }
    shown = job.state;
    fill(head, h('h1', {}, job.name, ' ', stateMark(job.state), connection.mark), progress(job), buttons(job), copyable(job.command));
  }

  function buttons(job) {
    const acts = [];
    const post_ = (verb, body) => async () => { await post(`api/jobs/${id}/${verb}`, body); await drawHead(); };
    if (job.state === 'running' || job.state === 'queued') acts.push(action(t('runs.stop'), post_('stop'), wrong));
    if (job.state === 'stopping') {
      acts.push(action(t('runs.end'), async () => {
        if (await confirmed(t('runs.endsure'), t('runs.end'))) await post_('stop', { now: true })();
      }, wrong, { class: 'danger' }));
    }
    if (!ACTIVE.includes(job.state) && job.state !== 'queued') {
      if (job.kind === 'train' && job.state !== 'finished') acts.push(action(t('runs.resume'), post_('resume'), wrong, { class: 'primary' }));
      acts.push(action(t('runs.remove'), async () => {
        if (!(await confirmed(t('runs.removesure'), t('runs.remove')))) return;
        await post(`api/jobs/${id}/remove`);
        location.hash = '#/runs';
      }, wrong));
    }
    return h('div', { class: 'row' }, acts);
  }

  drawHead();
  return follow(id, {
    jobs: ({ jobs }) => {
      const job = jobs.find((candidate) => candidate.id === id);
      if (job && job.state !== shown) drawHead();
    },
    run: (news) => {
      if (!news.log) return;
      const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      text = ((news.log.reset ? '' : text) + (news.log.skipped ? `… ${t('runs.skipped')} …\n` : '') + news.log.text).slice(-LOG_CHARACTERS);
      fill(log, text);
      if (atEnd) log.scrollTop = log.scrollHeight;
    },
    gone: () => { location.hash = '#/runs'; },
  }, connection.state);
}
