// A streamed answer of /v1/chat/completions.

// Yields its chunks. Throws the server's message where it refuses or fails.
export async function* chunks(body, headers, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({
      ...body, stream: true, stream_options: { include_usage: true }, return_progress: true,
    }),
  });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `error ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// Add what a chunk brings to a message: {content, reasoning, calls, progress, finish}.
export function add(message, chunk) {
  const { delta = {}, finish_reason } = chunk.choices[0] ?? {};
  message.progress = chunk.prompt_progress ?? message.progress;
  message.finish = finish_reason ?? message.finish;
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const { index, function: called } of delta.tool_calls ?? []) {
    const call = message.calls[index] ??= { name: "", arguments: "" };
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}
