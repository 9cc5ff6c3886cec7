// Model: those of the hub and of this machine, with the memory that each method takes, and which of them fit.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { useInRecipe } from '../draft.js';
import { bytes } from '../format.js';
import { t } from '../text.js';
import { action, problems } from '../widgets.js';

export const name = 'model';

const METHODS = { qlora: 'QLoRA', lora: 'LoRA', full: null };
const PAGE = String(Math.random());

export function show(place) {
  let limit = null;
  let models = { hub: [], local: [] };
  let open = true;
  const wrong = h('div');
  const here = h('p', { class: 'quiet', role: 'status' }, t('model.measuring'));
  const hub = h('div', { class: 'sideways' });
  const local = h('div');
  const answer = h('div', { class: 'sideways', 'aria-live': 'polite' });
  const search = h('input', { type: 'search', id: 'model-search', placeholder: t('model.searchhint'), oninput: draw });
  const fits = h('input', { type: 'checkbox', id: 'model-fits', checked: true, onchange: draw });
  const marks = h('span');
  const path = h('input', { type: 'text', id: 'model-path', placeholder: t('model.pathhint') });

  const estimate = (value, where) => async () => {
    const found = await post('api/models/memory', { path: value(), page: PAGE });
    limit = found.memory;
    fill(where, h('table', { class: 'models' }, head(), h('tbody', {}, row({ name: value(), id: value(), bytes: found.bytes }))));
  };

  fill(place, h('h1', {}, t('model.title')), here, wrong,
    h('section', { class: 'card' }, h('h2', {}, h('label', { for: 'model-path' }, t('model.any'))),
      h('div', { class: 'row' }, path, action(t('model.estimate'), estimate(() => path.value.trim(), answer), wrong),
        action(t('model.use'), () => useInRecipe([{ path: 'model.path', value: path.value.trim() }]), wrong, { class: 'primary' })), answer),
    h('section', { class: 'card' }, h('h2', {}, t('model.local')), local),
    h('section', { class: 'card' }, h('div', { class: 'row' }, h('h2', {}, h('label', { for: 'model-search' }, t('model.hub'))), search,
      h('label', { for: 'model-fits' }, fits, ' ', t('model.onlyfits'))), h('p', { class: 'quiet' }, t('model.basis'), ' ', marks), hub));

  function head() {
    return h('thead', {}, h('tr', {}, h('th', {}, t('model.model')),
      Object.entries(METHODS).map(([, label]) => h('th', { class: 'number' }, label ?? t('recipe.preset.full'))), h('th', {}, h('span', { class: 'hidden' }, t('model.use')))));
  }

  function cell(size) {
    if (typeof size !== 'number') return h('td', { class: 'number quiet', title: size, lang: 'en' }, size ? t('model.not') : '–');
    const held = limit !== null && size <= limit;
    return h('td', { class: `number ${limit === null ? '' : held ? 'held' : 'quiet'}` }, bytes(size), held && h('span', { class: 'hidden' }, t('model.fits')));
  }

  function row(model) {
    return h('tr', {}, h('th', { scope: 'row' }, model.name, model.name !== model.id && h('code', {}, model.id)), Object.keys(METHODS).map((method) => cell(model.bytes[method])),
      h('td', {}, h('button', { type: 'button', class: 'small', 'aria-label': `${t('model.use')}: ${model.id}`, onclick: () => useInRecipe([{ path: 'model.path', value: model.id }]) }, t('model.use'))));
  }

  const least = (model) => Math.min(...Object.values(model.bytes).filter((size) => typeof size === 'number'));

  function draw() {
    const words = search.value.trim().toLowerCase().split(/\s+/);
    const chosen = models.hub.filter((model) => words.every((word) => `${model.name} ${model.id} ${model.family}`.toLowerCase().includes(word))
      && (!fits.checked || limit === null || least(model) <= limit));
    chosen.sort((one, two) => least(one) - least(two));
    const families = [...new Set(chosen.map((model) => model.family))]; // that of the smallest model first
    fill(hub, chosen.length ? h('table', { class: 'models' }, head(), families.map((family) => h('tbody', {},
      h('tr', {}, h('th', { colspan: 5, scope: 'rowgroup', class: 'family' }, family)),
      chosen.filter((model) => model.family === family).map(row)))) : h('p', { class: 'empty' }, t('model.none')));
  }

  // Apart from the hub's list, which every key in its search draws anew: a measured model keeps its figures.
  function drawLocal() {
    const entries = [...models.local].sort((one, two) => (one.kind === 'run') - (two.kind === 'run'));
    fill(local, entries.length ? h('ul', { class: 'plain-list' }, entries.map((entry) => {
      const memory = h('div', { class: 'memory-of sideways' });
      const [key, use] = entry.kind === 'run' ? ['model.adapter', t('model.continue')] : ['model.path', t('model.use')];
      return h('li', { class: 'local' }, h('span', { class: 'path' }, entry.path), h('span', { class: 'quiet' }, t(`model.kind.${entry.kind}`)),
        entry.kind === 'model' && action(t('model.estimate'), estimate(() => entry.path, memory), wrong, { class: 'small' }),
        h('button', { type: 'button', class: 'small', 'aria-label': `${use}: ${entry.path}`, onclick: () => useInRecipe([{ path: key, value: entry.path }]) }, use), memory);
    })) : h('p', { class: 'empty' }, t('model.nolocal')));
  }

  get('api/models').then((found) => { if (open) { models = found; draw(); drawLocal(); } }, (error) => fill(wrong, problems(error)));
  get(`api/models/machine?${new URLSearchParams({ page: PAGE })}`).then((found) => {
    if (!open) return;
    limit = found.memory;
    fill(here, t('model.here', { name: found.name, memory: bytes(found.memory) }));
    fill(marks, t('model.marks'));
    draw();
  }, (error) => { if (open) fill(here, problems(error)); });
  return () => { open = false; };
}
