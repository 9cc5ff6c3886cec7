"""Hermes' conversations with calls as text: ShareGPT turns whose system prompt lists the tools in <tools>.

The system prompt is left out, since it says what the chat template writes in its own words: the tools and the form of
calls. Tools come from the field `tools`, else from the prompt. Records without such a prompt are read as ShareGPT.
Specification: github.com/NousResearch/Hermes-Function-Calling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Origin
from meshtune.data.formats.context import read_variables
from meshtune.data.formats.hermes_text import tools_of_text
from meshtune.data.formats.record_format import FieldNames, Record, only_by_name
from meshtune.data.formats.sharegpt import SHAREGPT, read_turns
from meshtune.data.formats.tool_use import with_tool_use
from meshtune.data.formats.tools import parse_tools

LISTED = "<tools> of the system prompt"


def convert_hermes(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    messages, role_names, field = read_turns(record, fields, tags, origin)
    tools = parse_tools(record, fields["tools"], origin)
    listed = tools_of_text(messages[0].content, origin, LISTED) if messages[0].role == "system" else None
    if listed is not None and len(messages) > 1:
        messages, role_names = messages[1:], role_names[1:]
        tools = tools or parse_tools({LISTED: listed}, LISTED, origin)
    turns = with_tool_use(messages, tools, origin, field, role_names, calls_in_text=True)
    return Conversation(turns, origin, tools, read_variables(record, fields, origin))


HERMES = dataclasses.replace(
    SHAREGPT,
    name="hermes",
    expects="conversations whose system turn lists tools in <tools>; calls in <tool_call>; only where it is named",
    detect=only_by_name,
    convert=convert_hermes,
    convert_bad=None,
)
