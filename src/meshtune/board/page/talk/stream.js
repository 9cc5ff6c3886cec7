// One answer of a model, as it is written: events of OpenAI's API, read from the board.

import { Refused } from '../api.js';

const MANY = 16; // pieces

// Asks the model `id` of a job. `take` is called with the answer so far after each piece:
// {text, thinking, calls: [{id, name, arguments}], finish, tokens, first, seconds}, where `first` is when its first piece came and
// `seconds` the time since then. Of many pieces the longest wait is left out: a program may have been compiled in it.
export async function ask(job, body, signal, take) {
  const started = performance.now();
  const answer = { text: '', thinking: '', calls: [], finish: null, tokens: null, first: null, seconds: 0 };
  let [last, longest, pieces] = [started, 0, 0];
  const response = await fetch(`api/talk/${encodeURIComponent(job)}/v1/chat/completions`, {
    method: 'POST', headers: { 'content-type': 'application/json' }, signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw refusal(response.status, await response.json().catch(() => ({})));
  for await (const event of events(response.body)) {
    if (event.error) throw refusal(502, event);
    if (event.usage) answer.tokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) add(answer, choice);
    if (event.choices?.length) {
      const now = performance.now();
      if (answer.first === null) answer.first = (now - started) / 1000;
      else {
        longest = Math.max(longest, now - last);
        answer.seconds = (now - started - (pieces > MANY ? longest : 0)) / 1000 - answer.first;
      }
      last = now;
      pieces += 1;
    }
    take(answer);
  }
  return answer;
}

function refusal(status, body) {
  if (status === 401) window.dispatchEvent(new Event('signed-out'));
  const error = body.error ?? body.problems?.[0] ?? {};
  return new Refused(status, [{ path: error.param ?? null, message: error.message ?? String(status), fix: null }]);
}

function add(answer, choice) {
  const delta = choice.delta ?? {};
  answer.text += delta.content ?? '';
  answer.thinking += delta.reasoning_content ?? '';
  for (const call of delta.tool_calls ?? []) {
    const known = answer.calls[call.index] ??= { id: '', name: '', arguments: '' };
    known.id = call.id ?? known.id;
    known.name += call.function?.name ?? '';
    known.arguments += call.function?.arguments ?? '';
  }
  answer.finish = choice.finish_reason ?? answer.finish;
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith('data: ') && line !== 'data: [DONE]') yield JSON.parse(line.slice('data: '.length));
    }
  }
}
