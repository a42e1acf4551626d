"""An agent of openai-agents, over responses; its package is called `agents`, so it has an interpreter of its own."""

import asyncio
import json

import openai
from agents.exceptions import AgentsException
from attempts import attempts

from agents import Agent, FunctionTool, ModelBehaviorError, OpenAIResponsesModel, RunConfig, Runner

SYSTEM = "You solve tasks by calling tools."
#: For all attempts: to make one takes longer than a reply.
CONNECTIONS = openai.DefaultAsyncHttpxClient(timeout=300)


def tool_of(function, attempt):
    """A tool that is carried out in the world of the attempt."""

    async def call(context, arguments):
        result = await asyncio.to_thread(attempt.step, {"tool": function["name"], "arguments": json.loads(arguments)})
        attempt.done = result["done"]
        return result["reply"]

    name, about, parameters = function["name"], function["description"], function["parameters"]
    return FunctionTool(name, about, parameters, call, strict_json_schema=False)


def ends(context, results):
    """Whether the calls of a reply have ended the task."""
    from agents.agent import ToolsToFinalOutputResult

    return ToolsToFinalOutputResult(is_final_output=attempt.done, final_output="done" if attempt.done else None)


for attempt in attempts():
    attempt.done = False
    client = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, http_client=CONNECTIONS)
    agent = Agent(
        name="agent",
        instructions=SYSTEM,
        model=OpenAIResponsesModel("policy", client),
        tools=[tool_of(tool["function"], attempt) for tool in attempt.task["tools"]],
        tool_use_behavior=ends,
    )
    try:
        Runner.run_sync(agent, attempt.task["opening"], max_turns=6, run_config=RunConfig(tracing_disabled=True))
    except (ModelBehaviorError, AgentsException):
        attempt.finish()  # too many turns, or an unknown tool: the policy's doing
    except openai.APIError as error:
        attempt.fail(error)
    else:
        attempt.finish()
