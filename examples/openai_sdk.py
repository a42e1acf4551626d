"""An agent of some lines with the OpenAI SDK: it calls tools until the world of its task is done."""

import json

import openai
from attempts import attempts

SYSTEM = "You solve tasks by calling tools."


def solve(attempt):
    """Talk to the policy, and carry out what it calls."""
    client = openai.OpenAI(base_url=attempt.base_url, api_key=attempt.key)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": attempt.task["opening"]}]
    for _ in range(6):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=attempt.task["tools"])
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or ():
            action = {"tool": call.function.name, "arguments": json.loads(call.function.arguments)}
            result = attempt.step(action)
            if result["done"]:
                return
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result["reply"]})
        if not said.tool_calls:
            return


for attempt in attempts():
    try:
        solve(attempt)
    except openai.APIError as error:
        attempt.fail(error)
    else:
        attempt.finish()
