// The frame around the pages: navigation, language, theme, and signing in.

import { post } from './api.js';
import { fill, h } from './dom.js';
import { LANGUAGES, language, load, preferred, t } from './text.js';
import { VIEWS } from './views.js';
import { problems } from './widgets.js';

const THEMES = ['system', 'light', 'dark'];
let leave = () => {};
let place = null;

async function start() {
  applyTheme(localStorage.getItem('theme') ?? 'system');
  await load(preferred());
  draw();
  window.addEventListener('hashchange', route);
  window.addEventListener('signed-out', signIn);
}

function draw() {
  place = h('main', { id: 'content', tabindex: -1 });
  fill(document.body,
    h('a', { class: 'skip', href: '#content', onclick: (event) => { event.preventDefault(); place.focus(); } }, t('shared.skip')),
    h('header', {},
      h('a', { class: 'brand', href: '#/' }, 'Meshtune'),
      h('nav', { 'aria-label': t('shared.navigation') },
        VIEWS.map((view) => h('a', { href: `#/${view.name}`, 'data-view': view.name }, t(`${view.name}.title`)))),
      h('div', { class: 'settings' }, languages(), themes())),
    place);
  route();
}

function languages() {
  return h('label', {}, h('span', { class: 'hidden' }, t('shared.language')),
    h('select', { onchange: async (event) => {
      localStorage.setItem('language', event.target.value);
      await load(event.target.value);
      draw();
    } }, Object.entries(LANGUAGES).map(([code, name]) => h('option', { value: code, selected: code === language, lang: code }, name))));
}

function themes() {
  const current = localStorage.getItem('theme') ?? 'system';
  return h('label', {}, h('span', { class: 'hidden' }, t('shared.theme')),
    h('select', { onchange: (event) => {
      localStorage.setItem('theme', event.target.value);
      applyTheme(event.target.value);
    } }, THEMES.map((name) => h('option', { value: name, selected: name === current }, t(`theme.${name}`)))));
}

function applyTheme(name) {
  if (name === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  window.dispatchEvent(new Event('theme'));
}

// Shows the page that the address names: #/runs/00001-first is the page `runs` with the path ['00001-first'].
function route() {
  const [name, ...path] = location.hash.replace(/^#\/?/, '').split('/').map(decodeURIComponent);
  const view = VIEWS.find((candidate) => candidate.name === name) ?? VIEWS[0];
  leave();
  leave = () => {};
  for (const link of document.querySelectorAll('nav a')) {
    if (link.dataset.view === view.name) {
      link.setAttribute('aria-current', 'page');
      link.scrollIntoView({ block: 'nearest', inline: 'center' });
    } else link.removeAttribute('aria-current');
  }
  document.title = `${t(`${view.name}.title`)} – Meshtune`;
  fill(place);
  leave = view.show(place, view.name === name ? path : []) ?? (() => {});
}

// Every request that is refused asks for this: what was typed since the first stays.
function signIn() {
  if (document.getElementById('token')) return;
  leave();
  leave = () => {};
  const field = h('input', { type: 'password', autocomplete: 'current-password', required: true, id: 'token' });
  const wrong = h('div');
  fill(place, h('form', { class: 'card narrow', onsubmit: async (event) => {
    event.preventDefault();
    try {
      await post('api/session', { token: field.value });
      route();
    } catch (error) {
      fill(wrong, problems(error));
      field.focus();
    }
  } }, h('h1', {}, t('session.title')), h('p', {}, t('session.about')),
  h('input', { type: 'text', autocomplete: 'username', value: 'meshtune', hidden: true }), // under which browsers keep the token
  h('label', { for: 'token' }, t('session.token')), field, wrong, h('button', { class: 'primary' }, t('session.enter'))));
  field.focus();
}

start();
