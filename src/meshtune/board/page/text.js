// Every word of the page, from text/LANGUAGE.json. A value is text with {names}, or plural forms of it by {n}.

export const LANGUAGES = { en: 'English', zh: '中文', ru: 'Русский', ko: '한국어', ja: '日本語' };

let words = {};
let plural = new Intl.PluralRules('en');
export let language = 'en';

// The language that was chosen before, else the browser's first that there is.
export function preferred() {
  const wanted = [localStorage.getItem('language'), ...navigator.languages.map((name) => name.split('-')[0])];
  return wanted.find((name) => name in LANGUAGES) ?? 'en';
}

export async function load(name) {
  const response = await fetch(`text/${name}.json`);
  words = await response.json();
  language = name;
  plural = new Intl.PluralRules(name);
  document.documentElement.lang = name;
}

// The text of a key such as 'runs.stop', with its {names} filled in.
export function t(key, values = {}) {
  let text = key.split('.').reduce((part, name) => part?.[name], words);
  if (text && typeof text === 'object') text = text[plural.select(values.n)] ?? text.other;
  if (typeof text !== 'string') return `[${key}]`;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? '');
}

// Whether there is a text of a key.
export function has(key) {
  return key.split('.').reduce((part, name) => part?.[name], words) !== undefined;
}
