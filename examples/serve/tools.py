# meshtune serve MODEL --chat-template chatml, then: python examples/serve/tools.py
"""A model that calls a function of this program and answers with what it returned. The model must know how to call
tools; `tool_choice="required"` instead makes any model call one."""

import json
import os

from openai import OpenAI


def weather(city: str) -> dict:
    """The weather of a city."""
    return {"city": city, "sky": "rain", "celsius": 9}


client = OpenAI(
    base_url=os.environ.get("MESHTUNE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("MESHTUNE_TOKEN", "none"),
)
model = client.models.list().data[0].id
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [
    {"type": "function", "function": {"name": "weather", "description": weather.__doc__, "parameters": parameters}}
]
messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
for _ in range(4):  # rounds of calls, at most
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=200, seed=0)
    message = answer.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
