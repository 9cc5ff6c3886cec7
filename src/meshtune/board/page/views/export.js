// Export: an adapter, a whole model, GGUF or codes, into a folder or to the hub.

import { choice, field, modelField } from '../entries.js';
import { fill, h } from '../dom.js';
import { launcher } from '../launcher.js';
import { jobResults } from '../results.js';
import { t } from '../text.js';

export const name = 'export';

const TYPES = {
  gguf: ['Q8_0', 'Q4_K_M', 'Q5_K_M', 'Q6_K', 'Q4_0', 'F16', 'BF16', 'F32'],
  codes: ['bitsandbytes', 'compressed-tensors', 'published'],
};

export function show(place, [wanted]) {
  const model = modelField('model', wanted ?? '');
  const form = choice('form', ['adapter', 'merged', 'gguf', 'codes'], (value) => t(`export.${value}`), arrange);
  const type = h('select', { id: 'type' });
  const merge = h('input', { type: 'checkbox', id: 'merge', checked: true });
  const kind = choice('kind', ['export', 'push'], (value) => t(`export.${value}to`), arrange);
  const output = h('input', { type: 'text', id: 'output', autocomplete: 'off', placeholder: t('evaluate.named') });
  const repository = h('input', { type: 'text', id: 'repository', autocomplete: 'off', spellcheck: 'false', placeholder: 'user/name' });
  const token = h('input', { type: 'password', id: 'token', autocomplete: 'off', spellcheck: 'false', placeholder: 'hf_…' });
  const open = h('input', { type: 'checkbox', id: 'public' });
  const typeField = field(t('export.type'), type);
  const mergeField = h('label', { class: 'tick' }, merge, ' ', t('export.merge'));
  const folder = field(t('evaluate.output'), output);
  const hub = h('div', {}, field(t('export.repository'), repository), field(t('export.token'), token, t('export.login')), h('label', { class: 'tick' }, open, ' ', t('export.public')));
  const results = jobResults(['export', 'push']);
  const secrets = () => {
    const given = kind.value === 'push' && token.value ? { token: token.value } : {};
    token.value = '';
    return given;
  };
  const panel = launcher(() => ({
    kind: kind.value, model: model.input.value, form: form.value, type: TYPES[form.value] ? type.value : '', merge: merge.checked,
    ...(kind.value === 'export' ? { output: output.value } : { repository: repository.value, public: open.checked }),
  }), () => {}, { started: (job) => results.open(job.id), replacing: t('export.replacing'), trains: false, secrets });

  function arrange() {
    const types = TYPES[form.value];
    typeField.hidden = !types;
    mergeField.hidden = !types;
    if (types && type.dataset.form !== form.value) fill(type, types.map((value) => h('option', { value }, value)));
    type.dataset.form = form.value;
    folder.hidden = kind.value !== 'export';
    hub.hidden = !folder.hidden;
  }

  arrange();
  fill(place, h('h1', {}, t('export.title')), h('section', { class: 'card form' },
    field(t('talk.model'), model.input), model.choices,
    h('div', { class: 'entries wide' }, field(t('export.form'), form), typeField, field(t('export.where'), kind)), mergeField, folder, hub,
    panel.element), results.element);
  return results.close;
}
