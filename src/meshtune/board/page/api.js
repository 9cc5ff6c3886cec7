// The board's API: JSON in and out, and one stream of events for the page.

// What a request was refused for: `problems` are {path, message, fix}.
export class Refused extends Error {
  constructor(status, problems) {
    super(problems.map((problem) => problem.message).join('\n'));
    this.status = status;
    this.problems = problems;
  }
}

export const get = (path) => answer(fetch(path));

export const post = (path, body = {}) => answer(fetch(path, {
  method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body),
}));

// Sends a file as bytes.
export const upload = (path, file) => answer(fetch(path, {
  method: 'POST', headers: { 'content-type': 'application/octet-stream' }, body: file,
}));

// How often the page signed in. A request that was sent before the latest time says nothing about today's session.
let session = 0;

async function answer(request) {
  const current = session;
  const response = await request;
  const signingIn = response.url.endsWith('/api/session');
  if (response.ok && signingIn) session += 1;
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  const problems = body.problems ?? [{ path: null, message: body.error?.message ?? response.statusText, fix: null }];
  if (response.status === 401 && !signingIn && current === session) window.dispatchEvent(new Event('signed-out'));
  throw new Refused(response.status, problems);
}

// Follows the events of the board, and of one job if it is given. `on` has a function for each kind of event; `state`
// is called with true while the stream is connected. Returns a function that ends it.
export function follow(job, on, state = () => {}) {
  let source = null;
  let cursor = '';
  let timer = null;

  function open() {
    const query = new URLSearchParams(job ? { job, cursor } : {});
    source = new EventSource(`api/events?${query}`);
    source.onopen = () => state(true);
    source.onerror = () => {
      state(false);
      // A browser gives up where the answer is an error, such as of a proxy before a server that starts again.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(timer);
        timer = setTimeout(open, 2000);
      }
    };
    for (const kind of ['jobs', 'run', 'gone']) {
      source.addEventListener(kind, (event) => {
        if (event.lastEventId) cursor = event.lastEventId;
        if (kind === 'gone') close();
        on[kind]?.(JSON.parse(event.data));
      });
    }
  }

  function close() {
    clearTimeout(timer);
    source.close();
  }

  open();
  return close;
}
