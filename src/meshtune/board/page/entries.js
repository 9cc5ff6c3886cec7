// Fields with labels, and what lies in the board's folders to choose from.

import { get } from './api.js';
import { fill, h } from './dom.js';
import { t } from './text.js';

// An element below its label; `about` explains it.
export function field(label, element, about = null) {
  return h('div', { class: 'entry' }, h('label', { for: element.id }, label), element, about && h('p', { class: 'quiet' }, about));
}

// A field for a model, with those that lie in the folders offered as one types. `kinds` are those of the catalogue.
export function modelField(id, value = '', kinds = null) {
  const choices = h('datalist', { id: `${id}-choices` });
  get('api/catalogue').then(({ entries }) => fill(choices, entries.filter((entry) => !kinds || kinds.includes(entry.kind))
    .map((entry) => h('option', { value: entry.path }, t(`catalogue.${entry.kind}`)))), () => {});
  const input = h('input', { type: 'text', id, value, list: `${id}-choices`, autocomplete: 'off', spellcheck: 'false', placeholder: t('talk.placeholder') });
  return { input, choices };
}

// A field for records, with the data files that lie in the folders offered as one types.
export function dataField(id) {
  const choices = h('datalist', { id: `${id}-choices` });
  get('api/data/files').then(({ files }) => fill(choices, files.map((file) => h('option', { value: file.path }))), () => {});
  const input = h('input', { type: 'text', id, list: `${id}-choices`, autocomplete: 'off', spellcheck: 'false' });
  return { input, choices };
}

// A number as it is sent: absent where the field is empty.
export function numberOf(input) {
  return input.value === '' ? undefined : Number(input.value);
}

export function choice(id, values, label, onchange = () => {}) {
  return h('select', { id, onchange }, values.map((value) => h('option', { value }, label(value))));
}
