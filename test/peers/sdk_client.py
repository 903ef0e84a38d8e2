"""The official Python MCP SDK as a client of the program, driven by a test.

Usage: sdk_client.py MODE PROGRAM ARG…   (in the workspace)

MODE is the SDK's connect mode ("auto" asks for the stateless protocol first, "legacy"
shakes hands). Each line of standard input is {"tool": name, "args": {...}}; each answer
is one line. The first line of output describes the server.
"""

import asyncio
import json
import os
import sys

from mcp import Client, StdioServerParameters


async def main() -> None:
    mode, program, *args = sys.argv[1:]
    server = StdioServerParameters(command=program, args=args, env=dict(os.environ), cwd=os.getcwd())
    async with Client(server, mode=mode) as client:
        tools = await client.list_tools()
        print(
            json.dumps(
                {
                    "protocol": client.protocol_version,
                    "instructions": client.instructions,
                    "tools": [tool.name for tool in tools.tools],
                }
            ),
            flush=True,
        )
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            result = await client.call_tool(request["tool"], request["args"])
            print(
                json.dumps(
                    {
                        "isError": result.is_error,
                        "text": [block.text for block in result.content if block.type == "text"],
                        "images": sum(block.type == "image" for block in result.content),
                        "payload": (result.meta or {}).get("mypr/result"),
                    }
                ),
                flush=True,
            )


asyncio.run(main())
