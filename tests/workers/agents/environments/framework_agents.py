"""Agents in frameworks, unmodified, with the endpoint of an episode as their model. Each has one tool, `add`."""

# Their packages are not installed for the type checker.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, OpenAI

from troupe.workers.agents.environments import Row


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def langgraph(row: Row, client: OpenAI) -> float:
    """LangGraph's agent with LangChain's client."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model: Any = ChatOpenAI(base_url=str(client.base_url), api_key=client.api_key, model="policy")  # pyright: ignore
    done = create_react_agent(model, [add]).invoke({"messages": [("user", row.messages[-1]["content"])]})
    return float(done["messages"][-1].content == "5")


async def openai_agents(row: Row, client: AsyncOpenAI) -> float:
    """OpenAI's Agents SDK over chat completions."""
    from agents import (  # pyright: ignore
        Agent,  # pyright: ignore
        OpenAIChatCompletionsModel,  # pyright: ignore
        Runner,  # pyright: ignore
        function_tool,  # pyright: ignore
        set_tracing_disabled,  # pyright: ignore
    )

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="adder", instructions="Add.", model=model, tools=[function_tool(add)])  # pyright: ignore
    done = await Runner.run(agent, row.messages[-1]["content"])
    return float(done.final_output == "5")


def smolagents_code(row: Row, client: OpenAI) -> float:
    """An agent of smolagents that writes Python."""
    from smolagents import CodeAgent, tool

    agent = CodeAgent(tools=[tool(add)], model=_smolagents_model(client), verbosity_level=0)
    return float(agent.run(row.messages[-1]["content"]) == 5)


def smolagents_tools(row: Row, client: OpenAI) -> float:
    """An agent of smolagents that calls tools, with `tool_choice: required`."""
    from smolagents import ToolCallingAgent, tool

    agent = ToolCallingAgent(tools=[tool(add)], model=_smolagents_model(client), verbosity_level=0)
    return float(str(agent.run(row.messages[-1]["content"])) == "5")


def _smolagents_model(client: OpenAI) -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(model_id="policy", api_base=str(client.base_url), api_key=client.api_key)
