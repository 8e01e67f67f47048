"""A small agent: the model may call a tool, whose answer goes back into the conversation.

    moe-infinity serve MODEL &        # one whose chat template knows tools, such as Qwen3
    python examples/agent.py "What is 17 times 23?" [URL]

The server gives the tools to the chat template, and finds the calls in what the model writes. The
first turn has to be a call, and its arguments have to fit the schema. So even the bundled model,
which knows of no tools, makes one.
"""

import ast
import json
import operator
import sys
from typing import Any

import openai

MOST_TURNS = 5
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "pattern": "^[0-9]{1,6}( [-+*/] [0-9]{1,6}){1,4}$",
                    }
                },
                "required": ["expression"],
                "additionalProperties": False,
            },
        },
    }
]
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> float:
    """The value of numbers with + - * / only: a model's text is never run as code."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return float(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    return value(ast.parse(expression, mode="eval").body)


def run(name: str, arguments: str) -> str:
    try:
        if name != "calculate":
            return f"error: no tool {name!r}"
        return str(calculate(**json.loads(arguments)))
    except (TypeError, ValueError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error}"


def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is 17 times 23?"
    url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)  # 429: try again
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(MOST_TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if turn == 0 else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=256,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            if call.type != "function":
                continue
            result = run(call.function.name, call.function.arguments)
            print(f"[{call.function.arguments} -> {result}]", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(messages[-1].get("content"))


if __name__ == "__main__":
    main()
