"""xLAM's function calls: a query, the calls that answer it, and the tools, the last two often as JSON text.

Specification: the card of the data set Salesforce/xlam-function-calling-60k.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.formats.context import CONTEXT, read_variables, with_system
from meshtune.data.formats.record import describe, field_error, missing_field_error, parse_json, text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, has_fields, same_names
from meshtune.data.formats.tool_use import with_tool_use
from meshtune.data.formats.tools import parse_tool_call, parse_tools


def convert_xlam(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    field = fields["answers"] or "answers"
    answers = record.get(field)
    if answers is None:
        raise missing_field_error(record, field, origin)
    if isinstance(answers, str):
        answers = parse_json(answers, origin, field)
    if not isinstance(answers, list) or not answers:
        problem = f"expected a list of calls, found {describe(answers)}"
        raise field_error(problem, origin, field, 'write [{"name": ..., "arguments": {...}}], or remove the record')
    calls = tuple(parse_tool_call(call, origin, f"{field}[{index}]") for index, call in enumerate(answers))
    tools = parse_tools(record, fields["tools"], origin)
    turns = [
        Message("user", text_field(record, fields["query"] or "query", origin)),
        Message("assistant", "", tool_calls=calls),
    ]
    messages = with_system(turns, record, fields, origin)
    variables = read_variables(record, fields, origin)
    return Conversation(with_tool_use(messages, tools, origin, field), origin, tools, variables)


XLAM = RecordFormat(
    name="xlam",
    expects="query, text; answers, a list of {name, arguments}, and tools, each also as JSON text",
    fields=same_names("query", "answers", "tools") | CONTEXT,
    required=("query", "answers"),
    detect=has_fields("query", "answers", "tools"),
    convert=convert_xlam,
)
