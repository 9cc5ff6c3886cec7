// The pages of the board, in the order of the navigation: a module of views/ each, and a line here.
// A module exports `name` (of its address and its texts) and `show(place, path)`, which fills `place` and returns a
// function that ends what it started.

import * as data from './views/data.js';
import * as compare from './views/compare.js';
import * as evaluate from './views/evaluate.js';
import * as exports from './views/export.js';
import * as generate from './views/generate.js';
import * as model from './views/model.js';
import * as recipe from './views/recipe.js';
import * as runs from './views/runs.js';
import * as talk from './views/talk.js';

export const VIEWS = [
  model,
  generate,
  data,
  recipe,
  runs,
  compare,
  talk,
  evaluate,
  exports,
];
