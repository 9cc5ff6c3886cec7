// Parts that several pages use.

import { h } from './dom.js';
import { duration, percent } from './format.js';
import { has, t } from './text.js';

// What was refused, as a list; a screen reader says it at once.
export function problems(error) {
  const list = error.problems ?? [{ path: null, message: error.message, fix: null }];
  return h('div', { class: 'problems', role: 'alert' }, list.map((problem) => h('p', {},
    problem.path && h('code', {}, problem.path), problem.path && ' ', problem.message,
    problem.fix && h('span', { class: 'fix' }, `${t('shared.fix')}: ${problem.fix}`))));
}

// A button that cannot be pressed again while what it does is under way, and shows what goes wrong in `where`.
export function action(label, act, where, props = {}) {
  const button = h('button', { type: 'button', ...props, onclick: async () => {
    button.disabled = true;
    try {
      where?.replaceChildren();
      await act();
    } catch (error) {
      where?.replaceChildren(problems(error));
    } finally {
      button.disabled = false;
    }
  } }, label);
  return button;
}

// How far the stage is that a job is in, while it runs: its name, a bar, and per cent.
export function stageBar(job) {
  const { stage, done, total, left } = job.stage ?? {};
  if (!total || !['running', 'stopping'].includes(job.state)) return null;
  const name = has(`stage.${stage}`) ? t(`stage.${stage}`) : stage;
  return h('span', { class: 'progress' }, h('progress', { value: done, max: total, 'aria-label': name }), name, ' ', percent(Math.floor((100 * done) / total) / 100),
    left > 0 && h('span', { class: 'quiet' }, t('shared.left', { time: duration(left) })));
}

// Text to copy, such as a command.
export function copyable(text) {
  const button = h('button', { type: 'button', class: 'small', onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = t('shared.copied');
  } }, t('shared.copy'));
  return h('div', { class: 'copyable' }, h('code', { tabindex: 0 }, text), button);
}

// A question before what cannot be undone; resolves to whether it is to be done.
export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = h('dialog', { 'aria-label': question, onclose: () => { dialog.remove(); resolve(dialog.returnValue === 'yes'); } },
      h('p', {}, question),
      h('div', { class: 'row' },
        h('button', { type: 'button', onclick: () => dialog.close('no') }, t('shared.cancel')),
        h('button', { type: 'button', class: 'danger', onclick: () => dialog.close('yes') }, yes)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
