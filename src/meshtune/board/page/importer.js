// A dialog that translates another tool's recipe, and says what became of each of its keys.

import { post } from './api.js';
import { fill, h } from './dom.js';
import { t } from './text.js';
import { action } from './widgets.js';

const VERDICTS = ['refused', 'unknown', 'differs', 'no effect', 'translated'];

// `use(recipe)` is called with the translation once a person takes it.
export function importDialog(use, text = '') {
  const area = h('textarea', { class: 'code', id: 'foreign', rows: 10, value: text, spellcheck: 'false' });
  const devices = h('input', { type: 'number', id: 'foreign-devices', min: 1, value: 1, class: 'short' });
  const file = h('input', { type: 'file', id: 'foreign-file', accept: '.yaml,.yml,.json,.sh,.py', onchange: async () => {
    if (file.files[0]) area.value = await file.files[0].text();
  } });
  const result = h('div', { 'aria-live': 'polite' });
  const wrong = h('div');
  const translate = async () => {
    const answer = await post('api/recipe/import', { text: area.value, devices: Number(devices.value) || 1 });
    fill(result, answer.refused && h('p', { class: 'problems' }, t('import.refused')), findings(answer.findings),
      answer.recipe && h('button', { type: 'button', class: 'primary', onclick: () => { use(answer.recipe); dialog.close(); } }, t('import.use')));
  };
  const dialog = h('dialog', { class: 'wide', 'aria-labelledby': 'import-title', onclose: () => dialog.remove() },
    h('h2', { id: 'import-title' }, t('import.title')), h('p', { class: 'quiet' }, t('import.about')),
    h('div', { class: 'row' }, h('label', { for: 'foreign-file' }, t('import.file')), file),
    h('label', { for: 'foreign' }, t('import.text')), area,
    h('div', { class: 'row' }, h('label', { for: 'foreign-devices' }, t('import.devices')), devices,
      action(t('import.translate'), translate, wrong, { class: 'primary' }),
      h('button', { type: 'button', onclick: () => dialog.close() }, t('shared.cancel'))),
    wrong, result);
  document.body.append(dialog);
  dialog.showModal();
}

function findings(list) {
  const groups = VERDICTS.map((verdict) => [verdict, list.filter((finding) => finding.verdict === verdict)]).filter(([, some]) => some.length);
  return groups.map(([verdict, some]) => h('details', { open: verdict !== 'translated' },
    h('summary', {}, `${t(`import.${verdict.replace(' ', '')}`)} (${some.length})`),
    h('ul', { lang: 'en' }, some.map((finding) => h('li', {}, h('code', {}, finding.key), finding.to && [' → ', h('code', {}, finding.to)],
      finding.note && ` ${finding.note}`, finding.fix && h('span', { class: 'quiet' }, ` ${finding.fix}`))))));
}
