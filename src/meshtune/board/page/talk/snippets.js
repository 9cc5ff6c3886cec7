// How programs reach a model: the address of OpenAI's API on this board, for curl and for Python.

import { h } from '../dom.js';
import { t } from '../text.js';
import { copyable } from '../widgets.js';
import { idOf, jobOf } from './models.js';

export function snippets(speaker) {
  const base = new URL(`api/talk/${jobOf(speaker)}/v1`, document.baseURI).href;
  const model = JSON.stringify(idOf(speaker));
  const body = `{"model": ${model}, "messages": [{"role": "user", "content": "Hello"}]}`.replaceAll("'", "'\\''");
  const curl = `curl ${base}/chat/completions -H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json' -d '${body}'`;
  const python = `from openai import OpenAI

client = OpenAI(base_url="${base}", api_key="TOKEN")
answer = client.chat.completions.create(model=${model}, messages=[{"role": "user", "content": "Hello"}])
print(answer.choices[0].message.content)`;
  return h('details', { class: 'programs' }, h('summary', {}, t('talk.programs')),
    h('p', { class: 'quiet' }, t('talk.about')), copyable(base),
    h('h2', {}, 'curl'), copyable(curl), h('h2', {}, 'Python'), copyable(python));
}
