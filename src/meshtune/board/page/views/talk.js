// Talk: one prompt to one or several models, side by side, answered word by word.

import { fill, h } from '../dom.js';
import { number } from '../format.js';
import { t } from '../text.js';
import { answerView } from '../talk/answer.js';
import { messages, save, saved, toolsOf } from '../talk/conversation.js';
import { sends } from '../talk/keys.js';
import { idOf, jobOf, modelPanel, nameOf } from '../talk/models.js';
import { attachments, pictureView } from '../talk/pictures.js';
import { snippets } from '../talk/snippets.js';
import { ask } from '../talk/stream.js';
import { problems } from '../widgets.js';

export const name = 'talk';

const NUMBERS = {
  temperature: { min: 0, max: 5, step: 0.1, value: 0.7 },
  top_p: { min: 0.01, max: 1, step: 0.01, value: 0.95 },
  top_k: { min: 0, step: 1, value: 0 },
  max_tokens: { min: 1, step: 1, value: '' },
  repetition_penalty: { min: 0.1, max: 5, step: 0.05, value: 1 },
  seed: { step: 1, value: '' },
};

const NEAR = 40; // pixels from the end of the page

// `wanted` is a model to offer, from the address.
export function show(place, [wanted]) {
  const state = { turns: [], chosen: [], settings: {}, ...saved() };
  const chosen = new Set(state.chosen);
  const writing = new Map(); // speaker: what stops its answer
  const settings = settingsPanel(state.settings);
  const list = h('div', { class: 'turns' });
  const programs = h('div');
  const prompt = h('textarea', { id: 'prompt', rows: 3, onkeydown: (event) => {
    if (!sends(event)) return;
    event.preventDefault();
    send();
  }, onpaste: (event) => pictures.receive(event) });
  const pictures = attachments(() => prompt.focus());
  const role = h('select', { id: 'role' }, ['user', 'tool'].map((value) => h('option', { value }, t(`talk.${value}`))));
  const sendButton = h('button', { type: 'button', class: 'primary', onclick: () => send() }, t('talk.send'));
  const stopButton = h('button', { type: 'button', hidden: true, onclick: () => stop() }, t('talk.stop'));
  const clear = h('button', { type: 'button', onclick: () => { stop(); state.turns = []; draw(); prompt.focus(); } }, t('talk.clear'));
  const page = document.scrollingElement;
  const panel = modelPanel(chosen, wanted, () => draw());
  const speakers = new Map(); // the elements in which answers that are written now stand

  fill(place, h('h1', {}, t('talk.title')), panel.element, settings.element, list,
    h('form', { class: 'composer card', onsubmit: (event) => { event.preventDefault(); send(); },
      ondragover: (event) => event.preventDefault(), ondrop: (event) => pictures.receive(event) },
      h('label', { for: 'prompt', class: 'hidden' }, t('talk.prompt')), prompt, pictures.element,
      h('div', { class: 'row' }, sendButton, stopButton, clear, h('label', { class: 'hidden', for: 'role' }, t('talk.role')), role,
        h('span', { class: 'quiet hint' }, t('talk.hint')))), programs);
  prompt.placeholder = t('talk.prompt');

  function keep() {
    save({ turns: state.turns, chosen: [...chosen], settings: settings.values() });
  }

  function draw() {
    speakers.clear();
    const order = [...chosen];
    fill(list, state.turns.map((turn, index) => h('article', { class: 'turn' }, promptView(turn, index),
      h('div', { class: 'answers' }, columns(turn, order).map((speaker) => answerCard(turn, index, speaker))))));
    fill(programs, order.slice(0, 1).map(snippets));
    sendButton.disabled = !order.length;
    stopButton.hidden = !writing.size;
    const last = state.turns[state.turns.length - 1];
    const called = last && Object.values(last.answers).some((answer) => answer.calls.length);
    role.hidden = !called;
    if (!called) role.value = 'user';
    keep();
  }

  // Speakers with an answer stay, also after their model was unloaded.
  function columns(turn, order) {
    return [...new Set([...order.filter((speaker) => turn.answers[speaker] || writing.has(speaker)), ...Object.keys(turn.answers)])];
  }

  function promptView(turn, index) {
    return h('div', { class: 'asked' }, turn.pictures?.length > 0 && h('div', { class: 'pictures' }, turn.pictures.map(pictureView)),
      h('p', { class: 'answer' }, turn.text),
      h('button', { type: 'button', class: 'small plain', onclick: () => edit(index) }, t('talk.edit')));
  }

  function answerCard(turn, index, speaker) {
    const busy = writing.has(speaker) && index === state.turns.length - 1;
    const body = h('div', {}, answerView(turn.answers[speaker], busy));
    if (busy) speakers.set(speaker, body);
    return h('section', { class: 'card speaker', 'aria-label': nameOf(speaker), 'aria-busy': busy ? 'true' : 'false' },
      h('div', { class: 'who' }, nameOf(speaker),
        !busy && chosen.has(speaker) && index === state.turns.length - 1
          && h('button', { type: 'button', class: 'small plain', onclick: () => again(speaker) }, t('talk.again'))), body);
  }

  function edit(index) {
    stop();
    prompt.value = state.turns[index].text;
    pictures.put(state.turns[index].pictures ?? []);
    state.turns = state.turns.slice(0, index);
    draw();
    prompt.focus();
  }

  // Keeps the end in view, where it is, while an answer grows: the field for the next message would cover it.
  function following(change) {
    const atEnd = page.scrollTop + page.clientHeight >= page.scrollHeight - NEAR;
    change();
    if (atEnd) page.scrollTop = page.scrollHeight;
  }

  function send() {
    const text = prompt.value.trim();
    if (!text || !chosen.size || writing.size) return;
    const body = settings.request();
    if (!body) return;
    const turn = { role: role.value, text, pictures: pictures.take(), answers: {} };
    state.turns.push(turn);
    prompt.value = '';
    for (const speaker of chosen) answer(turn, speaker, body);
    draw();
    page.scrollTop = page.scrollHeight;
  }

  function again(speaker) {
    const body = settings.request();
    if (!body || writing.has(speaker)) return;
    answer(state.turns[state.turns.length - 1], speaker, body);
    draw();
  }

  async function answer(turn, speaker, { system, ...body }) {
    const control = new AbortController();
    const before = state.turns.slice(0, state.turns.indexOf(turn));
    const asked = messages(system, [...before, { ...turn, answers: {} }], speaker);
    turn.answers[speaker] = { text: '', thinking: '', calls: [], finish: null };
    writing.set(speaker, control);
    let due = false;
    const paint = () => {
      due = false;
      const body = speakers.get(speaker);
      if (body) following(() => fill(body, answerView(turn.answers[speaker], true)));
    };
    try {
      await ask(jobOf(speaker), { ...body, model: idOf(speaker), messages: asked }, control.signal, (value) => {
        turn.answers[speaker] = value;
        if (due) return;
        due = true;
        requestAnimationFrame(paint);
      });
    } catch (error) {
      if (control.signal.aborted) turn.answers[speaker].stopped = true;
      else turn.answers[speaker].error = { problems: error.problems ?? [{ path: null, message: error.message, fix: null }] };
    }
    if (writing.get(speaker) === control) writing.delete(speaker);
    if (place.contains(list)) following(draw);
  }

  function stop() {
    for (const control of writing.values()) control.abort();
    writing.clear();
  }

  // A browser may keep a page that was left, with its requests, for a way back.
  window.addEventListener('pagehide', stop);
  draw();
  return () => {
    window.removeEventListener('pagehide', stop);
    keep();
    stop();
    panel.close();
  };
}

// System prompt, sampling and tools; `request()` gives them as fields of a request, or null where one is refused, which it says beside it.
function settingsPanel(known) {
  const system = h('textarea', { id: 'system', rows: 2, value: known.system ?? '' });
  const tools = h('textarea', { id: 'tools', rows: 4, class: 'code', spellcheck: 'false', 'aria-describedby': 'tools-wrong', value: known.tools ?? '', placeholder: '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' });
  const numbers = Object.fromEntries(Object.entries(NUMBERS).map(([key, { value, ...limits }]) => [key,
    h('input', { type: 'number', id: key, class: 'short', 'aria-describedby': `${key}-wrong`, ...limits, value: known[key] ?? value })]));
  const wrongs = new Map([...Object.values(numbers), tools].map((field) => [field, h('div', { id: `${field.id}-wrong` })]));
  const element = h('details', { class: 'card talk-settings' }, h('summary', {}, t('talk.settings')),
    h('label', { for: 'system' }, t('talk.system')), system,
    h('div', { class: 'entries' }, Object.entries(numbers).map(([key, field]) => h('div', {}, h('label', { for: key }, t(`talk.${key}`)), field, wrongs.get(field)))),
    h('label', { for: 'tools' }, t('talk.tools')), tools, wrongs.get(tools));

  function refuse(field, message) {
    fill(wrongs.get(field), problems({ message }));
    field.setAttribute('aria-invalid', 'true');
    element.open = true;
    field.focus();
    return null;
  }

  return {
    element,
    values: () => ({ system: system.value, tools: tools.value, ...Object.fromEntries(Object.entries(numbers).map(([key, field]) => [key, field.value])) }),
    request() {
      for (const [field, wrong] of wrongs) {
        fill(wrong);
        field.removeAttribute('aria-invalid');
      }
      const body = { system: system.value.trim() };
      for (const [key, field] of Object.entries(numbers)) {
        const message = wrongNumber(field);
        if (message) return refuse(field, message);
        if (field.value !== '') body[key] = Number(field.value);
      }
      try {
        const list = toolsOf(tools.value);
        return list ? { ...body, tools: list } : body;
      } catch (error) {
        return refuse(tools, error.message);
      }
    },
  };
}

// What is wrong with the number in a field, or null. The step of a fraction is that of its arrows alone: 0.75 is as good as 0.7.
function wrongNumber({ min, max, step, validity }) {
  if (validity.badInput) return t('talk.nonumber');
  if (validity.rangeUnderflow || validity.rangeOverflow) {
    return max ? t('talk.between', { least: number(Number(min)), most: number(Number(max)) }) : t('talk.atleast', { least: number(Number(min)) });
  }
  return validity.stepMismatch && step === '1' ? t('talk.whole') : null;
}
