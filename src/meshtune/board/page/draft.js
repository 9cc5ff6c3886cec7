// The recipe that a person is writing: kept by the browser, so that a reload loses nothing and other pages can add to it.

import { post } from './api.js';

const KEY = 'recipe';

// `key` is another one for the recipe of data.
export const readDraft = (key = KEY) => localStorage.getItem(key) ?? '';

export const writeDraft = (text, key = KEY) => localStorage.setItem(key, text);

// Applies changes, {path, value}, to the draft, names an output where it has none, and shows it.
export async function useInRecipe(changes) {
  const answer = await post('api/recipe', { recipe: readDraft(), changes, name_output: true });
  writeDraft(answer.recipe);
  location.hash = '#/recipe';
}
