// Data: files and uploads, the sources of the recipe, and what the model will see of them.

import { get, post, upload } from '../api.js';
import { documentView, histogram, reportFacts } from '../datasets.js';
import { fill, h } from '../dom.js';
import { readDraft, writeDraft } from '../draft.js';
import { bytes, number } from '../format.js';
import { t } from '../text.js';
import { problems } from '../widgets.js';
import { zipOf } from '../zip.js';

export const name = 'data';

const FORMATS = ['alpaca', 'sharegpt', 'messages', 'prompt_completion', 'text', 'preference', 'openai', 'hh', 'stanford_alpaca', 'hermes', 'xlam'];
const MIXINGS = ['concat', 'interleave_under', 'interleave_over'];
const PAGE = String(Math.random());
const QUESTION_AND_ANSWER = [['alpaca', 'instruction', 'output'], ['prompt_completion', 'prompt', 'completion']];
const [UPDATES, BATCH] = [4, 16]; // an epoch has at least so many updates; the batch where a recipe names none
const TYPES = '.json,.jsonl,.csv,.tsv,.txt,.zip';
const FOLDER_TYPES = /\.(jsonl?|csv|tsv|txt|png|jpe?g|webp)$/i;

export function show(place) {
  let values = {};
  let seen = null;
  let asked = 0;
  let open = true;
  const wrong = h('div');
  const files = h('div');
  const sources = h('div');
  const options = h('div', { class: 'form-grid options' });
  const result = h('div', { 'aria-live': 'polite' });
  const reading = h('p', { class: 'quiet', role: 'status' });
  const guesses = new Map(); // columns that a person has chosen of a source whose format is not known, by its name
  const picker = h('input', { type: 'file', multiple: true, accept: TYPES, id: 'upload', class: 'hidden', tabindex: -1, 'aria-label': t('data.choose'), onchange: () => send([...picker.files]) });
  const folder = h('input', { type: 'file', webkitdirectory: true, id: 'upload-folder', class: 'hidden', tabindex: -1, 'aria-label': t('data.folder'), onchange: () => sendFolder([...folder.files]) });
  const drop = h('div', { class: 'drop' },
  h('p', {}, t('data.drop')), h('button', { type: 'button', onclick: () => picker.click() }, t('data.choose')), picker, ' ',
  h('button', { type: 'button', onclick: () => folder.click() }, t('data.folder')), folder,
  h('p', { class: 'quiet' }, t('data.types')));
  const hub = h('input', { type: 'text', id: 'hub', placeholder: t('data.hubhint') });

  fill(place, h('h1', {}, t('data.title')), h('p', { class: 'quiet' }, t('data.about')), wrong,
    h('div', { class: 'split' },
      h('div', {},
        h('section', { class: 'card' }, h('h2', {}, t('data.sources')), sources, options,
          h('div', { class: 'row' }, h('a', { class: 'button primary', href: '#/recipe', onclick: toRecipe }, t('data.use')))),
        h('section', { class: 'card' }, h('h2', {}, t('data.seen')), reading, result)),
      h('div', { class: 'side' }, h('section', { class: 'card' }, h('h2', {}, t('data.files')), drop,
        h('form', { class: 'row', onsubmit: (event) => { event.preventDefault(); if (hub.value.trim()) { add(hub.value.trim()); hub.value = ''; } } },
          h('label', { for: 'hub' }, t('data.hub')), hub, h('button', {}, t('data.add'))), files))));

  // A file may be dropped anywhere: beside the marked place a browser would open it and leave the board.
  const dragging = {
    dragover: (event) => { event.preventDefault(); drop.classList.add('over'); },
    dragleave: (event) => { if (!event.relatedTarget) drop.classList.remove('over'); },
    drop: (event) => { event.preventDefault(); drop.classList.remove('over'); send([...event.dataTransfer.files]); },
  };
  for (const [kind, take] of Object.entries(dragging)) window.addEventListener(kind, take);

  async function send(list) {
    for (const file of list) {
      fill(wrong, h('p', { role: 'status' }, t('data.sending', { name: file.name })));
      try {
        const { path } = await upload(`api/data/upload?${new URLSearchParams({ name: file.name })}`, file);
        fill(wrong);
        await add(path);
      } catch (error) {
        fill(wrong, problems(error));
      }
    }
    picker.value = '';
    listFiles();
  }

  // A folder of pictures with a table goes as one zip; other files in it stay here.
  async function sendFolder(list) {
    folder.value = '';
    const files = list.filter((file) => FOLDER_TYPES.test(file.name)).map((file) => ({ name: file.webkitRelativePath, file }));
    if (!files.length) return;
    await send([new File([await zipOf(files)], `${files[0].name.split('/')[0]}.zip`)]);
  }

  async function listFiles() {
    const { files: list } = await get('api/data/files');
    fill(files, list.length ? h('ul', { class: 'plain-list' }, list.map((file) => h('li', {},
      h('span', { class: 'path' }, file.path), h('span', { class: 'quiet' }, bytes(file.bytes)),
      file.registry
        ? h('button', { type: 'button', class: 'small', onclick: () => change([{ path: 'data.registry', value: file.path }]) }, t('data.registry'))
        : h('button', { type: 'button', class: 'small', 'aria-label': `${t('data.add')}: ${file.path}`, onclick: () => add(file.path) }, t('data.add'))))) : h('p', { class: 'empty' }, t('data.nofiles')));
  }

  const current = () => values?.data?.train ?? [];
  const nameOf = (source) => source.path ?? source.name;

  // Few records get so small a batch that an epoch has some updates, where the recipe names none.
  async function toRecipe(event) {
    const rows = seen?.reports?.find((report) => report.split === 'train')?.rows ?? Infinity;
    if (rows >= UPDATES * BATCH || values?.train?.batch_size !== undefined) return;
    event.preventDefault();
    await change([{ path: 'train.batch_size', value: 2 ** Math.max(0, Math.floor(Math.log2(rows / UPDATES))) }]);
    location.hash = '#/recipe';
  }

  const add = (path) => change(() => (current().some((source) => source.path === path) ? null : [{ path: 'data.train', value: [...current(), { path }] }]));
  // `fields` of a source, or a function that gives them for what the source is by then.
  const replace = (index, fields) => change(() => {
    const next = current().map((source, at) => (at === index ? tidy({ ...source, ...(typeof fields === 'function' ? fields(source) : fields) }) : source)).filter(Boolean);
    return [next.length ? { path: 'data.train', value: next } : { path: 'data' }];
  });

  // The source without what is empty; null for one that is removed.
  function tidy(source) {
    const kept = Object.entries(source).filter(([, value]) => value !== '' && value !== undefined && !(typeof value === 'object' && !Object.keys(value).length));
    const result = Object.fromEntries(kept);
    return result.path || result.name ? result : null;
  }

  // One change after another: each starts from the recipe that the one before it left.
  let queue = Promise.resolve();
  function change(changes) {
    queue = queue.then(() => apply(typeof changes === 'function' ? changes() : changes));
    return queue;
  }

  async function apply(changes) {
    if (!changes) return;
    try {
      const answer = await post('api/recipe', { recipe: readDraft(), changes });
      writeDraft(answer.recipe);
      if (answer.values === null) { fill(wrong, problems({ problems: answer.problems })); return; }
      values = answer.values;
      const own = answer.problems.filter((problem) => problem.path?.startsWith('data.'));
      fill(wrong, own.length ? problems({ problems: own }) : null);
      if (seen) seen.stale = true; // its problems may be mended
      draw();
      if (!own.length) look();
    } catch (error) {
      fill(wrong, problems(error));
    }
  }

  async function look() {
    const number_ = ++asked;
    if (!current().length) {
      fill(reading);
      fill(result, h('p', { class: 'empty' }, t('data.none')));
      return;
    }
    fill(reading, t('data.reading', { name: current().map(nameOf).join(', ') }));
    if (result.querySelector('.empty')) fill(result);
    result.classList.add('stale');
    try {
      const answer = await post('api/data/preview', { recipe: readDraft(), page: PAGE });
      if (!open || number_ !== asked) return;
      seen = answer;
      draw();
      drawResult();
    } catch (error) {
      if (number_ === asked && error.status !== 409) fill(result, problems(error));
    } finally {
      if (number_ === asked) {
        result.classList.remove('stale');
        fill(reading);
      }
    }
  }

  const controls = () => [sources, options].flatMap((part) => [...part.querySelectorAll('select, input, button, summary')]);

  // Whoever goes from field to field by keys stays where they are.
  function draw() {
    const focused = controls().indexOf(document.activeElement);
    drawFields();
    if (focused >= 0) controls()[focused]?.focus();
  }

  function drawFields() {
    fill(sources, current().length ? current().map(sourceCard) : h('p', { class: 'empty' }, t('data.none')));
    const registry = (seen?.names ?? []).filter((entry) => !current().some((source) => source.name === entry));
    const data = values?.data ?? {};
    const validation = Array.isArray(data.validation) ? data.validation.map((source) => source.path ?? source.name).join(', ') : data.validation ?? '';
    fill(options,
      labelled('data.validation', h('input', { type: 'text', value: validation, placeholder: '0.05', onchange: (event) => change([event.target.value.trim()
        ? { path: 'data.validation', text: event.target.value } : { path: 'data.validation' }]) })),
      labelled('data.length', h('input', { type: 'text', inputmode: 'numeric', value: data.max_length ?? '', placeholder: '1024', onchange: (event) => change([event.target.value.trim()
        ? { path: 'data.max_length', text: event.target.value } : { path: 'data.max_length' }]) })),
      current().length > 1 && labelled('data.mixing', h('select', { value: data.mixing, onchange: (event) => change([{ path: 'data.mixing', value: event.target.value }]) },
        MIXINGS.map((mixing) => h('option', { value: mixing, selected: mixing === (data.mixing ?? 'concat') }, t(`data.mix.${mixing}`))))),
      data.registry && labelled('data.entry', h('select', { onchange: (event) => event.target.value && change([{ path: 'data.train', value: [...current(), { name: event.target.value }] }]) },
        h('option', { value: '' }, data.registry), registry.map((entry) => h('option', { value: entry }, entry)))));
  }

  let serial = 0;
  function labelled(key, control) {
    control.id = `data-${serial++}`;
    return h('div', { class: 'field' }, h('div', { class: 'label' }, h('label', { for: control.id }, t(key))), control);
  }

  function sourceCard(source, index) {
    const read = seen?.sources?.find((entry) => entry.name === nameOf(source));
    const known = read && seen.stale ? { ...read, problems: [] } : read;
    const format = source.format ?? known?.format ?? FORMATS.find((entry) => seen?.formats && entry in seen.formats);
    const unclear = Boolean(known?.problems?.length && known.fields.length && !source.format && !source.columns);
    const fields = seen?.formats?.[format]?.fields ?? [];
    const mapped = source.columns ?? {};
    return h('fieldset', { class: 'source-card' }, h('legend', {}, source.path ?? source.name),
      h('p', { class: 'quiet' }, known?.count != null && t('data.records', { n: known.count, count: number(known.count, 9) }), known?.format && !source.format && ' · ',
        known?.format && !source.format && t('data.detected', { format: known.format })),
      unclear ? unclearColumns(source, index, known) : known?.problems?.length ? problems({ problems: known.problems }) : null,
      h('div', { class: 'row' },
        labelled('data.format', h('select', { onchange: (event) => replace(index, { format: event.target.value }) },
          h('option', { value: '' }, t('data.auto')), FORMATS.filter((entry) => !seen?.formats || entry in seen.formats).map((entry) => h('option', { value: entry, selected: entry === source.format }, entry)))),
        labelled('data.weight', h('input', { type: 'text', class: 'short', inputmode: 'decimal', value: source.weight ?? '', onchange: (event) => replace(index, { weight: event.target.value ? Number(event.target.value) : '' }) })),
        labelled('data.cap', h('input', { type: 'text', class: 'short', inputmode: 'numeric', value: source.cap ?? '', onchange: (event) => replace(index, { cap: event.target.value ? Number(event.target.value) : '' }) })),
        h('button', { type: 'button', 'aria-label': `${t('data.remove')}: ${source.path ?? source.name}`, onclick: () => replace(index, { path: '', name: '' }) }, t('data.remove'))),
      fields.length > 0 && known && h('details', { open: Boolean(source.format || known?.problems?.length) && !unclear }, h('summary', {}, t('data.columns')),
        h('p', { class: 'quiet', lang: 'en' }, seen.formats[format].expects),
        h('div', { class: 'form-grid' }, fields.map((field) => {
          const select = h('select', { onchange: ({ target: { value } }) => replace(index, (latest) => ({ format: latest.format ?? format, columns: tidyColumns({ ...latest.columns, [field]: value }) })) },
            h('option', { value: '' }, t('data.samename')), known.fields.map((column) => h('option', { value: column, selected: mapped[field] === column }, column)));
          select.id = `data-${serial++}`;
          return h('div', { class: 'field' }, h('div', { class: 'label' }, h('label', { for: select.id }, h('code', {}, field))), select);
        }))),
      known?.records?.length > 0 && h('details', {}, h('summary', {}, t('data.raw')), known.records.map((record) => h('dl', { class: 'record' },
        Object.entries(record).map(([key, value]) => [h('dt', {}, h('code', {}, key)), h('dd', {}, value)])))));
  }

  // A source whose columns fit no format: which is the question, and which the answer.
  function unclearColumns(source, index, known) {
    const roles = QUESTION_AND_ANSWER.find(([entry]) => entry in (seen.formats ?? {}));
    const why = h('details', {}, h('summary', {}, t('data.why')), problems({ problems: known.problems }));
    const message = h('p', { class: 'warning' }, t('data.unclear', { columns: known.fields.join(', ') }));
    if (!roles) return [message, why];
    const [entry, ...fields] = roles;
    const chosen = guesses.get(nameOf(source)) ?? {};
    return [message, h('div', { class: 'row' }, fields.map((field, at) => labelled(['data.question', 'data.answer'][at], h('select', { onchange: ({ target: { value } }) => {
      guesses.set(nameOf(source), { ...guesses.get(nameOf(source)), [field]: value });
      const columns = guesses.get(nameOf(source));
      if (fields.every((one) => columns[one])) replace(index, { format: entry, columns });
    } }, h('option', { value: '' }, t('data.column')), known.fields.map((column) => h('option', { value: column, selected: chosen[field] === column }, column)))))), why];
  }

  const tidyColumns = (columns) => Object.fromEntries(Object.entries(columns).filter(([, column]) => column));

  function drawResult() {
    const broken = seen.problems_of_data;
    fill(result, broken.length ? problems({ problems: broken }) : null,
      !seen.documents.length && !broken.length && h('p', { class: 'empty' },
        seen.sources.some((source) => source.problems.length) ? t('data.correct') : t('data.nomodel')),
      seen.reports.map((report) => [h('h3', {}, t(`data.split.${report.split}`)), reportFacts(report), histogram(report),
        report.warnings.length > 0 && h('ul', { class: 'warning', lang: 'en' }, report.warnings.map((text) => h('li', {}, text))),
        report.notes.length > 0 && h('ul', { class: 'quiet', lang: 'en' }, report.notes.map((text) => h('li', {}, text))),
        report.skipped.length > 0 && h('details', { open: true }, h('summary', {}, t('data.skipped')),
          h('ul', { lang: 'en' }, report.skipped.map((record) => h('li', {}, h('code', {}, record.origin), ' ', record.reason))))]),
      seen.documents.length > 0 && [h('h3', {}, t('data.documents')), h('p', { class: 'legend' }, h('mark', { class: 'trained' }, t('data.trained')), ' ',
        h('span', { class: 'prompt' }, t('data.prompt'))), seen.documents.map(documentView),
      h('p', { class: 'quiet' }, t('data.first', { count: number(seen.most_records, 9) }))]);
  }

  listFiles().catch((error) => fill(wrong, problems(error)));
  change([]);
  return () => {
    open = false;
    for (const [kind, take] of Object.entries(dragging)) window.removeEventListener(kind, take);
  };
}
