# meshtune serve MODEL, then: python examples/serve/chat.py
"""Talks to a server with OpenAI's client, word by word."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("MESHTUNE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("MESHTUNE_TOKEN", "none"),
)
model = client.models.list().data[0].id  # what was given to `meshtune serve`; the base and adapters come after it
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me of a dog."}],
    max_tokens=60,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
