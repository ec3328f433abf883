"""Sums for a LangGraph agent with a calculator. `train.yaml` names the three functions."""

from random import Random
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from seamlessflow import Endpoint, Task


def tasks(split: str, index: int) -> Task:
    """Only held-out sums have a second number that ends with 0."""
    random = Random(f"{split} {index}")
    first = random.randint(10, 99)
    tens = random.randint(1, 9)
    ones = random.randint(1, 9)
    second = 10 * tens + (0 if split == "holdout" else ones)
    return Task(f"sum-{split}-{index}", "sums", f"What is {first}+{second}?", answer=str(first + second))


@tool
def calc(expression: str) -> str:
    """Add two numbers, for example 47+83."""
    first, second = expression.split("+")
    return str(int(first) + int(second))


async def agent(task: Task, endpoint: Endpoint) -> str:
    """Call the model and its tools in turn, until the model answers without a call."""
    model = ChatOpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        model=endpoint.model,
        timeout=None,  # a request waits while the policy trains
    ).bind_tools([calc])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([calc], handle_tool_errors=True))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    limit = {"recursion_limit": 8}  # four answers of the model, and the calls between them
    try:
        done = await graph.compile().ainvoke({"messages": [("user", task.prompt)]}, limit)
    except GraphRecursionError:
        return ""
    return str(done["messages"][-1].content)


def reward(task: Task, answer: str) -> float:
    return float(answer.strip() == task.answer)
