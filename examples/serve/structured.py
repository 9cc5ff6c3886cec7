# meshtune serve MODEL, then: python examples/serve/structured.py
"""An answer in a class of one's own: only tokens that keep to its schema are drawn, however small the model."""

import os

from openai import OpenAI
from pydantic import BaseModel, Field


class Dog(BaseModel):
    """A dog."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=20)
    good: bool


client = OpenAI(
    base_url=os.environ.get("MESHTUNE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("MESHTUNE_TOKEN", "none"),
)
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "user", "content": "Invent a dog: its name, its age in years, whether it is good. Answer in JSON."}
    ],
    response_format=Dog,
    max_tokens=200,
)
print(answer.choices[0].message.parsed)
