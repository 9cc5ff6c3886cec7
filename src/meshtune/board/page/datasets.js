// What the model sees of data: documents with what is trained on, and lengths.

import { h, svg } from './dom.js';
import { number } from './format.js';
import { pictureView } from './talk/pictures.js';
import { t } from './text.js';

// A document's text. What is trained on is a <mark>, underlined too, so that it is told apart without colours.
export function documentView(example) {
  const runs = [];
  for (const [text, weight] of example.pieces) {
    const last = runs[runs.length - 1];
    if (last && last.weight === weight) last.text += text;
    else runs.push({ text, weight });
  }
  return h('details', { class: 'document', open: true },
    h('summary', {}, h('code', {}, example.origin), ' ', h('span', { class: 'quiet' }, t('data.tokens', { n: example.tokens, count: number(example.tokens, 9) }))),
    example.pictures?.length > 0 && h('div', { class: 'pictures' }, example.pictures.map(pictureView)),
    h('p', { class: 'tokens' }, runs.map(({ text, weight }) => (weight
      ? h('mark', { class: 'trained', title: weight === 1 ? t('data.trained') : `${t('data.trained')} × ${weight}` }, text)
      : h('span', { class: 'prompt' }, text)))));
}

export function reportFacts(report) {
  const share = report.trained_tokens / Math.max(1, report.tokens);
  const facts = {
    samples: number(report.samples, 9), leftout: report.left_out ? number(report.left_out, 9) : null, alltokens: number(report.tokens, 9),
    trainedshare: percent(share), rows: number(report.rows, 9), filled: percent(report.efficiency), longest: number(report.longest, 9), steps: number(report.steps_per_epoch, 9),
  };
  return h('dl', { class: 'facts' }, Object.entries(facts).filter(([, value]) => value !== null)
    .map(([key, value]) => h('div', {}, h('dt', {}, t(`data.fact.${key}`)), h('dd', {}, value))));
}

const percent = (share) => `${number(100 * share, 3)} %`;

// Documents by length; the numbers stand in the table for those who do not see bars.
export function histogram(report) {
  const largest = Math.max(...report.histogram.map(([, , count]) => count));
  return h('table', { class: 'histogram' }, h('caption', {}, t('data.lengths')),
    h('thead', { class: 'hidden' }, h('tr', {}, h('th', {}, t('data.lengths')), h('th', {}, t('data.fact.samples')))),
    h('tbody', {}, report.histogram.map(([shortest, longest, count]) => h('tr', {},
      h('th', { scope: 'row' }, `${number(shortest, 9)} – ${number(longest, 9)}`), h('td', {}, number(count, 9)),
      h('td', { class: 'wide-bar', 'aria-hidden': 'true' }, svg('svg', { viewBox: '0 0 100 8', preserveAspectRatio: 'none' },
        svg('rect', { x: 0, y: 0, width: (100 * count) / largest, height: 8 })))))));
}
