// An answer as it stands: thinking folded, text as text, calls of tools, and how it ended.

import { h } from '../dom.js';
import { duration, number } from '../format.js';
import { t } from '../text.js';
import { problems } from '../widgets.js';

const SHORTEST = 0.05; // seconds of which a speed can be told
const OPEN = '<think>';
const CLOSE = '</think>';

export function answerView(answer, writing) {
  const { thinking, text, open } = parts(answer);
  return h('div', { class: 'said' },
    thinking && h('details', { class: 'thinking', open: open && writing }, h('summary', {}, t(open && writing ? 'talk.thinking' : 'talk.thought')),
      h('p', { class: 'answer' }, thinking)),
    text && h('p', { class: 'answer' }, text, writing && h('span', { class: 'caret' })),
    writing && !text && h('p', { class: 'quiet' }, t('talk.writing')),
    answer.calls.filter(Boolean).map((call) => h('div', { class: 'call' }, h('span', { class: 'quiet' }, t('talk.call')), ' ',
      h('code', {}, `${call.name}(${call.arguments})`))),
    answer.error && problems(answer.error),
    !writing && h('p', { class: 'figures' }, figures(answer)));
}

// Some models write their thinking between marks in the text itself.
function parts({ thinking, text }) {
  const start = text.trimStart();
  if (thinking || !start.startsWith(OPEN)) return { thinking, text, open: !text };
  const end = start.indexOf(CLOSE);
  if (end < 0) return { thinking: start.slice(OPEN.length), text: '', open: true };
  return { thinking: start.slice(OPEN.length, end).trim(), text: start.slice(end + CLOSE.length).trimStart(), open: false };
}

// The speed is that of the tokens after the first.
function figures({ tokens, first, seconds, finish, stopped }) {
  const speed = tokens && t('talk.counted', { n: tokens, tokens: number(tokens) });
  const rate = tokens > 2 && seconds > SHORTEST && t('talk.speed', { rate: number((tokens - 1) / seconds, 3) });
  const wait = typeof first === 'number' && t('talk.first', { time: first < 10 ? t('unit.seconds', { seconds: number(first, 2) }) : duration(first) });
  const end = stopped ? t('talk.stopped') : finish === 'length' ? t('talk.length') : null;
  return [speed, rate, wait, end].filter(Boolean).join(' · ');
}
