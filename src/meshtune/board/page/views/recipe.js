// Recipe: a form made from the recipe's own schema and its YAML, each a view of the other, with the plan beside Start.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { readDraft, writeDraft } from '../draft.js';
import { formField } from '../form.js';
import { importDialog } from '../importer.js';
import { launcher } from '../launcher.js';
import { planPanel } from '../plan.js';
import { fieldsOf } from '../schema.js';
import { loadHelp, t } from '../text.js';
import { action, confirmed, problems } from '../widgets.js';

export const name = 'recipe';

const FIRST = ['model.path', 'data.train', 'data.validation', 'output', 'stage.kind', 'method.kind', 'method.rank', 'method.alpha', 'quantize.format',
  'optimizer.learning_rate', 'train.epochs', 'train.steps', 'train.batch_size', 'data.max_length', 'sample.prompts'];
const CALM = 400;

export function show(place) {
  let open = true;
  let end = () => {};
  Promise.all([get('api/recipe/form'), loadHelp()]).then(([form]) => { if (open) end = page(place, form); }, (error) => fill(place, problems(error)));
  return () => { open = false; end(); };
}

function page(place, { schema, presets, devices }) {
  let text = readDraft();
  let values = {};
  let fields = [];
  let shape = '';
  let defaults = {};
  let timer = null;
  let queue = Promise.resolve();
  const first = h('div', { class: 'form-grid' });
  const rest = h('div');
  const wrong = h('div');
  const search = h('input', { type: 'search', id: 'search', placeholder: t('recipe.searchhint'), oninput: filter });
  const nothing = h('p', { class: 'quiet', hidden: true, role: 'status' }, t('recipe.nothing'));
  const area = h('textarea', { class: 'code yaml', id: 'yaml', spellcheck: 'false', autocapitalize: 'off', rows: 18, oninput: () => {
    clearTimeout(timer);
    timer = setTimeout(() => send({ recipe: area.value }), CALM);
  } });
  const suggest = (choices) => fields.forEach((field) => field.suggest(choices.find((choice) => choice.name === field.path)?.value ?? defaults[field.path]));
  const plan = planPanel(devices, change, suggest);
  const panel = launcher(() => ({ kind: 'train', recipe: text }), (found) => complain(found));

  fill(place,
    h('h1', {}, t('recipe.title')),
    h('div', { class: 'toolbar' },
      h('div', { class: 'chips', role: 'group', 'aria-label': t('recipe.presets') }, h('span', { class: 'quiet' }, t('recipe.presets')),
        Object.keys(presets).map((preset) => h('button', { type: 'button', class: 'chip', onclick: () => send({ preset }) }, t(`recipe.preset.${preset}`)))),
      h('div', { class: 'row' }, fileChoice(),
        h('button', { type: 'button', onclick: () => importDialog((recipe) => send({ recipe })) }, t('recipe.import')),
        action(t('recipe.clear'), async () => { if (!text.trim() || await confirmed(t('recipe.clearsure'), t('recipe.clear'))) await send({ recipe: '' }); }, wrong))),
    h('div', { class: 'split' },
      h('div', {}, h('section', { class: 'card', 'aria-label': t('recipe.basics') }, first),
        h('section', { class: 'card all' }, h('div', { class: 'row' }, h('h2', {}, h('label', { for: 'search' }, t('recipe.all'))), search), nothing, rest)),
      h('div', { class: 'side' }, plan.element, h('section', { class: 'card' }, panel.element),
        h('section', { class: 'card' }, h('h2', {}, h('label', { for: 'yaml' }, t('recipe.yaml'))), wrong, area))));

  function fileChoice() {
    const select = h('select', { 'aria-label': t('recipe.open') }, h('option', { value: '' }, t('recipe.open')));
    get('api/recipe/files').then(({ files }) => select.append(...files.map((file) => h('option', { value: file }, file))), () => {});
    select.addEventListener('change', async () => {
      if (!select.value) return;
      try {
        const { recipe } = await get(`api/recipe/file?${new URLSearchParams({ name: select.value })}`);
        await send({ recipe });
      } catch (error) {
        fill(wrong, problems(error));
      }
      select.value = '';
    });
    return select;
  }

  // One edit after another: each starts from the text that the one before it left.
  function send(body) {
    queue = queue.then(async () => {
      try {
        taken(await post('api/recipe', { recipe: text, ...body }), body.recipe !== undefined && document.activeElement === area);
      } catch (error) {
        fill(wrong, problems(error));
      }
    });
    return queue;
  }

  function change(changes) {
    return send({ changes });
  }

  function taken(answer, typed) {
    text = answer.recipe;
    writeDraft(text);
    if (!typed || area.value !== text) if (!typed) area.value = text;
    if (answer.values === null || answer.foreign) {
      fill(wrong, answer.foreign ? foreign(answer.foreign) : problems({ problems: answer.problems }));
      complain([]);
      return;
    }
    fill(wrong);
    values = answer.values;
    defaults = answer.defaults ?? {};
    draw();
    suggest([]);
    complain(answer.problems);
    plan.update(text, answer.problems, values);
    if (text.trim() && !answer.problems.length) panel.check();
    else panel.clear();
  }

  function foreign(tool) {
    return h('div', { class: 'warning' }, h('p', {}, t('recipe.foreign', { tool })),
      h('button', { type: 'button', onclick: () => importDialog((recipe) => send({ recipe }), text) }, t('recipe.import')));
  }

  function complain(found) {
    for (const field of fields) {
      const own = field.complain(found);
      const section = own.length && field.element.closest('details');
      if (section) section.open = true;
    }
  }

  // The fields depend on the kinds of stage and method; all else is only shown anew.
  function draw() {
    const next = `${values.stage?.kind} ${values.method?.kind}`;
    if (next !== shape) {
      shape = next;
      const focused = document.activeElement?.closest?.('.field')?.dataset.path;
      build();
      if (focused) place.querySelector(`[data-path="${focused}"] :is(input, select, textarea)`)?.focus();
    }
    for (const field of fields) field.show(values);
    for (const group of rest.children) {
      const given = group.querySelectorAll('.given').length;
      fill(group.querySelector('.count'), given ? t('recipe.given', { n: given }) : '');
    }
  }

  function build() {
    const known = fieldsOf(schema, values);
    const chosen = FIRST.map((path) => known.find((field) => field.path === path)).filter(Boolean);
    const others = known.filter((field) => !chosen.includes(field));
    const element = (field) => {
      const built = formField(schema, field, change);
      fields.push(built);
      return built.element;
    };
    fields = [];
    fill(first, chosen.map(element));
    const sections = [...new Set(others.map((field) => field.section))];
    fill(rest, sections.map((section) => h('details', { class: 'group' },
      h('summary', {}, h('span', {}, t(`recipe.section.${section || 'run'}`)), ' ', h('code', {}, section), ' ', h('span', { class: 'count quiet' })),
      h('div', { class: 'form-grid' }, others.filter((field) => field.section === section).map(element)))));
    filter();
  }

  function filter() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const group of rest.children) {
      let count = 0;
      for (const element of group.querySelectorAll('.field')) {
        const field = fields.find((known) => known.element === element);
        if (!field) continue; // of an entry of a list, shown with the list
        const entries = [...element.querySelectorAll('.field')];
        const match = field.matches(words) || entries.some(({ dataset }) => words.every((word) => dataset.path.includes(word)));
        element.hidden = !match;
        count += match;
      }
      group.hidden = !count;
      group.open = words.length > 0 && count > 0;
      shown += count;
    }
    nothing.hidden = shown > 0;
  }

  send({ recipe: text });
  area.value = text;
  return () => { clearTimeout(timer); plan.close(); };
}
