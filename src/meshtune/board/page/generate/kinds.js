// The kinds of records of a recipe of data: each with its options, and its template, which can be copied and changed.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { put, shown } from '../form.js';
import { t } from '../text.js';
import { action, problems } from '../widgets.js';

// `shipped` are [{name, about}]; `change(changes)` is called when a person edits them; show(kinds, templates) draws those
// of a recipe with their templates by name.
export function kindList(shipped, change) {
  let kinds = [];
  let shape = '';
  let cards = [];
  let templates = {};
  const list = h('div');
  const adding = h('select', { id: 'add-kind', onchange: () => {
    const name = adding.value;
    adding.value = '';
    change([{ path: 'kinds', value: [...kinds, name].map(short) }]);
  } });
  const element = h('div', {}, list, h('div', { class: 'row' }, h('label', { for: 'add-kind' }, t('generate.addkind')), adding));

  async function listKinds() {
    const { files } = await get('api/generate/templates').catch(() => ({ files: [] }));
    fill(adding, h('option', { value: '' }, t('generate.choosekind')), shipped.map(({ name, about }) => h('option', { value: name, lang: 'en' }, `${name}: ${about}`)),
      files.map((file) => h('option', { value: file }, file)));
  }

  function draw() {
    cards = kinds.map((kind, index) => kindCard(kind, index));
    fill(list, cards.length ? cards.map((card) => card.element) : h('p', { class: 'empty' }, t('generate.nokinds')));
  }

  function kindCard(kind, index) {
    const template = templates[kind.template] ?? {};
    const fields = [...Object.entries(template.options ?? {}).map(([option, fallback]) => [`options.${option}`, option, shown(fallback)]),
      ['share', t('generate.share'), '1'], ['repeat', t('generate.repeat'), '1']];
    const inputs = fields.map(([path, label, fallback]) => {
      const id = `kind-${index}-${path.replaceAll('.', '-')}`;
      const input = h('input', { type: 'text', id, placeholder: fallback, onchange: () => {
        change([input.value.trim() ? { path: `kinds.${index}.${path}`, text: input.value } : { path: `kinds.${index}.${path}` }]);
      } });
      return { path, input, element: h('div', { class: 'field' }, h('div', { class: 'label' }, h('label', { for: id }, label)), input) };
    });
    const body = h('fieldset', { class: 'source-card', 'data-kind': kind.template }, h('legend', {}, kind.template),
      template.about && h('p', { class: 'quiet', lang: 'en' }, template.about),
      template.problems && problems({ problems: template.problems }),
      h('div', { class: 'form-grid' }, inputs.map((field) => field.element)),
      template.text !== undefined && templateView(kind.template, template.text, index),
      h('div', { class: 'row' }, h('button', { type: 'button', 'aria-label': `${t('data.remove')}: ${kind.template}`,
        onclick: () => change([kinds.length > 1 ? { path: 'kinds', value: kinds.filter((_, other) => other !== index).map(short) } : { path: 'kinds' }]) }, t('data.remove'))));
    return { element: body, show: (values) => inputs.forEach(({ path, input }) => put(input, shown(path.split('.').reduce((value, key) => value?.[key], values)))) };
  }

  // The text of a template: one that ships is copied under a name, a copy is saved over itself.
  function templateView(template, text, index) {
    const ships = shipped.some(({ name }) => name === template);
    const area = h('textarea', { class: 'code', rows: 16, spellcheck: 'false', 'aria-label': `${t('generate.template')}: ${template}`, value: text, readonly: ships });
    const name = h('input', { type: 'text', id: `template-${index}`, value: ships ? `my-${template}` : template.replace(/^.*\/|\.ya?ml$/g, ''), spellcheck: 'false' });
    const wrong = h('div');
    const save = h('div', { class: 'row', hidden: ships }, h('label', { for: name.id }, t('generate.templatename')), name,
      action(t('generate.save'), async () => {
        const { path } = await post('api/generate/templates', { name: name.value, text: area.value, replace: path_of(name.value) === template });
        shape = '';
        listKinds();
        change([{ path: 'kinds', value: kinds.map((kind, other) => short(other === index ? { ...kind, template: path } : kind)) }]);
      }, wrong, { class: 'primary' }));
    const copy = ships && h('button', { type: 'button', onclick: () => {
      copy.hidden = true;
      save.hidden = false;
      area.removeAttribute('readonly');
      area.focus();
    } }, t('generate.copy'));
    return h('details', {}, h('summary', {}, t('generate.template')), h('p', { class: 'quiet' }, t('generate.templateabout')), area, wrong, copy, save);
  }

  const path_of = (name) => `templates/${name}.yaml`;

  listKinds();
  draw();
  return {
    element,
    show(given, found) {
      kinds = Array.isArray(given) ? given.filter((kind) => typeof kind?.template === 'string') : [];
      templates = found;
      const next = JSON.stringify(kinds.map(({ template }) => [template, found[template]]));
      if (next !== shape) draw();
      shape = next;
      cards.forEach((card, index) => card.show(kinds[index]));
    },
  };
}

// A kind as people write it: a name alone where nothing else is set.
function short(kind) {
  return typeof kind === 'object' && Object.keys(kind).length === 1 ? kind.template : kind;
}
