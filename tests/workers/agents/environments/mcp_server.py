"""An MCP server of the tests, on the SDK's own server."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("words")
_said: list[str] = []


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Say it loudly.

    Args:
        text: What to say.
        times: How often.
    """
    return " ".join([text.upper()] * times)


@server.tool()
def remember(word: str) -> list[str]:
    """All words so far."""
    _said.append(word)
    return list(_said)


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "(not set)")


@server.tool()
def fail(why: str) -> str:
    """Raise an error."""
    raise ToolError(why)


@server.tool()
def leave() -> str:
    """End the server."""
    print("the disk is full", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


if __name__ == "__main__":
    if "--broken" in sys.argv:
        raise SystemExit("this server does not start")
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[-1]))
    server.run()
