// An agent in Node with the npm package `openai`: it calls tools until the world of its task is done.
import OpenAI from "openai";

const gateway = process.env.RLHF_GATEWAY;

async function post(url, key, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  return { status: answer.status, body: await answer.json() };
}

async function solve(attempt) {
  const client = new OpenAI({ baseURL: attempt.base_url, apiKey: attempt.key });
  const messages = [
    { role: "system", content: "You solve tasks by calling tools." },
    { role: "user", content: attempt.task.opening },
  ];
  for (let turn = 0; turn < 6; turn++) {
    const reply = await client.chat.completions.create({ model: "policy", messages, tools: attempt.task.tools });
    const said = reply.choices[0].message;
    messages.push(said);
    for (const call of said.tool_calls ?? []) {
      const action = { tool: call.function.name, arguments: JSON.parse(call.function.arguments) };
      const result = (await post(`${attempt.url}/step`, attempt.key, { action })).body;
      if (result.done) return;
      messages.push({ role: "tool", tool_call_id: call.id, content: result.reply });
    }
    if (!said.tool_calls) return;
  }
}

while (true) {
  const asked = await post(`${gateway}/sessions`, process.env.RLHF_GATEWAY_KEY, {}).catch(() => null);
  if (asked?.status === 429) continue; // nothing waits for an agent now
  if (asked?.status !== 200) break;
  const attempt = asked.body;
  try {
    await solve(attempt);
    await post(`${attempt.url}/finish`, attempt.key, {});
  } catch (error) {
    await post(`${attempt.url}/fail`, attempt.key, { message: String(error) });
  }
}
