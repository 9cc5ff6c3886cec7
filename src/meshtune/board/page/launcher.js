// What stands beside Start: devices or Slurm, whether to start anew, the command line, and what is wrong.

import { get, post } from './api.js';
import { fill, h } from './dom.js';
import { t } from './text.js';
import { action, copyable, problems } from './widgets.js';

// A panel that starts what `body()` gives, {kind, recipe, ...}; `checked(problems, command)` is told what a check said.
// `started(job)` follows a start, and `replacing` says what becomes of an output that is not empty. `trains`: it may be several processes or Slurm's.
// `secrets()` is sent with a start alone. `check()` of the result asks again, as when the form has changed;
// `clear()` forgets what a check said.
export function launcher(body, checked = () => {}, { started = follow, replacing = t('launcher.overwrite'), trains = true, secrets = () => ({}) } = {}) {
  const wrong = h('div');
  const command = h('div');
  const choice = deviceChoice(trains);
  const overwrite = h('input', { type: 'checkbox', id: 'overwrite' });
  const whole = () => ({ ...body(), overwrite: overwrite.checked, ...choice.value() });

  async function check() {
    try {
      const answer = await post('api/check', whole());
      fill(wrong);
      fill(command, copyable(answer.command));
      checked([], answer.command);
    } catch (error) {
      fill(command);
      fill(wrong, problems(error));
      checked(error.problems ?? [], null);
    }
  }

  const start = action(t('launcher.start'), async () => {
    started(await post('api/jobs', { ...whole(), ...secrets() }));
  }, wrong, { class: 'primary' });
  const element = h('div', { class: 'launcher' }, choice.element,
    h('label', {}, overwrite, ' ', replacing), command, wrong,
    h('div', { class: 'row' }, start, h('button', { type: 'button', onclick: check }, t('launcher.check'))));
  return { element, check, clear: () => { fill(command); fill(wrong); } };
}

function follow(job) {
  location.hash = `#/runs/${job.id}`;
}

// Where a job is computed. `value()` is {devices} or that of a scheduler, as POST /api/jobs takes it; what does not train is one process of this machine.
export function deviceChoice(trains = true) {
  const boxes = h('div', { class: 'row' });
  const processes = numberField(1);
  const count = numberField(1);
  const beside = h('input', { type: 'checkbox' });
  const schedulers = {
    slurm: { nodes: numberField(1), gpus: numberField(8, 0), time: textField('4:00:00'), partition: textField(''), account: textField('') },
    kubernetes: { image: h('input', { type: 'text' }), claim: textField(''), nodes: numberField(1), devices: numberField(8, 0), queue: textField(''), namespace: textField('') },
  };
  const rest = h('div', { class: 'row' },
    trains && [h('label', {}, t('launcher.processes'), ' ', processes), h('label', {}, t('launcher.count'), ' ', count)],
    h('label', {}, beside, ' ', t('launcher.beside')));
  const here = h('div', {}, boxes, h('details', {}, h('summary', {}, t('launcher.more')), rest));
  const rows = Object.entries(schedulers).map(([scheduler, fields]) => h('div', { class: 'row', hidden: true, 'data-scheduler': scheduler },
    Object.entries(fields).map(([name, field]) => h('label', {}, t(`launcher.${name === 'devices' ? 'gpus' : name}`), ' ', field))));
  const where = h('select', { onchange: () => {
    here.hidden = where.value !== 'here';
    for (const row of rows) row.hidden = row.dataset.scheduler !== where.value;
  } }, h('option', { value: 'here' }, t('launcher.here')));
  const element = h('fieldset', {}, h('legend', {}, t('launcher.devices')), h('label', { hidden: true }, t('launcher.where'), ' ', where), here, rows);

  get('api/machine').then((machine) => {
    if (machine.devices.length < 2) fill(boxes, h('span', { class: 'quiet' }, machine.devices.map((device) => device.name)));
    else fill(boxes, machine.devices.map((device) => h('label', {},
      h('input', { type: 'checkbox', name: 'device', value: device.key }), ' ', device.name)),
    h('span', { class: 'quiet' }, t('launcher.all')));
    if (!machine.schedulers.length || !trains) return;
    where.append(...machine.schedulers.map((name) => h('option', { value: name }, t(`launcher.${name}`))));
    where.parentElement.hidden = false;
  }, () => {});

  return {
    element,
    value() {
      if (where.value in schedulers) {
        const given = Object.entries(schedulers[where.value]).filter(([, field]) => field.value);
        return { [where.value]: Object.fromEntries(given.map(([name, field]) => [name, field.type === 'number' ? Number(field.value) : field.value])) };
      }
      const keys = [...boxes.querySelectorAll('input:checked')].map((box) => box.value);
      return { devices: { keys, count: Number(count.value) || 1, processes: Number(processes.value) || 1, beside: beside.checked } };
    },
  };
}

function numberField(value, min = 1) {
  return h('input', { type: 'number', min, max: 4096, value, class: 'short' });
}

function textField(value) {
  return h('input', { type: 'text', value, class: 'short' });
}
