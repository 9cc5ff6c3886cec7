// Make data: documents, kinds of records, a teacher and filters as a form and as YAML; and the records that came of them.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { readDraft, writeDraft } from '../draft.js';
import { formField } from '../form.js';
import { number } from '../format.js';
import { documentList } from '../generate/documents.js';
import { kindList } from '../generate/kinds.js';
import { madeData } from '../generate/made.js';
import { launcher } from '../launcher.js';
import { jobResults } from '../results.js';
import { fieldsOf } from '../schema.js';
import { loadHelp, t } from '../text.js';
import { action, problems } from '../widgets.js';

export const name = 'generate';

const DRAFT = 'data-recipe';
const PAGE = String(Math.random());
const CALM = 400;
const SOURCES = { examples: 'example', tools: 'tool', pictures: 'picture' }; // what kinds are about
const SERVER = ['model', 'key', 'price', 'timeout', 'tries', 'structured', 'extra'];
const PARTS = {
  teacher: ['teacher.path', 'teacher.model', 'teacher.key', 'teacher.price', 'teacher.max_tokens', 'teacher.temperature'],
  filters: ['filters.length.min_words', 'filters.length.max_words', 'filters.language', 'filters.refusals', 'filters.duplicates', 'filters.evaluation',
    'filters.grounded', 'filters.quality', 'filters.agreement'],
  bounds: ['output', 'limit', 'held_out', 'budget.tokens', 'budget.dollars'],
};

export function show(place) {
  let open = true;
  let end = () => {};
  Promise.all([get('api/generate/form'), loadHelp()]).then(([form]) => { if (open) end = page(place, form); }, (error) => fill(place, problems(error)));
  return () => { open = false; end(); };
}

function page(place, { schema, kinds: shipped, types, runs_code: asks }) {
  let text = readDraft(DRAFT);
  let values = {};
  let timer = null;
  let queue = Promise.resolve();
  const wrong = h('div');
  const documents = documentList(types, (paths) => change([{ path: 'documents', ...(paths.length && { value: paths }) },
    ...(paths.length && !values.kinds ? [{ path: 'kinds', value: ['qa'] }] : [])], true));
  const kinds = kindList(shipped, change);
  const known = fieldsOf(schema, {}).filter(({ path }) => !['documents', 'kinds'].includes(path));
  const fields = new Map(known.map((field) => [field.path, formField(schema, field, field.path === 'teacher.path' ? changeTeacher : change)]));
  const placed = [...Object.keys(SOURCES), ...Object.values(PARTS).flat()];
  const others = [...fields.values()].filter(({ path }) => !placed.includes(path));
  const area = h('textarea', { class: 'code yaml', id: 'yaml', spellcheck: 'false', autocapitalize: 'off', rows: 16, oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => send({ recipe: area.value }), CALM);
  } });
  const goOn = h('input', { type: 'checkbox', id: 'resume' });
  const results = jobResults(['data'], madeData);
  const panel = launcher(() => ({ kind: 'data', recipe: text, resume: goOn.checked }), () => {},
    { started: (job) => results.open(job.id), replacing: t('results.aside'), trains: false });
  const prompts = h('div', { 'aria-live': 'polite' });
  const grid = (paths) => h('div', { class: 'form-grid' }, paths.map((path) => fields.get(path).element));
  const models = h('datalist', { id: 'teachers' });
  fields.get('teacher.path').element.querySelector('input').setAttribute('list', models.id);
  get('api/catalogue').then(({ entries }) => fill(models, entries.filter(({ kind }) => kind !== 'gguf')
    .map((entry) => h('option', { value: entry.path }, t(`catalogue.${entry.kind}`)))), () => {});

  fill(place, h('h1', {}, t('generate.title')), h('p', { class: 'quiet' }, t('generate.about')),
    h('div', { class: 'split' },
      h('div', {},
        section('documents', documents.element),
        section('kinds', kinds.element, grid(Object.keys(SOURCES))),
        section('teacher', h('p', { class: 'quiet' }, t(asks ? 'generate.teacherabout' : 'generate.noserver')), grid(PARTS.teacher), models),
        section('filters', grid(PARTS.filters)),
        section('bounds', grid(PARTS.bounds)),
        h('section', { class: 'card' }, h('details', {}, h('summary', {}, t('recipe.all')), h('div', { class: 'form-grid' }, others.map(({ element }) => element))))),
      h('div', { class: 'side' },
        h('section', { class: 'card' }, h('h2', {}, t('generate.start')), h('label', { class: 'tick' }, goOn, ' ', t('generate.resume')), panel.element),
        h('section', { class: 'card' }, h('h2', {}, t('generate.plan')), action(t('generate.look'), look, prompts), prompts),
        h('section', { class: 'card' }, h('h2', {}, h('label', { for: 'yaml' }, t('recipe.yaml'))), wrong, area))),
    results.element);

  function section(key, ...parts) {
    return h('section', { class: 'card', 'data-part': key }, h('h2', {}, t(`generate.${key}title`)), parts);
  }

  // One edit after another: each starts from the text that the one before it left.
  function send(body) {
    queue = queue.then(async () => {
      try {
        taken(await post('api/generate/recipe', { recipe: text, ...body }), body.recipe !== undefined && document.activeElement === area);
      } catch (error) {
        fill(wrong, problems(error));
      }
    });
    return queue;
  }

  function change(changes, named = false) {
    return send({ changes, name_output: named });
  }

  // What only servers take is left out of a teacher that is none.
  function changeTeacher([{ value }]) {
    const { teacher = {} } = values;
    const rest = Object.entries(teacher).filter(([key]) => key !== 'path' && (isServer(value) ? key !== 'dtype' : !SERVER.includes(key)));
    return change([value ? { path: 'teacher', value: { path: value, ...Object.fromEntries(rest) } } : { path: 'teacher' }]);
  }

  function taken(answer, typed) {
    text = answer.recipe;
    if (!answer.problems.some(({ path }) => path?.endsWith('.key'))) writeDraft(text, DRAFT); // which may be the key itself
    if (!typed) area.value = text;
    fill(wrong, answer.values === null && problems({ problems: answer.problems }));
    if (answer.values === null) return;
    values = answer.values;
    documents.show(values.documents);
    kinds.show(values.kinds, answer.templates);
    for (const field of fields.values()) {
      field.show(values);
      if (field.complain(answer.problems).length) field.element.closest('details')?.setAttribute('open', '');
    }
    arrange(answer.templates);
    if (text.trim()) panel.check();
    else panel.clear();
  }

  // Fields that say nothing of this recipe are not shown.
  function arrange(templates) {
    const about = new Set(Object.values(templates).map(({ of }) => of));
    for (const [path, of] of Object.entries(SOURCES)) fields.get(path).element.hidden = !about.has(of) && values[path] === undefined;
    const server = isServer(values.teacher?.path);
    for (const key of SERVER) fields.get(`teacher.${key}`).element.hidden = !server;
    fields.get('teacher.dtype').element.hidden = server;
  }

  async function look() {
    fill(prompts, h('p', { class: 'quiet', role: 'status' }, t('generate.looking')));
    const plan = await post('api/generate/plan', { recipe: text, page: PAGE });
    fill(prompts, h('dl', { class: 'facts' }, [['requests', number(plan.requests, 9)], ['tokens', number(plan.tokens, 9)], plan.dollars && ['most', `$${number(plan.dollars, 3)}`]]
      .filter(Boolean).map(([key, value]) => h('div', {}, h('dt', {}, t(`generate.fact.${key}`)), h('dd', {}, value)))),
    h('p', { class: 'quiet', lang: 'en' }, plan.documents),
    plan.skipped.length > 0 && h('ul', { class: 'warning', lang: 'en' }, plan.skipped.map(([document, reason]) => h('li', {}, `${document}: ${reason}`))),
    plan.prompts.map(({ name: title, messages }) => h('details', {}, h('summary', {}, title),
      messages.map(([role, content]) => h('div', { class: 'message' }, h('span', { class: 'quiet' }, role), h('pre', { class: 'log', tabindex: 0, 'aria-label': role }, content))))));
  }

  send({});
  return () => { documents.close(); results.close(); };
}

const isServer = (path) => /^https?:/.test(path ?? '');
