// Every word of the page, from text/LANGUAGE.json. A value is text with {names}, or plural forms of it by {n}.
// A text that is not translated yet stands there in English.
// What the commands say too, such as the help of a recipe's keys, is English; text/help/LANGUAGE.json translates it.

export const LANGUAGES = { en: 'English', zh: '中文', ru: 'Русский', ko: '한국어', ja: '日本語' };

let words = {};
let english = {};
let plural = new Intl.PluralRules('en');
let help = {};
export let language = 'en';

// The language that was chosen before, else the browser's first that there is.
export function preferred() {
  const wanted = [localStorage.getItem('language'), ...navigator.languages.map((name) => name.split('-')[0])];
  return wanted.find((name) => name in LANGUAGES) ?? 'en';
}

export async function load(name) {
  const fetchTexts = async (file) => (await fetch(`text/${file}.json`)).json();
  [words, english] = await Promise.all([fetchTexts(name), fetchTexts('en')]);
  language = name;
  help = {};
  plural = new Intl.PluralRules(name);
  document.documentElement.lang = name;
}

// Loads the translations of what the commands say, once; without them it stays English.
export async function loadHelp() {
  if (language === 'en' || help.language === language) return;
  const name = language;
  const response = await fetch(`text/help/${name}.json`).catch(() => null);
  const texts = response?.ok ? await response.json() : {};
  if (name === language) help = { language: name, ...texts };
}

// The help of a key, given in English, as {text, lang}: in the page's language where it is translated.
export function helpOf(english) {
  const text = help.keys?.[english];
  return text ? { text, lang: language } : { text: english, lang: 'en' };
}

// What a command says, given as {template, values} in English or as a text that has no words, in the page's language.
export function said(part) {
  if (typeof part === 'string') return part;
  return (help.templates?.[part.template] ?? part.template).replace(/\{(\w+)\}/g, (_, name) => said(part.values[name] ?? ''));
}

// The text of a key such as 'runs.stop', with its {names} filled in.
export function t(key, values = {}) {
  let text = find(key);
  if (text && typeof text === 'object') text = text[plural.select(values.n)] ?? text.other;
  if (typeof text !== 'string') return `[${key}]`;
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? '');
}

// Whether there is a text of a key.
export function has(key) {
  return find(key) !== undefined;
}

function find(key) {
  const texts = (all) => key.split('.').reduce((part, name) => part?.[name], all);
  return texts(words) ?? texts(english);
}
