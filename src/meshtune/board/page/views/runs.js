// Runs: what was started, how far it is, and what one of them prints, measures and says.

import { follow, get, post } from '../api.js';
import { curves } from '../curves.js';
import { fill, h } from '../dom.js';
import { duration, moment, number } from '../format.js';
import { deviceChoice, launcher } from '../launcher.js';
import { promptKey, promptView } from '../talk/pictures.js';
import { t } from '../text.js';
import { action, confirmed, copyable, stageBar } from '../widgets.js';

export const name = 'runs';

const ENDED = ['finished', 'stopped', 'failed', 'lost', 'elsewhere'];
const LOG_CHARACTERS = 200000;

export function show(place, [job]) {
  return job ? one(place, job) : list(place);
}

// All jobs, and a place to start one from a recipe as text.

function list(place) {
  const rows = h('div', { class: 'list' });
  const connection = connected();
  const recipe = h('textarea', { rows: 14, spellcheck: 'false', class: 'code', id: 'recipe' });
  const panel = launcher(() => ({ kind: 'train', recipe: recipe.value }));
  fill(place, h('h1', {}, t('runs.title'), connection.mark), rows,
    h('details', { class: 'card start' }, h('summary', {}, t('runs.start')),
      h('label', { for: 'recipe' }, t('runs.recipe')), recipe, panel.element),
    attachable());
  const draw = ({ jobs }) => fill(rows, jobs.length ? jobs.map(summary) : h('p', { class: 'empty' }, t('runs.none')));
  get('api/jobs').then(draw, () => {});
  return follow(null, { jobs: draw }, connection.state);
}

// Runs in the board's folders that were started without it, each with a button that takes it into the list.
function attachable() {
  const body = h('div', { class: 'list' });
  const wrong = h('div');
  return h('details', { class: 'card', ontoggle: async (event) => {
    if (!event.target.open) return;
    const [{ entries }, { jobs }] = await Promise.all([get('api/catalogue'), get('api/jobs')]);
    const known = new Set(jobs.map((job) => job.output));
    const runs = entries.filter((entry) => entry.kind === 'run' && !known.has(entry.path));
    fill(body, runs.length ? runs.map(({ path }) => h('div', { class: 'row' }, path, action(t('runs.attach'), async () => {
      location.hash = `#/runs/${(await post('api/jobs/attach', { output: path })).id}`;
    }, wrong))) : h('p', { class: 'empty' }, t('runs.noothers')));
  } }, h('summary', {}, t('runs.others')), body, wrong);
}

function summary(job) {
  return h('a', { class: 'card run', href: `#/runs/${job.id}` },
    h('span', { class: 'name' }, job.name), stateMark(job.state),
    h('span', { class: 'quiet' }, t(`kind.${job.kind}`), ' · ', t('runs.number', { number: Number(job.id.split('-')[0]) })), progress(job),
    h('span', { class: 'quiet' }, moment(job.created)));
}

function stateMark(state) {
  return h('span', { class: `state ${state}` }, t(`state.${state}`));
}

function progress(job) {
  const { step, total, loss } = job.progress ?? {};
  if (!step) return stageBar(job) ?? h('span', { class: 'progress' });
  return h('span', { class: 'progress' },
    total && h('progress', { value: step, max: total, 'aria-label': t('runs.updates') }),
    t('runs.step', { step: number(step), total: number(total) }), ' · ', t('runs.loss', { loss: number(loss) }));
}

function connected() {
  const mark = h('span', { class: 'connection', role: 'status' });
  return { mark, state: (open) => fill(mark, open ? '' : t('shared.disconnected')) };
}

// One job: its head with buttons, curves, samples, checkpoints, recipe and log.

function one(place, id) {
  const connection = connected();
  const head = h('div', { class: 'head' });
  const wrong = h('div');
  const broken = h('p', { class: 'warning', hidden: true });
  const facts = h('div');
  let job = null;
  let existed = false;
  let damaged = 0;
  const plots = curves(() => job?.progress?.total ?? 0);
  const samples = sampleList();
  const log = logView();
  const shelf = h('div', { class: 'list' });
  const recipe = recipeView(id);
  const completions = completionTable(id);
  fill(place, h('p', {}, h('a', { href: '#/runs' }, t('runs.back'))), head, wrong, broken, plots.element, samples.element, completions.element,
    h('section', { hidden: true }, h('h2', {}, t('runs.checkpoints')), shelf), recipe, log.element, facts);

  async function refresh() {
    try {
      job = await get(`api/jobs/${id}`);
    } catch (error) {
      if (error.status === 404) location.hash = '#/runs';
      return;
    }
    existed ||= job.exists;
    fill(head, h('h1', {}, job.name, ' ', stateMark(job.state), connection.mark), headline(job, existed), buttons(job), copyable(job.command));
    checkpoints(job.checkpoints);
  }

  const act = (verb, body) => async () => {
    await post(`api/jobs/${id}/${verb}`, body);
    await refresh();
  };

  function buttons() {
    const row = [];
    if (['running', 'queued'].includes(job.state) && !job.attached) row.push(action(t('runs.stop'), act('stop'), wrong));
    if (job.state === 'stopping') {
      row.push(action(t('runs.end'), async () => {
        if (await confirmed(t('runs.endsure'), t('runs.end'))) await act('stop', { now: true })();
      }, wrong, { class: 'danger' }));
    }
    if (ENDED.includes(job.state) || job.attached) {
      if (ENDED.includes(job.state) && job.kind === 'train' && job.state !== 'finished') row.push(action(t('runs.resume'), act('resume'), wrong, { class: 'primary' }));
      row.push(action(t('runs.remove'), async () => {
        if (!(await confirmed(t('runs.removesure'), t('runs.remove')))) return;
        await post(`api/jobs/${id}/remove`);
        location.hash = '#/runs';
      }, wrong));
    }
    if (job.report) row.push(h('a', { href: `api/jobs/${id}/report`, target: '_blank', rel: 'noopener' }, t('runs.report')));
    if (job.kind === 'train' && job.report && ENDED.includes(job.state)) {
      row.push(['talk', 'evaluate', 'export'].map((page) => h('a', { href: `#/${page}/${encodeURIComponent(job.output)}` }, t(`${page}.title`))));
    }
    return h('div', { class: 'row' }, row);
  }

  function checkpoints(steps) {
    shelf.parentElement.hidden = !steps.length || job.kind !== 'train';
    fill(shelf, steps.map((step) => h('div', { class: 'row' }, t('runs.after', { step: number(step) }),
      h('button', { type: 'button', onclick: () => branch(job, step) }, t('runs.branch')))));
  }

  refresh();
  const end = follow(id, {
    jobs: ({ jobs }) => {
      const listed = jobs.find((candidate) => candidate.id === id);
      if (!job || !listed) return;
      if (listed.state !== job.state || listed.attempt !== job.attempt || listed.exists !== job.exists || listed.scheduler?.reason !== job.scheduler?.reason) refresh();
      else if (listed.progress?.step !== job.progress?.step || listed.stage?.done !== job.stage?.done || listed.stage?.stage !== job.stage?.stage) {
        Object.assign(job, { progress: listed.progress, stage: listed.stage });
        head.querySelector('.progress')?.replaceWith(progress(job));
      }
    },
    run: (news) => {
      if (news.metrics) {
        plots.add(news.metrics);
        completions.renew(news.metrics.rows);
        damaged = (news.metrics.reset ? 0 : damaged) + news.metrics.broken;
        fill(broken, t('runs.broken', { n: damaged })).hidden = !damaged;
      }
      if (news.samples) samples.add(news.samples);
      if (news.log) log.add(news.log);
      if (job && news.checkpoints) checkpoints(news.checkpoints);
    },
    gone: () => { location.hash = '#/runs'; },
  }, connection.state);
  return () => {
    end();
    plots.close();
  };
}

// `existed`: its folder was there while the page was open.
function headline(job, existed) {
  const spent = job.exit.seconds === undefined ? null : t('runs.took', { time: duration(job.exit.seconds) });
  const missing = !job.exists && job.progress && (existed || (job.state !== 'queued' && job.state !== 'running'));
  const keys = job.devices.keys ?? [];
  const { goodput: share, attempts } = job.run?.goodput ?? {};
  const useful = attempts > 1 && t('runs.goodput', { share: number(Math.round(100 * share)), n: number(attempts) });
  return [h('p', {}, progress(job), ' ', h('span', { class: 'quiet' }, [t(`kind.${job.kind}`), spent, useful, job.scheduler && [t(`runs.${job.scheduler.name}`, { id: job.scheduler.id }), job.scheduler.reason].filter(Boolean).join(': '),
    keys.join(', '), job.output].filter(Boolean).join(' · '))),
  job.attached && !ENDED.includes(job.state) && h('p', { class: 'quiet' }, t('runs.attached')),
  missing && h('p', { class: 'warning' }, t('runs.missing', { folder: job.output })),
  job.reason && h('pre', { class: 'problems' }, job.reason)];
}

// Samples by prompt, the newest above; earlier ones unfold.
function sampleList() {
  const body = h('div', { class: 'list' });
  const element = h('section', { hidden: true }, h('h2', {}, t('runs.samples')), body);
  let rows = [];
  return {
    element,
    add(news) {
      rows = [...(news.reset ? [] : rows), ...news.rows];
      element.hidden = !rows.length;
      fill(body, [...grouped(rows, promptKey).values()].map((texts) => {
        const [newest, ...earlier] = [...texts].reverse();
        return h('div', { class: 'card' }, promptView(newest), said(newest),
          earlier.length > 0 && h('details', {}, h('summary', {}, t('runs.earlier', { n: earlier.length })), earlier.map(said)));
      }));
    },
  };
}

// The newest rollout of a run of an online stage: completions under their prompts, with their rewards.
function completionTable(id) {
  const body = h('div');
  const element = h('details', { hidden: true, ontoggle: () => load() }, h('summary', {}, t('runs.completions')), body);
  async function load() {
    if (!element.open) return;
    const { rows, count } = await get(`api/jobs/${id}/rollouts`).catch(() => ({ rows: [], count: 0 }));
    if (!rows.length) return;
    const names = Object.keys(rows[0].rewards);
    const value = (entry) => h('td', { class: 'number' }, entry === null ? '–' : number(entry));
    const groups = grouped(rows, (row) => row.group);
    fill(body, h('p', { class: 'quiet' }, t('runs.before', { step: number(rows[0].step) }), ' · ', t('runs.shown', { shown: number(rows.length), count: number(count) })),
      h('div', { class: 'scroll' }, h('table', {},
        h('thead', {}, h('tr', {}, h('th', {}, t('runs.completion')), names.map((name) => h('th', { class: 'number' }, name)),
          h('th', { class: 'number' }, t('runs.advantage')), h('th', { class: 'number' }, t('runs.length')))),
        h('tbody', {}, [...groups.values()].map((group) => [
          h('tr', {}, h('th', { colspan: names.length + 3, scope: 'rowgroup' }, group[0].prompt)),
          group.map((row) => h('tr', {}, h('td', { class: 'answer' }, row.completion), names.map((name) => value(row.rewards[name] ?? null)),
            value(row.advantage), value(row.tokens)))])))));
  }
  return {
    element,
    renew(rows) {
      if (!rows.some((row) => row.reward !== undefined)) return;
      element.hidden = false;
      load();
    },
  };
}

// The rows by their keys, in order.
function grouped(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) groups.set(keyOf(row), [...(groups.get(keyOf(row)) ?? []), row]);
  return groups;
}

function said(row) {
  return h('div', { class: 'sample' }, h('span', { class: 'quiet' }, t('runs.after', { step: number(row.step) })), h('p', { class: 'answer' }, row.text));
}

// The end of the log, which follows what is written as long as it is scrolled to the end.
function logView() {
  const body = h('pre', { class: 'log', tabindex: 0, 'aria-label': t('runs.log') });
  const element = h('section', {}, h('h2', {}, t('runs.log')), body);
  let text = '';
  return {
    element,
    add(news) {
      const atEnd = body.scrollTop + body.clientHeight >= body.scrollHeight - 8;
      const gap = news.skipped ? `… ${t('runs.skipped')} …\n` : '';
      text = ((news.reset ? '' : text) + gap + news.text).slice(-LOG_CHARACTERS);
      fill(body, text);
      if (atEnd) body.scrollTop = body.scrollHeight;
    },
  };
}

function recipeView(id) {
  const body = h('pre', { class: 'log', tabindex: 0, 'aria-label': t('runs.recipe') });
  return h('details', { ontoggle: async (event) => {
    if (event.target.open) fill(body, (await get(`api/jobs/${id}/recipe`).catch(() => ({ recipe: '' }))).recipe);
  } }, h('summary', {}, t('runs.recipe')), body);
}

// Asks for an output and starts a new run from the checkpoint of an update.
function branch(job, step) {
  const output = h('input', { type: 'text', value: `${job.output}-${step}`, required: true, id: 'output' });
  const changes = h('textarea', { rows: 3, class: 'code', id: 'changes', placeholder: 'optimizer.learning_rate=1e-4', spellcheck: 'false' });
  const wrong = h('div');
  const choice = deviceChoice();
  const dialog = h('dialog', { 'aria-labelledby': 'branch', onclose: () => dialog.remove() },
    h('h2', { id: 'branch' }, t('runs.branchof', { step: number(step) })),
    h('label', { for: 'output' }, t('runs.output')), output,
    h('label', { for: 'changes' }, t('runs.changes')), changes, choice.element, wrong,
    h('div', { class: 'row' }, h('button', { type: 'button', onclick: () => dialog.close() }, t('shared.cancel')),
      action(t('launcher.start'), async () => {
        const overrides = changes.value.split('\n').map((line) => line.trim()).filter(Boolean);
        const started = await post(`api/jobs/${job.id}/branch`, { step, output: output.value, overrides, ...choice.value() });
        dialog.close();
        location.hash = `#/runs/${started.id}`;
      }, wrong, { class: 'primary' })));
  document.body.append(dialog);
  dialog.showModal();
}
