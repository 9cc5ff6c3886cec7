// Evaluate and predict: benchmarks, held-out records and data sets, before and after tuning.

import { choice, dataField, field, modelField, numberOf } from '../entries.js';
import { fill, h } from '../dom.js';
import { launcher } from '../launcher.js';
import { jobResults } from '../results.js';
import { t } from '../text.js';

export const name = 'evaluate';

export function show(place, [wanted]) {
  const model = modelField('model', wanted ?? '');
  const tasks = h('textarea', { id: 'tasks', rows: 3, class: 'code', spellcheck: 'false', placeholder: 'arc_easy=data/arc.jsonl' });
  const records = dataField('data');
  const compare = choice('compare', ['', 'base'], (value) => t(value ? 'evaluate.base' : 'evaluate.alone'));
  const limit = h('input', { type: 'number', id: 'limit', min: 1 });
  const tokens = h('input', { type: 'number', id: 'tokens', min: 1 });
  const output = h('input', { type: 'text', id: 'output', autocomplete: 'off', placeholder: t('evaluate.named') });
  const kind = choice('kind', ['eval', 'predict'], (value) => t(`kind.${value}`), arrange);
  const measured = h('div', {}, field(t('evaluate.tasks'), tasks, t('evaluate.tasksabout')), field(t('evaluate.compare'), compare));
  const recordsField = field(t('evaluate.data'), records.input, t('evaluate.dataabout'));
  const results = jobResults(['eval', 'predict']);
  const panel = launcher(() => ({
    kind: kind.value, model: model.input.value, data: records.input.value, output: output.value, limit: numberOf(limit), max_tokens: numberOf(tokens),
    ...(kind.value === 'eval' && { compare: compare.value, tasks: tasks.value.split('\n').map((line) => line.trim()).filter(Boolean) }),
  }), () => {}, { started: (job) => results.open(job.id), replacing: t('results.aside'), trains: false });

  function arrange() {
    measured.hidden = kind.value !== 'eval';
    recordsField.querySelector('p').hidden = kind.value !== 'eval';
  }

  arrange();
  fill(place, h('h1', {}, t('evaluate.title')), h('section', { class: 'card form' },
    h('div', { class: 'entries' }, field(t('evaluate.kind'), kind)), field(t('talk.model'), model.input), model.choices, measured, recordsField, records.choices,
    h('div', { class: 'entries' }, field(t('evaluate.limit'), limit), field(t('talk.max_tokens'), tokens), field(t('evaluate.output'), output)),
    panel.element), results.element);
  return results.close;
}
