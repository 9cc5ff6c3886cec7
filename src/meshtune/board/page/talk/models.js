// The models that are loaded, which of them answer, and a place to load another.

import { get, post } from '../api.js';
import { fill, h } from '../dom.js';
import { t } from '../text.js';
import { action } from '../widgets.js';

const ACTIVE = ['queued', 'running', 'stopping'];
const QUANTIZED = ['auto', 'none', 'nf4', 'int8', 'fp8', 'int4'];

// `chosen` is a set of speakers, JOB and id with a space between; `wanted` a model to offer first; `changed` is called when models or choice change.
export function modelPanel(chosen, wanted, changed) {
  const list = h('div', { class: 'list' });
  const wrong = h('div');
  const choices = h('datalist', { id: 'models' });
  const path = h('input', { type: 'text', id: 'model', list: 'models', required: true, autocomplete: 'off', spellcheck: 'false', value: wanted ?? '', placeholder: t('talk.placeholder') });
  const quantize = h('select', { id: 'quantize' }, QUANTIZED.map((name) => h('option', { value: name }, name === 'auto' ? t('talk.auto') : name)));
  const template = h('select', { id: 'template' }, h('option', { value: '' }, t('talk.own')));
  const adapters = h('textarea', { id: 'adapters', rows: 2, class: 'code', spellcheck: 'false', placeholder: 'polite=runs/polite' });
  const form = h('form', { class: 'loader', onsubmit: (event) => { event.preventDefault(); load.click(); } },
    h('div', { class: 'grow' }, h('label', { for: 'model' }, t('talk.model')), path, choices),
    h('div', {}, h('label', { for: 'quantize' }, t('talk.quantize')), quantize),
    h('div', {}, h('label', { for: 'template' }, t('talk.template')), template));
  const load = action(t('talk.load'), async () => {
    await post('api/jobs', { kind: 'serve', model: path.value, quantize: quantize.value, chat_template: template.value,
      adapters: adapters.value.split('\n').map((line) => line.trim()).filter(Boolean), devices: { beside: true } });
    path.value = adapters.value = '';
    await refresh();
  }, wrong, { class: 'primary', type: 'submit' });
  form.append(load, h('details', { class: 'over' }, h('summary', {}, t('talk.adapters')),
    h('label', { class: 'hidden', for: 'adapters' }, t('talk.adapters')), adapters, h('p', { class: 'quiet' }, t('talk.adaptersabout'))));
  const element = h('section', { class: 'card', 'aria-label': t('talk.models') }, list, form, wrong);
  let models = [];
  let timer = null;
  let shown = '';

  get('api/catalogue').then(({ entries }) => {
    fill(choices, entries.map((entry) => h('option', { value: entry.path }, t(`catalogue.${entry.kind}`))));
  }, () => {});

  async function refresh() {
    clearTimeout(timer);
    try {
      const answer = await get('api/talk');
      models = answer.models;
      if (template.length === 1) template.append(...answer.chat_templates.map((name) => h('option', { value: name }, name)));
      const speakers = new Set(models.flatMap(speakersOf));
      for (const speaker of [...chosen]) {
        if (!speakers.has(speaker) && !models.some((model) => speaker.startsWith(`${model.job} `) && model.state === 'running')) chosen.delete(speaker);
      }
      if (!chosen.size && speakers.size) chosen.add([...speakers][0]);
      draw();
    } catch {
      // The board does not answer; it is asked again.
    }
    timer = setTimeout(refresh, models.some((model) => ACTIVE.includes(model.state) && !model.ids.length) ? 1000 : 5000);
  }

  function draw() {
    const state = JSON.stringify([models, [...chosen]]);
    if (state === shown) return;
    shown = state;
    const active = models.filter((model) => ACTIVE.includes(model.state) || model.state === 'failed' || model.state === 'lost');
    fill(list, active.length ? active.map(row) : h('p', { class: 'empty' }, t('talk.none')));
    changed(models);
  }

  function row(model) {
    const failed = !ACTIVE.includes(model.state);
    const end = failed
      ? action(t('talk.dismiss'), async () => { await post(`api/jobs/${model.job}/remove`); await refresh(); }, wrong, { class: 'small' })
      : action(t('talk.unload'), async () => { await post(`api/jobs/${model.job}/stop`); await refresh(); }, wrong, { class: 'small' });
    const mark = model.ids.length ? null : h('span', { class: `state ${model.state}` }, model.state === 'running' ? t('talk.loading') : t(`state.${model.state}`));
    return h('div', { class: 'loaded' }, h('span', { class: 'name' }, model.name), mark,
      speakersOf(model).map((speaker) => h('label', { class: 'pick' }, h('input', { type: 'checkbox', checked: chosen.has(speaker), onchange: (event) => {
        if (event.target.checked) chosen.add(speaker);
        else chosen.delete(speaker);
        draw();
      } }), ' ', nameOf(speaker))),
      h('a', { class: 'quiet', href: `#/runs/${model.job}` }, t('talk.log')), end,
      model.reason && h('pre', { class: 'problems' }, model.reason));
  }

  refresh();
  return { element, close: () => clearTimeout(timer) };
}

export function speakersOf(model) {
  return model.ids.map((id) => `${model.job} ${id}`);
}

export const jobOf = (speaker) => speaker.slice(0, speaker.indexOf(' '));
export const idOf = (speaker) => speaker.slice(speaker.indexOf(' ') + 1);

// The end of an id, which is the path of a folder where nobody gave it another.
export const nameOf = (speaker) => idOf(speaker).split('/').filter(Boolean).slice(-2).join('/');
