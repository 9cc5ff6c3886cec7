// The documents of a recipe of data: those that are chosen, uploads, and those that lie in the board's folders.

import { get, upload } from '../api.js';
import { fill, h } from '../dom.js';
import { bytes, number } from '../format.js';
import { t } from '../text.js';
import { problems } from '../widgets.js';

// `change(paths)` is called with the documents that a person has chosen; show(paths) draws those of a recipe. `types`
// are the ends of their names.
export function documentList(types, change) {
  let chosen = [];
  const wrong = h('div', { 'aria-live': 'polite' });
  const list = h('div');
  const files = h('div');
  const picker = h('input', { type: 'file', multiple: true, accept: types.join(','), id: 'upload', class: 'hidden', tabindex: -1, 'aria-label': t('generate.choose'), onchange: () => send([...picker.files]) });
  const drop = h('div', { class: 'drop' }, h('p', {}, t('generate.drop')),
    h('button', { type: 'button', onclick: () => picker.click() }, t('generate.choose')), picker, h('p', { class: 'quiet' }, t('generate.types')));
  const element = h('div', {}, list, drop, wrong, h('details', {}, h('summary', {}, t('generate.existing')), files));

  // A file may be dropped anywhere: beside the marked place a browser would open it and leave the board.
  const dragging = {
    dragover: (event) => { event.preventDefault(); drop.classList.add('over'); },
    dragleave: (event) => { if (!event.relatedTarget) drop.classList.remove('over'); },
    drop: (event) => { event.preventDefault(); drop.classList.remove('over'); send([...event.dataTransfer.files]); },
  };
  for (const [kind, take] of Object.entries(dragging)) window.addEventListener(kind, take);

  async function send(sent) {
    const paths = [];
    const refused = [];
    for (const file of sent) {
      fill(wrong, h('p', { role: 'status' }, t('data.sending', { name: file.name })));
      try {
        paths.push((await upload(`api/generate/upload?${new URLSearchParams({ name: file.name })}`, file)).path);
      } catch (error) {
        refused.push(problems(error));
      }
    }
    fill(wrong, refused);
    picker.value = '';
    if (paths.length) add(...paths);
    listFiles();
  }

  function add(...paths) {
    change([...chosen, ...paths.filter((path) => !chosen.includes(path))]);
  }

  // Files by their folder, which can be added as a whole.
  async function listFiles() {
    const { files: found } = await get('api/generate/files').catch(() => ({ files: [] }));
    const folders = new Map();
    for (const file of found) {
      const folder = file.path.includes('/') ? file.path.slice(0, file.path.lastIndexOf('/')) : '';
      folders.set(folder, [...(folders.get(folder) ?? []), file]);
    }
    fill(files, found.length ? h('ul', { class: 'plain-list' }, [...folders].flatMap(([folder, inside]) => [
      folder && inside.length > 1 && row(folder, t('generate.documents', { n: inside.length, count: number(inside.length, 9) })),
      inside.map((file) => row(file.path, bytes(file.bytes)))])) : h('p', { class: 'empty' }, t('generate.nofiles')));
  }

  function row(path, about) {
    return h('li', {}, h('span', { class: 'path' }, path), h('span', { class: 'quiet' }, about),
      h('button', { type: 'button', class: 'small', 'aria-label': `${t('data.add')}: ${path}`, onclick: () => add(path) }, t('data.add')));
  }

  listFiles();
  return {
    element,
    show(paths) {
      chosen = Array.isArray(paths) ? paths.map(String) : [];
      fill(list, chosen.length ? h('ul', { class: 'plain-list chosen' }, chosen.map((path) => h('li', {}, h('span', { class: 'path' }, path),
        h('button', { type: 'button', class: 'small', 'aria-label': `${t('data.remove')}: ${path}`, onclick: () => change(chosen.filter((other) => other !== path)) }, t('data.remove')))))
        : h('p', { class: 'empty' }, t('generate.nodocuments')));
    },
    close() {
      for (const [kind, take] of Object.entries(dragging)) window.removeEventListener(kind, take);
    },
  };
}
