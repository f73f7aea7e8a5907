// Talking to the server: JSON, and streams of server-sent events. The API key lives here, in memory only.

let key = "";

export function setKey(text) {
  key = text.trim();
}

/** An error that the server told, in OpenAI's form. */
export class ServerError extends Error {
  constructor(error, status, retryAfter = null) {
    super(error?.message ?? `the server answered ${status}`);
    Object.assign(this, { param: error?.param ?? null, code: error?.code ?? null, status, retryAfter });
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  // Relative paths: the page also works behind a proxy that puts it into a folder.
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ServerError(body?.error, response.status, response.headers.get("Retry-After"));
  }
  return response;
}

export async function getJson(path) {
  return (await send(path)).json();
}

export async function getText(path) {
  return (await send(path)).text();
}

/** POST a request that streams; `onChunk` gets each object of the stream. Resolves when [DONE] has come. */
export async function stream(path, body, signal, onChunk) {
  const headers = { "Content-Type": "application/json" };
  const response = await send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error, null);
      onChunk(chunk);
    }
  }
}
