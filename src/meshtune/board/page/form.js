// A form of a recipe's fields. Each has its key, its help, what is wrong with it, and a way back to the default.

import { fill, h } from './dom.js';
import { at, entryFields, keysOf, kindsOf, kindsOfEntries } from './schema.js';
import { has, helpOf, t } from './text.js';

// A field's element and what it shows. `change(changes)` is called with [{path, value | text}] when a person edits it;
// show(values) draws a recipe's, complain(problems) what is wrong, suggest(text) what an automatic choice comes to;
// matches(words) says whether all of them stand in its name or its help, also the English one.
export function formField(schema, field, change) {
  const id = `key-${field.path.replaceAll('.', '-')}-${serial++}`;
  const control = CONTROLS[field.kind](field, (...changes) => change(changes), id, schema);
  const wrong = h('div', { class: 'wrong', id: `${id}-wrong`, role: 'alert' });
  const reset = h('button', { type: 'button', class: 'plain', title: t('recipe.reset'), 'aria-label': `${t('recipe.reset')}: ${field.path}`,
    hidden: true, onclick: () => change([{ path: field.path }]) }, '×');
  const known = `recipe.field.${field.path.replaceAll('.', '_')}`;
  const help = helpOf(field.help);
  const element = h('div', { class: `field ${field.kind}`, 'data-path': field.path },
    h('div', { class: 'label' }, h('label', { for: id }, has(known) ? t(known) : field.label ?? field.path), has(known) && h('code', {}, field.path), reset),
    control.element, field.help && h('p', { class: 'help', lang: help.lang, id: `${id}-help` }, help.text), wrong);
  const labelled = control.element.id === id ? control.element : control.element.querySelector(`#${id}`);
  labelled?.setAttribute('aria-describedby', `${id}-help ${id}-wrong`);
  return {
    path: field.path, field, element,
    matches(words) {
      const text = `${element.textContent} ${field.help}`.toLowerCase();
      return words.every((word) => text.includes(word));
    },
    show(values) {
      const value = at(values, field.path);
      control.show(value, values);
      reset.hidden = value === undefined || field.kind === 'kind';
      element.classList.toggle('given', value !== undefined);
    },
    complain(problems) {
      const own = problems.filter((problem) => problem.path === field.path || problem.path?.startsWith(`${field.path}.`));
      fill(wrong, own.map((problem) => h('p', {}, problem.message)));
      element.classList.toggle('bad', own.length > 0);
      if (own.length) labelled?.setAttribute('aria-invalid', 'true');
      else labelled?.removeAttribute('aria-invalid');
      return own;
    },
    suggest(text) {
      if ('placeholder' in (labelled ?? {})) labelled.placeholder = text ?? shown(field.fallback);
    },
  };
}

let serial = 0;

export function shown(value) {
  if (value === null || value === undefined) return '';
  if (Array.isArray(value)) return value.length ? `[${value.map(shown).join(', ')}]` : '';
  if (typeof value === 'object') return Object.keys(value).length ? `{${Object.entries(value).map(([key, inner]) => `${key}: ${shown(inner)}`).join(', ')}}` : '';
  return String(value);
}

// Sets an element's value unless a person is typing in it.
export function put(element, value) {
  if (document.activeElement !== element || element.tagName === 'SELECT') element.value = value;
}

const CONTROLS = {
  text: (field, change, id) => {
    const input = h('input', { id, type: 'text', placeholder: shown(field.fallback), onchange: () => change(input.value
      ? { path: field.path, value: input.value } : { path: field.path }) });
    return { element: input, show: (value) => put(input, shown(value)) };
  },
  number: (field, change, id) => yaml(field, change, id, { inputmode: 'decimal' }),
  yaml: (field, change, id) => yaml(field, change, id, field.choices.length ? { list: `${id}-list` } : {}),
  lines: (field, change, id) => {
    const input = h('textarea', { id, rows: 2, placeholder: shown(field.fallback) });
    input.addEventListener('change', () => {
      const lines = input.value.split('\n').filter((line) => line.trim());
      change(lines.length ? { path: field.path, value: lines } : { path: field.path });
    });
    return { element: input, show: (value) => put(input, Array.isArray(value) ? value.map(shown).join('\n') : shown(value)) };
  },
  boolean: (field, change, id) => select(field, change, id, [true, false]),
  choice: (field, change, id) => select(field, change, id, field.choices),
  kind: (field, change, id, schema) => {
    const section = field.path.split('.')[0];
    const kinds = kindsOf(schema, section);
    const input = h('select', { id }, kinds.map((kind) => h('option', { value: kind }, has(`recipe.kind.${kind}`) ? t(`recipe.kind.${kind}`) : kind)));
    let current = {};
    input.addEventListener('change', () => {
      const allowed = keysOf(schema, section, input.value);
      const kept = Object.entries(current).filter(([key]) => key !== 'kind' && allowed.includes(key));
      change({ path: section, value: { kind: input.value, ...Object.fromEntries(kept) } });
    });
    return { element: input, show: (value, values) => { current = at(values, section) ?? {}; put(input, value ?? current.kind ?? field.fallback ?? kinds[0]); } };
  },
  sources,
  sections,
};

function yaml(field, change, id, props) {
  const input = h('input', { id, type: 'text', placeholder: shown(field.fallback), ...props, onchange: () => change(input.value.trim()
    ? { path: field.path, text: input.value } : { path: field.path }) });
  const list = props.list && h('datalist', { id: props.list }, field.choices.map((choice) => h('option', { value: choice })));
  const text = (value) => (field.path === 'data.validation' && value?.length === 1 && Object.keys(value[0]).join() === 'path' ? value[0].path : shown(value));
  return { element: list ? h('span', { class: 'with-list' }, input, list) : input, show: (value) => put(input, text(value)) };
}

function select(field, change, id, choices) {
  const fallback = field.fallback === undefined || field.fallback === null ? '' : shown(field.fallback);
  const input = h('select', { id }, h('option', { value: '' }, fallback ? t('recipe.default', { value: fallback }) : t('recipe.none')),
    choices.map((choice) => h('option', { value: String(choice) }, String(choice))));
  input.addEventListener('change', () => {
    const value = choices.find((choice) => String(choice) === input.value);
    const unset = field.path === 'quantize.format' ? 'quantize' : field.path;
    change(value === undefined ? { path: unset } : { path: field.path, value });
  });
  return { element: input, show: (value) => put(input, value === undefined || value === null ? '' : String(value)) };
}

// Several sources of records: a path or the name of a registry's entry, and a weight, each.
function sources(field, change, id) {
  const rows = h('div', { class: 'sources' });
  const list = `${id}-files`;
  const element = h('div', {}, rows, h('button', { type: 'button', class: 'small', onclick: () => { entries.push({ path: '' }); draw(); rows.lastChild.querySelector('input').focus(); } }, t('recipe.addsource')));
  let entries = [];

  function send() {
    const kept = entries.filter((entry) => entry.path || entry.name);
    change(kept.length ? { path: field.path, value: kept } : { path: field.path });
  }

  function draw() {
    if (!entries.length) entries = [{ path: '' }];
    fill(rows, entries.map((entry, index) => {
      const named = 'name' in entry;
      const path = h('input', { type: 'text', id: index ? null : id, list, value: entry.path ?? entry.name ?? '', placeholder: t('recipe.sourcehint'),
        'aria-label': t('recipe.source', { number: index + 1 }), onchange: () => { entries[index] = { ...entry, [named ? 'name' : 'path']: path.value.trim() }; send(); } });
      const weight = h('input', { type: 'text', class: 'short', inputmode: 'decimal', value: entry.weight ?? '', placeholder: t('recipe.weight'),
        'aria-label': `${t('recipe.weight')} ${index + 1}`, onchange: () => {
          const { weight: _, ...rest } = entries[index];
          entries[index] = weight.value.trim() ? { ...rest, weight: Number(weight.value) } : rest;
          send();
        } });
      return h('div', { class: 'source' }, path, entries.length > 1 && weight, entries.length > 1 && h('button', { type: 'button', class: 'plain',
        'aria-label': `${t('recipe.removesource')} ${index + 1}`, onclick: () => { entries.splice(index, 1); send(); draw(); } }, '×'));
    }));
  }

  draw();
  return { element, show: (value) => {
    const next = Array.isArray(value) ? value.map((entry) => ({ ...entry })) : [];
    if (JSON.stringify(next) === JSON.stringify(entries.filter((entry) => entry.path || entry.name)) || rows.contains(document.activeElement)) return;
    entries = next;
    draw();
  } };
}

// A list of sections of several kinds, such as rewards: each with its kind, and the fields of that kind.
function sections(field, change, id, schema) {
  const kinds = kindsOfEntries(schema, field.path);
  const rows = h('div', {});
  const element = h('div', {}, rows, h('button', { type: 'button', class: 'small', id, onclick: () => send([...entries, { kind: kinds[0] }]) }, t('recipe.addentry')));
  let entries = [];
  let fields = [];

  function send(next) {
    change(next.length ? { path: field.path, value: next } : { path: field.path });
  }

  function draw() {
    fields = entries.map((entry, index) => entryFields(schema, field.path, index, entry.kind).map((inner) => formField(schema, inner, (changes) => change(...changes))));
    fill(rows, entries.map((entry, index) => h('div', { class: 'entry-section', 'data-kind': entry.kind },
      h('div', { class: 'source' },
        h('select', { 'aria-label': t('recipe.entrykind', { number: index + 1 }),
          onchange: (event) => send(entries.map((other, n) => (n === index ? { kind: event.target.value } : other))) },
        kinds.map((kind) => h('option', { value: kind, selected: kind === entry.kind }, kind))),
        h('button', { type: 'button', class: 'plain', 'aria-label': t('recipe.removeentry', { number: index + 1 }),
          onclick: () => send(entries.filter((_, n) => n !== index)) }, '×')),
      h('div', { class: 'form-grid' }, fields[index].map((inner) => inner.element)))));
  }

  return { element, show: (value, values) => {
    const next = Array.isArray(value) ? value.filter((entry) => kinds.includes(entry?.kind)) : [];
    const changed = next.map(({ kind }) => kind).join() !== entries.map(({ kind }) => kind).join();
    entries = next;
    if (changed) draw();
    for (const inner of fields.flat()) inner.show(values);
  } };
}
