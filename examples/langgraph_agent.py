"""An agent of LangGraph, over chat completions, in an interpreter of its own."""

import httpx
import openai
from attempts import attempts
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

SYSTEM = "You solve tasks by calling tools."
#: For all attempts: to make them takes longer than a reply.
CONNECTIONS = {"http_client": httpx.Client(timeout=300), "http_async_client": httpx.AsyncClient()}


def graph_of(attempt):
    """A graph of two nodes: the policy, and the tools that it calls."""
    model = ChatOpenAI(model="policy", base_url=attempt.base_url, api_key=attempt.key, **CONNECTIONS)
    model = model.bind_tools(attempt.task["tools"])

    def ask(state):
        return {"messages": [model.invoke(state["messages"])]}

    def act(state):
        answers = []
        for call in state["messages"][-1].tool_calls:
            if not attempt.done:
                result = attempt.step({"tool": call["name"], "arguments": call["args"]})
                attempt.done = result["done"]
                answers.append(ToolMessage(result["reply"], tool_call_id=call["id"]))
        return {"messages": answers}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("act", act)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", lambda state: "act" if state["messages"][-1].tool_calls else END)
    graph.add_conditional_edges("act", lambda state: END if attempt.done else "ask")
    return graph.compile()


for attempt in attempts():
    attempt.done = False
    begin = [SystemMessage(SYSTEM), HumanMessage(attempt.task["opening"])]
    try:
        graph_of(attempt).invoke({"messages": begin}, {"recursion_limit": 12})
    except RecursionError:
        attempt.finish()
    except openai.APIError as error:
        attempt.fail(error)
    else:
        attempt.finish()
