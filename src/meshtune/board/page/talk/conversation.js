// A conversation with one or several models: what was said to all of them, and what each answered.
//
// turns: [{role: 'user' | 'tool', text, pictures: [data URI], answers: {SPEAKER: {text, thinking, calls, finish, ...}}}]; a
// speaker is JOB and id.

import { t } from '../text.js';

const KEY = 'conversation';

// The messages that a speaker is asked with: the system prompt, then each turn with its own answers.
export function messages(system, turns, speaker) {
  const list = system ? [{ role: 'system', content: system }] : [];
  let calls = [];
  for (const turn of turns) {
    if (turn.role === 'tool' && calls.length) {
      list.push(...calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: turn.text })));
    } else {
      list.push({ role: 'user', content: content(turn) });
    }
    const answer = turn.answers[speaker];
    calls = answer?.calls ?? [];
    if (answer && !answer.error && (answer.text || calls.length)) list.push(spoken(answer));
  }
  return list;
}

function content({ text, pictures }) {
  if (!pictures?.length) return text;
  return [...pictures.map((url) => ({ type: 'image_url', image_url: { url } })), { type: 'text', text }];
}

function spoken({ text, calls }) {
  const message = { role: 'assistant', content: text };
  if (calls?.length) {
    message.tool_calls = calls.map((call) => ({ id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments } }));
  }
  return message;
}

// The tools of a text, in OpenAI's form or as functions alone; an error says what is wrong with it.
export function toolsOf(text) {
  if (!text.trim()) return null;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    const [, line, column] = error.message.match(/line (\d+) column (\d+)/) ?? [];
    throw new Error([t('talk.badjson'), line && t('talk.badplace', { line, column })].filter(Boolean).join(': '));
  }
  const list = Array.isArray(tools) ? tools : [tools];
  return list.map((tool) => {
    const described = tool?.type === 'function' ? tool.function : tool;
    if (typeof described?.name !== 'string' || !described.name) throw new Error(t('talk.badname'));
    return { type: 'function', function: described };
  });
}

// What is kept over a reload of the page, in this browser alone.
export function saved() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

export function save(state) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch {
    // It is longer than a browser keeps; it stays on the page.
  }
}
