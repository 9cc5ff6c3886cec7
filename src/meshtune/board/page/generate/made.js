// What a job that makes data has written: counts, what filters dropped, and the records with where they are from.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { useInRecipe } from '../draft.js';
import { number, percent } from '../format.js';
import { has, t } from '../text.js';
import { action, problems } from '../widgets.js';

const ENDED = ['finished', 'stopped', 'failed', 'lost'];
const [RECORDS, PAIRS] = ['records.jsonl', 'pairs.jsonl'];
const HELD_OUT = { [RECORDS]: 'held-out.jsonl', [PAIRS]: 'held-out-pairs.jsonl' };

export function madeData(id) {
  const facts = h('div');
  const buttons = h('div', { class: 'row' });
  const wrong = h('div');
  const dropped = h('div');
  const records = h('div');
  const element = h('div', { class: 'made' }, facts, buttons, wrong, dropped, records);
  const unfolded = new Set();
  let seen = '';

  async function update(job) {
    try {
      const answer = await get(`api/generate/jobs/${id}`);
      const next = JSON.stringify([answer, job.state]);
      if (next === seen) return;
      seen = next;
      draw(job, answer);
    } catch (error) {
      fill(wrong, problems(error));
    }
  }

  function draw(job, { counts, folder, ended }) {
    const files = counts.records ?? {};
    const complete = ended && ENDED.includes(job.state);
    fill(facts, counts.made !== undefined && factsOf(counts), complete && notes(counts));
    fill(buttons, complete && [RECORDS, PAIRS].filter((name) => files[name]).map((name) => trainButton(folder, name, files)),
      ['running', 'queued'].includes(job.state) && action(t('talk.stop'), () => post(`api/jobs/${id}/stop`), wrong),
      ENDED.includes(job.state) && (job.state !== 'finished' || counts.tasks_beyond_budget > 0 || counts.failed?.length > 0)
        && action(t('generate.goon'), () => post(`api/jobs/${id}/resume`), wrong));
    fill(dropped, Object.keys(counts.dropped ?? {}).length > 0 && [h('h3', {}, t('generate.dropped')), Object.entries(counts.dropped).map((entry) => filterView(entry, counts))]);
    if (complete && Object.keys(files).length) fill(records, recordList(id, files));
    else fill(records, counts.newest?.length > 0 && [h('h3', {}, t('generate.newest')), counts.newest.map(recordView)]);
  }

  // The examples of a filter stay unfolded while numbers change.
  function filterView([name, count], { made, examples }) {
    const label = `generate.filter.${name.replace(' ', '')}`;
    return h('details', { open: unfolded.has(name), ontoggle: ({ target }) => unfolded[target.open ? 'add' : 'delete'](name) },
      h('summary', {}, has(label) ? t(label) : name, ' ', h('strong', {}, number(count, 9)), ' ', h('span', { class: 'quiet' }, percent(count / made))),
      (examples?.[name] ?? []).map(({ reason, text, source, place }) => h('div', { class: 'record' },
        h('p', { class: 'quiet', lang: 'en' }, reason), h('p', { class: 'answer' }, text), h('p', { class: 'quiet' }, [source, place].filter(Boolean).join(', ')))));
  }

  function trainButton(folder, name, files) {
    return action(t(name === PAIRS ? 'generate.trainpairs' : 'generate.train'), async () => {
      const { rows } = await get(`api/generate/jobs/${id}/records?${new URLSearchParams({ file: name })}`);
      const held = HELD_OUT[name];
      await useInRecipe([
        { path: 'data.train', value: [{ path: `${folder}/${name}` }] },
        files[held] ? { path: 'data.validation', value: [{ path: `${folder}/${held}` }] } : { path: 'data.validation' },
        name === PAIRS ? { path: 'stage.kind', value: 'dpo' } : { path: 'stage' },
        ...(rows.some((row) => row.images) ? [{ path: 'vision.media_dir', value: folder }] : []),
      ]);
    }, wrong, { class: 'primary' });
  }

  return { element, update };
}

function factsOf(counts) {
  const dropped = Object.values(counts.dropped).reduce((sum, count) => sum + count, 0);
  const values = {
    records: number(counts.made - dropped, 9), dropped: number(dropped, 9), general: counts.general ? number(counts.general, 9) : null,
    prompts: number(counts.tokens.prompts, 9), answers: number(counts.tokens.answers, 9), dollars: counts.dollars ? `$${counts.dollars}` : null,
  };
  return h('dl', { class: 'facts' }, Object.entries(values).filter(([, value]) => value !== null)
    .map(([key, value]) => h('div', {}, h('dt', {}, t(`generate.fact.${key}`)), h('dd', {}, value))));
}

// What a person should know before the records are used.
function notes({ tasks_beyond_budget: beyond, failed, skipped_documents: skipped, changed_sources: changed }) {
  const list = [
    beyond > 0 && t('generate.beyond', { n: beyond }),
    failed?.length > 0 && [t('generate.failed', { n: failed.length }), ' ', h('span', { lang: 'en' }, failed[0])],
    ...(skipped ?? []).map(([name, reason]) => [t('generate.skipped', { name }), ' ', h('span', { lang: 'en' }, reason)]),
    changed?.length > 0 && t('generate.changed', { names: changed.join(', ') }),
  ].filter(Boolean);
  return list.length > 0 && h('ul', { class: 'warning' }, list.map((text) => h('li', {}, text)));
}

// The records of a file, a page at a time.
function recordList(id, files) {
  const body = h('div');
  const wrong = h('div');
  const download = h('span');
  const file = h('select', { 'aria-label': t('generate.file'), onchange: () => { fill(body); load(0); } },
    Object.entries(files).map(([name, count]) => h('option', { value: name }, `${name} (${number(count, 9)})`)));
  const more = h('button', { type: 'button', hidden: true }, t('generate.more'));
  let next = 0;
  more.addEventListener('click', () => load(next));

  async function load(start) {
    try {
      const answer = await get(`api/generate/jobs/${id}/records?${new URLSearchParams({ file: file.value, start })}`);
      body.append(...answer.rows.map(recordView));
      next = answer.next;
      more.hidden = next === null;
      fill(download, h('a', { href: `api/results/${id}/files/${file.value}`, download: file.value }, t('generate.download')));
    } catch (error) {
      fill(wrong, problems(error));
    }
  }

  load(0);
  return [h('div', { class: 'row' }, h('h3', {}, t('generate.records')), file, download), wrong, body, more];
}

// A record: its messages, and below them where they are from.
function recordView(row) {
  const { source, place, kind, scores, ...rest } = row.provenance ?? {};
  const told = Object.entries(scores ?? {}).map(([name, score]) => `${name} ${number(score, 3)}`);
  return h('div', { class: 'record' },
    [...(row.prompt ?? []), ...(row.messages ?? [])].map((message) => messageView(message.role, message)),
    ['chosen', 'rejected'].filter((name) => row[name]).map((name) => row[name].map((message) => messageView(t(`generate.${name}`), message))),
    h('details', {}, h('summary', { class: 'quiet' }, [kind, source, place, ...told].filter(Boolean).join(' · ')),
      h('dl', {}, Object.entries(rest).map(([name, value]) => [h('dt', {}, h('code', {}, name)), h('dd', {}, String(value))]))));
}

function messageView(role, { content, tool_calls: calls }) {
  const label = has(`generate.role.${role}`) ? t(`generate.role.${role}`) : role;
  return h('div', { class: 'message' }, h('span', { class: 'quiet' }, label), h('p', { class: 'answer' }, typeof content === 'string' ? content : JSON.stringify(content)),
    calls && h('code', {}, calls.map((call) => `${call.function?.name}(${JSON.stringify(call.function?.arguments)})`).join('\n')));
}
