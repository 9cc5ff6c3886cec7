// One answer of a model, as it is written: events of OpenAI's API, read from the board.

import { Refused } from '../api.js';

// Asks the model `id` of a job. `take` is called with the answer so far after each piece:
// {text, thinking, calls: [{id, name, arguments}], finish, tokens, seconds}. Returns the last of them.
export async function ask(job, body, signal, take) {
  const started = performance.now();
  const answer = { text: '', thinking: '', calls: [], finish: null, tokens: null, seconds: 0 };
  const response = await fetch(`api/talk/${encodeURIComponent(job)}/v1/chat/completions`, {
    method: 'POST', headers: { 'content-type': 'application/json' }, signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) throw refusal(response.status, await response.json().catch(() => ({})));
  for await (const event of events(response.body)) {
    if (event.error) throw refusal(502, event);
    if (event.usage) answer.tokens = event.usage.completion_tokens;
    for (const choice of event.choices ?? []) add(answer, choice);
    answer.seconds = (performance.now() - started) / 1000;
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
