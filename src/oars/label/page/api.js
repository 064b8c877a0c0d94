// Talks to the server. An action is sent, under a name of its own, until the server has answered: it may be killed and
// started again in between. The server does an action of the same name once only. What was not answered is kept for this
// tab, so that it survives a reload too.

const KEPT = "oars-label-actions";
const waiting = JSON.parse(sessionStorage.getItem(KEPT) || "[]");
let chain = Promise.resolve();
let listener = () => {};
let project = "";

/** Called with true when the server does not answer, with false when it does again. */
export function onAbsence(heard) {
  listener = heard;
}

/** What is served here: the next server at this address may be that of another project. */
export function serves(name) {
  project ||= name;  // a page stays with the project that it shows
}

/** The token of the address is given away once, for a cookie; it does not stay in the address. */
export async function enter() {
  const token = (/^#(?:token=)?([\w-]{20,})$/.exec(location.hash) || [])[1];
  if (!token) return;
  history.replaceState(null, "", location.pathname);
  await once("/enter", { token });
}

export async function get(path, signal) {
  let answer;
  // 503: images are still being read; the page shows how far that is.
  while ((answer = await patient(() => fetch(path, { signal, credentials: "same-origin" }), signal)).status === 503) await pause(1500);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

export async function json(path, signal) {
  return (await get(path, signal)).json();
}

/** One action; actions are sent one after another, in the order in which they were done. */
export function act(path, body) {
  const action = { path, body: { ...body, project, action: name() } };
  waiting.push(action);
  keep();
  return send(action);
}

/** A question that is too long for an address. */
export async function ask(path, body) {
  return once(path, body);
}

/** Settles when every action so far has its answer. */
export function idle() {
  return chain;
}

/** Sends what an earlier page of this tab could not; what was done in another project waits until that is served again. */
export function resend() {
  return Promise.all(waiting.filter(({ body }) => body.project === project).map((action) => send(action).catch(() => {}))).then((sent) => sent.length);
}

function send(action) {
  const sent = chain.then(() => once(action.path, action.body)).catch((error) => error).then((found) => {
    if (!found.elsewhere) {
      waiting.splice(waiting.indexOf(action), 1);
      keep();
    }
    if (found instanceof Error) throw found;
    return found;
  });
  chain = sent.catch(() => {});
  return sent;
}

async function once(path, body) {
  const answer = await patient(() => fetch(path, {
    method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  }));
  if (!answer.ok) {  // 401 and 421: somebody else's server may be here now; it is sent when ours is back
    throw Object.assign(new Error(await reason(answer)), { elsewhere: [401, 421].includes(answer.status) });
  }
  return answer.status === 204 ? {} : answer.json();
}

/** Tries again while there is nobody to answer: a server that was killed comes back at the same address. */
async function patient(attempt, signal) {
  for (let rest = 250; ; rest = Math.min(2000, rest * 1.5)) {
    try {
      const answer = await attempt();
      listener(false);
      return answer;
    } catch (error) {
      if (signal?.aborted || error.name === "AbortError") throw error;
    }
    listener(true);
    await pause(rest);
  }
}

function pause(milliseconds) {
  return new Promise((go) => setTimeout(go, milliseconds));
}

async function reason(answer) {
  if (answer.status === 401) return "This browser is not known here: open the address that oars label printed.";
  const text = await answer.text();
  try {
    return JSON.parse(text).error || answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

function keep() {
  sessionStorage.setItem(KEPT, JSON.stringify(waiting));
}

function name() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
