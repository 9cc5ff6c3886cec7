// Pictures that are sent with a message: chosen, dropped or pasted, and small views of them.

import { fill, h } from '../dom.js';
import { t } from '../text.js';

const KINDS = ['image/png', 'image/jpeg', 'image/webp'];
const MOST = 1 << 20; // bytes of a file that is sent as it is; larger ones are scaled
const SIDE = 2048; // pixels of a scaled picture's longer side
const THUMBNAIL = /^data:image\/jpeg;base64,[A-Za-z0-9+/]+=*$/; // as runs write them

// What the next message shows: `element` has the views and the button, `take()` gives data URIs and empties it.
export function attachments(changed) {
  let shown = [];
  const list = h('div', { class: 'pictures' });
  const wrong = h('span', { class: 'quiet', role: 'status' });
  const file = h('input', { type: 'file', id: 'pictures', accept: KINDS.join(','), multiple: true, class: 'hidden', onchange: () => {
    add([...file.files]);
    file.value = '';
  } });
  const element = h('div', { class: 'attached' }, list,
    h('label', { for: 'pictures', class: 'button small' }, t('talk.picture')), file, wrong);

  function draw() {
    fill(list, shown.map((address, index) => h('span', { class: 'attachment' }, pictureView(address),
      h('button', { type: 'button', class: 'small plain', 'aria-label': t('talk.nopicture'), onclick: () => {
        shown = shown.filter((_, other) => other !== index);
        draw();
        changed();
      } }, '×'))));
  }

  async function add(files) {
    fill(wrong);
    for (const one of files) {
      try {
        shown.push(await dataAddress(one));
      } catch {
        fill(wrong, t('talk.badpicture', { name: one.name }));
      }
    }
    draw();
    changed();
  }

  return {
    element,
    get count() { return shown.length; },
    put(addresses) { shown = [...addresses]; draw(); },
    take() {
      const taken = shown;
      shown = [];
      fill(wrong);
      draw();
      return taken;
    },
    // Whether an event of dropping or pasting had files, which are then attached.
    receive(event) {
      const files = [...((event.dataTransfer ?? event.clipboardData)?.files ?? [])];
      if (!files.length) return false;
      event.preventDefault();
      add(files);
      return true;
    },
  };
}

// A picture from a data URI, as a blob: a page of the board shows no other.
export function pictureView(address) {
  const [head, content] = address.split(',', 2);
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const source = URL.createObjectURL(new Blob([bytes], { type: head.slice(5, head.indexOf(';')) }));
  return h('img', { src: source, alt: t('talk.shown'), class: 'thumbnail', onload: () => URL.revokeObjectURL(source) });
}

// A sample's prompt with its pictures, which tell prompts of the same words apart.
const picturesOf = ({ pictures }) => (Array.isArray(pictures) ? pictures.filter((one) => THUMBNAIL.test(one)) : []);
export const promptKey = (row) => [row.prompt, ...picturesOf(row)].join(' ');
export const promptView = (row) => [h('div', { class: 'pictures' }, picturesOf(row).map(pictureView)), h('p', { class: 'quiet answer' }, row.prompt)];

async function dataAddress(file) {
  if (!KINDS.includes(file.type)) throw new Error(file.type);
  const picture = await createImageBitmap(file);
  if (file.size <= MOST) return read(file);
  const scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = h('canvas', { width: Math.round(picture.width * scale), height: Math.round(picture.height * scale) });
  canvas.getContext('2d').drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', 0.92);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener('load', () => resolve(reader.result));
    reader.addEventListener('error', () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
