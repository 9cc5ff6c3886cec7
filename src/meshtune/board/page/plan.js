// The plan beside Start: whether the recipe fits a machine, its memory as a bar, time and cost, and what `auto` chooses.

import { post } from './api.js';
import { fill, h, svg } from './dom.js';
import { bytes, duration, number } from './format.js';
import { has, said, t } from './text.js';
import { action, problems } from './widgets.js';

const CALM = 350; // ms without a change
const COUNT = 1200; // ms before the data are counted
const WIDTH = 1000;
const NEEDED = ['model', 'model.path', 'data', 'data.train', 'output']; // without these there is no plan yet
const PAGE = crypto.randomUUID?.() ?? String(Math.random());

// A panel; `update(recipe, problems, values)` plans the recipe or shows what is wrong with it, `close()` ends it. `apply(changes)` changes the recipe, `chosen(choices)` is
// told what each automatic choice comes to.
export function planPanel(devices, apply, chosen) {
  const target = h('input', { type: 'text', id: 'target', list: 'targets', value: localStorage.getItem('target') ?? '', placeholder: t('plan.here'), onchange: changed });
  const names = h('datalist', { id: 'targets' }, Object.keys(devices).filter((name) => name !== 'CPU')
    .flatMap((name) => [1, 8].map((count) => h('option', { value: `${count}x${name}` }))));
  const priced = h('span', { class: 'together' });
  const price = h('input', { type: 'text', inputmode: 'decimal', id: 'price', class: 'short', value: localStorage.getItem('price') ?? '', onchange: changed });
  const wrong = h('div');
  const result = h('div', { class: 'estimate', 'aria-live': 'polite' });
  const compile = action(t('plan.compile'), () => ask({ compile: true, count: true }), wrong, { class: 'small' });
  const element = h('section', { class: 'card plan', 'aria-labelledby': 'plan-title' },
    h('h2', { id: 'plan-title' }, t('plan.title')),
    h('div', { class: 'row' }, h('label', { for: 'target' }, t('plan.target')), target, names, priced),
    result, wrong, h('div', { class: 'row' }, compile, h('span', { class: 'quiet' }, t('plan.about'))));
  let recipe = '';
  let known = [''];
  let timer = null;
  let asked = 0;

  priced.append(h('label', { for: 'price' }, t('plan.price')), price);
  priced.hidden = !target.value.trim(); // this machine is not rented

  function changed() {
    priced.hidden = !target.value.trim();
    localStorage.setItem('target', target.value.trim());
    localStorage.setItem('price', price.value.trim());
    update(...known);
  }

  function update(text, found = [], values = {}) {
    known = [text, found, values];
    recipe = found.length ? '' : text;
    asked += 1;
    clearTimeout(timer);
    element.classList.add('stale');
    if (!recipe.trim()) {
      element.classList.remove('stale');
      const absent = { model: !values?.model?.path, data: !values?.data?.train, output: !values?.output };
      const others = found.filter((problem) => !(NEEDED.includes(problem.path) && absent[problem.path.split('.')[0]]));
      fill(wrong, others.length > 0 && problems({ problems: others }));
      fill(result, h('p', { class: 'quiet' }, t(others.length ? 'plan.wrong' : 'plan.empty')));
      return;
    }
    timer = setTimeout(async () => {
      const plan = await ask({}).catch(show);
      if (plan && plan.steps === null) timer = setTimeout(() => ask({ count: true }).catch(show), COUNT);
    }, CALM);
  }

  async function ask(options) {
    const current = ++asked;
    clearTimeout(timer); // a count that is due would end what is asked now
    element.classList.add('stale');
    try {
      const answer = await post('api/plan', { recipe, target: target.value.trim() || 'here', price: (!priced.hidden && Number(price.value)) || null, page: PAGE, ...options });
      if (current !== asked) return null;
      fill(wrong);
      fill(result, drawn(answer.plan, apply), choiceTable(answer.choices));
      chosen(answer.choices);
      return answer.plan;
    } catch (error) {
      if (current !== asked || error.status === 409) return null;
      throw error;
    } finally {
      if (current === asked) element.classList.remove('stale');
    }
  }

  function show(error) {
    fill(result);
    fill(wrong, problems(error));
  }

  return { element, update, close: () => { clearTimeout(timer); asked += 1; } };
}

function drawn(plan, apply) {
  const verdict = plan.fits_as_it_is ? 'fits' : plan.fits ? 'fitswith' : 'fitsnot';
  const overrides = Object.entries(plan.recipe_overrides).map(([path, value]) => ({ path, value }));
  return [
    h('p', { class: `verdict ${verdict}` }, h('strong', {}, t(`plan.${verdict}`)), ' ',
      t('plan.memory', { used: bytes(plan.device_bytes), capacity: bytes(plan.device_capacity), target: plan.target })),
    bar(plan),
    h('dl', { class: 'facts' },
      fact('time', plan.run_seconds === null ? '–' : `≈ ${duration(plan.run_seconds)}`),
      fact('cost', plan.cost === null ? null : number(plan.cost, 3)),
      fact('updates', plan.steps === null ? '–' : number(Math.round(plan.steps))),
      fact('step', duration2(plan.step_seconds)),
      fact('speed', number(Math.round(plan.tokens_per_second))),
      fact('source', plan.estimated ? t('plan.estimate') : plan.compiler)),
    plan.reason && h('p', { class: 'quiet', lang: 'en' }, plan.reason),
    !plan.fits_as_it_is && remedies(plan),
    !plan.fits_as_it_is && plan.fits && h('button', { type: 'button', class: 'primary', onclick: () => apply(overrides) }, t('plan.makefit')),
    !plan.fits && h('p', {}, plan.smallest_machine ? t('plan.smallest', { machine: plan.smallest_machine }) : t('plan.nomachine')),
  ];
}

const duration2 = (seconds) => (seconds < 1 ? t('plan.milliseconds', { n: number(seconds * 1000, 3) }) : duration(seconds));

const fact = (name, value) => value !== null && h('div', {}, h('dt', {}, t(`plan.${name}`)), h('dd', {}, value));

// The memory of one device by what takes it, to the scale of what it has (or of what is asked, if that is more).
function bar(plan) {
  const whole = Math.max(plan.device_capacity, plan.device_bytes);
  const parts = Object.entries(plan.breakdown).filter(([, size]) => size > 0);
  let x = 0;
  const rectangles = parts.map(([role, size]) => {
    const width = (size / whole) * WIDTH;
    x += width;
    return svg('rect', { x: x - width, y: 0, width: Math.max(width, 1), height: 28, class: `role-${role}` });
  });
  const limit = (plan.limit / whole) * WIDTH;
  return h('figure', { class: 'memory' },
    svg('svg', { viewBox: `0 0 ${WIDTH} 28`, preserveAspectRatio: 'none', role: 'img', 'aria-label': t('plan.bar', { share: Math.round((plan.device_bytes / plan.device_capacity) * 100) }) },
      svg('rect', { x: 0, y: 0, width: WIDTH, height: 28, class: 'free' }), rectangles,
      svg('line', { x1: limit, x2: limit, y1: 0, y2: 28, class: 'limit' })),
    h('figcaption', { class: 'legend' }, parts.map(([role, size]) => h('span', {}, h('span', { class: `swatch role-${role}` }), t(`plan.role.${role}`), ' ', bytes(size)))));
}

function remedies(plan) {
  return h('ul', { class: 'remedies' }, plan.remedies.map(({ templates, refused, device_bytes }) => h('li', { class: refused ? 'quiet' : null },
    h('strong', {}, said(templates.remedy)), ': ', refused ? said(templates.refused) : `${said(templates.cost)} → ${bytes(device_bytes)}`)));
}

function choiceTable(choices) {
  return h('details', { class: 'choices', open: true }, h('summary', {}, t('plan.choices')), h('table', {},
    h('thead', { class: 'hidden' }, h('tr', {}, h('th', {}, t('plan.key')), h('th', {}, t('plan.value')), h('th', {}, t('plan.why')))),
    h('tbody', {}, choices.map(({ name, templates }) => h('tr', { class: name === 'warning' ? 'caution' : null },
      h('th', { scope: 'row' }, nameOf(name)),
      h('td', {}, h('strong', {}, said(templates.value)), ' ', h('span', { class: 'quiet' }, said(templates.reason))))))));
}

// The name of a choice: that of its key in the form, or of what it is about.
function nameOf(choice) {
  const key = [`recipe.field.${choice.replace('.', '_')}`, `plan.choice.${choice}`].find(has);
  return key ? t(key) : choice;
}
