"""Tool data under stock templates: exactly the calls and answers are trained on, proved by decoding.

The expected texts are written by hand from the templates' published forms. The templates are those of ../shared and,
for gpt-oss, GLM-4.5, DeepSeek-V3 and Gemma 4, those that TRL keeps, with SmolLM2's tokenizer and their special tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from data.stock_templates import encode_conversation, learned_pieces, tokenizer_of, tokenizer_of_trl, trl_template
from meshtune.config.data_options import LossPolicy
from meshtune.data.chat import ChatTemplate
from meshtune.data.conversation import Conversation, Message, Origin
from meshtune.data.masks import mask_conversation
from meshtune.errors import UserError

ORIGIN = Origin("calls.jsonl", 4)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Forecasts.", "parameters": PARAMETERS}}
IDS = ("abcdefgh1", "abcdefgh2")


def call(city, days, id_=None):
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": city, "days": days}}}
    return called if id_ is None else {"id": id_, **called}


def calls_twice(*, reasoning=False, ids=True, system=True):
    """A question, two calls one after the other, an answer; a second question and its answer."""
    thought = [(("reasoning_content", text),) if reasoning else () for text in ("First.", "Second.", "Sum.", "Bye.")]
    link = [(("tool_call_id", id_),) if ids else () for id_ in IDS]
    turns = [Message("system", "Be brief.")] if system else []
    turns += [
        Message("user", "Warmer?"),
        Message("assistant", "", tool_calls=(call('Zürich "W"', 7, IDS[0] if ids else None),), extra=thought[0]),
        Message("tool", '{"t": 21}', extra=link[0]),
        Message("assistant", "", tool_calls=(call("Bern", 7, IDS[1] if ids else None),), extra=thought[1]),
        Message("tool", '{"t": 19}', extra=link[1]),
        Message("assistant", "Zürich.", extra=thought[2]),
        Message("user", "Thanks"),
        Message("assistant", "Welcome.", extra=thought[3]),
    ]
    return Conversation(tuple(turns), ORIGIN, (TOOL,))


def pieces(tokenizer, conversation, policy=None):
    return learned_pieces(tokenizer, encode_conversation(tokenizer, conversation, policy)[0])


FIRST, SECOND = '{"city": "Zürich \\"W\\"", "days": 7}', '{"city": "Bern", "days": 7}'


def hermes(arguments):
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def llama(arguments):
    return f'{{"name": "weather", "parameters": {arguments}}}<|eot_id|>'


def mistral(arguments, id_):
    return f'[TOOL_CALLS][{{"name": "weather", "arguments": {arguments}, "id": "{id_}"}}]</s>'


def harmony(arguments):
    return f" to=functions.weather<|channel|>commentary json<|message|>{arguments}<|call|>"


def glm(city, thought=""):
    return (
        f"\n<think>{thought}</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{city}</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n</tool_call>"
    )


LAST = "<think>\n\n</think>\n\nWelcome.<|im_end|>"
STOCK_CALLS = {
    "meta-llama-Llama-3.1-8B-Instruct": [llama(FIRST), llama(SECOND), "Zürich.<|eot_id|>", "Welcome.<|eot_id|>"],
    "meta-llama-Llama-3.2-3B-Instruct": [llama(FIRST), llama(SECOND), "Zürich.<|eot_id|>", "Welcome.<|eot_id|>"],
    "Qwen-Qwen2.5-7B-Instruct": [hermes(FIRST), hermes(SECOND), "Zürich.<|im_end|>", "Welcome.<|im_end|>"],
    "Qwen-Qwen3-0.6B": [hermes(FIRST), hermes(SECOND), "Zürich.<|im_end|>", LAST],
    "mistralai-Mistral-Nemo-Instruct-2407": [
        mistral(FIRST, IDS[0]), mistral(SECOND, IDS[1]), "Zürich.</s>", "Welcome.</s>"
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STOCK_CALLS)
def test_calls_and_answers_are_trained_on_and_nothing_else(name, shared):
    turns = calls_twice(system="Nemo" not in name)  # which writes no system prompt before answers
    assert pieces(tokenizer_of(name, shared), turns) == STOCK_CALLS[name]


def test_gpt_oss_trains_on_calls_through_their_end_and_on_the_last_reasoning(shared):
    """Reasoning before an answer of the past is left out, as gpt-oss is prompted; <|end|> of earlier answers is no end
    of generation, which is <|return|>."""
    tokenizer = tokenizer_of_trl("gptoss", shared)
    expected = [harmony(FIRST), harmony(SECOND), "<|channel|>final<|message|>Zürich."]
    answer = "<|start|>assistant<|channel|>final<|message|>Welcome.<|return|>"
    last = "<|channel|>analysis<|message|>Bye.<|end|>" + answer
    assert pieces(tokenizer, calls_twice(reasoning=True)) == [*expected, last]
    assert pieces(tokenizer, calls_twice()) == [*expected, answer.removeprefix("<|start|>assistant")]


def test_gpt_oss_trains_on_the_reasoning_before_a_last_call(shared):
    turns = calls_twice(reasoning=True).messages[:3]
    expected = ["<|channel|>analysis<|message|>First.<|end|><|start|>assistant" + harmony(FIRST)]
    assert pieces(tokenizer_of_trl("gptoss", shared), Conversation(turns, ORIGIN, (TOOL,))) == expected


def test_think_text_becomes_gpt_oss_analysis(shared):
    turns = (Message("user", "Hi"), Message("assistant", "<think>\nGreet.\n</think>\n\nHello."))
    expected = (
        "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>"
    )
    assert pieces(tokenizer_of_trl("gptoss", shared), Conversation(turns, ORIGIN)) == [expected]


@pytest.fixture
def glm_tokenizer(shared, tmp_path):
    """GLM-4.5's template with a generation_config.json with the model's three end tokens."""
    tokenizer = tokenizer_of_trl("glm4moe", shared)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|observation|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer.name_or_path = str(tmp_path)
    return tokenizer


def test_glm_ends_calls_and_answers_with_the_token_of_the_next_role(glm_tokenizer):
    turns = calls_twice(reasoning=True)
    user, observation = "<|user|>", "<|observation|>"
    first, second = glm('Zürich "W"'), glm("Bern")
    answer = "\n<think>Bye.</think>\nWelcome." + user
    assert pieces(glm_tokenizer, turns) == [
        first + observation, second + observation, "\n<think></think>\nZürich." + user, answer
    ]  # fmt: skip
    until_call = Conversation(turns.messages[:3], ORIGIN, (TOOL,))
    assert pieces(glm_tokenizer, until_call) == [glm('Zürich "W"', "First.") + observation]
    assert encode_conversation(glm_tokenizer, turns)[1].unended == 0


def test_a_template_of_glm_4_ends_calls_with_the_observation(glm_tokenizer):
    """GLM-4 and GLM-4-0414 write a call as its name and JSON in the line below."""
    template = (
        "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|assistant|>{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if not m.tool_calls %}{{ '\n' + m.content }}{% endif %}"
        "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    stock, glm_tokenizer.chat_template = glm_tokenizer.chat_template, template
    try:
        assert pieces(glm_tokenizer, calls_twice()) == [
            f"weather\n{FIRST}<|observation|>", f"weather\n{SECOND}<|observation|>",
            "\nZürich.<|user|>", "\nWelcome.<|user|>",
        ]  # fmt: skip
    finally:
        glm_tokenizer.chat_template = stock


def xml_call(city):
    return (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
        "</function>\n</tool_call>"
    )


@pytest.mark.parametrize("reasoning", [False, True])
def test_calls_of_the_past_begin_after_their_header_where_generation_is_prompted_to_think(shared, reasoning):
    """Qwen3.5 and Nemotron 3 are prompted with "assistant\\n<think>\\n", which turns of the past do not have: Qwen3.5's
    begin after "assistant\\n", Nemotron's after "<think></think>"."""
    turns = list(calls_twice(reasoning=reasoning).messages)
    turns[4] = dataclasses.replace(turns[4], content="Once more.")
    conversation = Conversation(tuple(turns), ORIGIN, (TOOL,))
    thought = "Bye." if reasoning else ""
    first, second = xml_call('Zürich "W"'), xml_call("Bern")
    assert pieces(tokenizer_of_trl("qwen3_5_think", shared), conversation) == [
        first + "<|im_end|>", "Once more.\n\n" + second + "<|im_end|>", "Zürich.<|im_end|>",
        thought + "\n</think>\n\nWelcome.<|im_end|>",
    ]  # fmt: skip
    nemotron = pieces(tokenizer_of_trl("nemotron_3_super", shared), conversation)
    assert [piece.strip() for piece in nemotron[:2]] == [
        first + "\n<|im_end|>",
        "Once more.\n" + second + "\n<|im_end|>",
    ]


def test_gemma_4_trains_on_calls_and_the_token_that_waits_for_the_result(shared):
    tokenizer = tokenizer_of_trl("gemma4_v5", shared)
    end = "<tool_call|><|tool_response>"
    expected = [
        f'<|tool_call>call:weather{{city:<|"|>Zürich "W"<|"|>,days:7}}{end}',
        f'<|tool_call>call:weather{{city:<|"|>Bern<|"|>,days:7}}{end}',
        "Zürich.<turn|>",
    ]
    assert pieces(tokenizer, calls_twice()) == [*expected, "Welcome.<turn|>"]
    thought = "<|channel>thought\nBye.\n<channel|>Welcome.<turn|>"
    assert pieces(tokenizer, calls_twice(reasoning=True)) == [*expected, thought]


def test_deepseek_gets_arguments_as_text_and_its_template_must_not_lose_tools(shared):
    tokenizer = tokenizer_of_trl("deepseekv3", shared)
    conversation = calls_twice()
    with pytest.raises(UserError, match=r"does not write tools: weather[\s\S]*chat_template: deepseek"):
        mask_conversation(ChatTemplate(tokenizer), conversation)
    answered = Conversation(
        (*conversation.messages[:4], conversation.messages[-3]), ORIGIN
    )  # tools may stand in the system prompt
    called = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{FIRST}\n```"
    ends = "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    assert pieces(tokenizer, answered) == [called + ends, "Zürich.<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize("name", ["HuggingFaceTB-SmolLM3-3B", "SmolLM2", "google-gemma-2-2b-it"])
def test_templates_that_lose_calls_are_refused_with_one_that_writes_them(name, shared):
    tokenizer = tokenizer_of(name, shared)
    conversation = calls_twice(system=False)
    fix = "gemma" if "gemma" in name else "chatml"
    if name == "HuggingFaceTB-SmolLM3-3B":
        fix = "llama3"  # of the tokenizer that stands in here
    with pytest.raises(UserError, match=r"calls\.jsonl, record 4") as caught:
        mask_conversation(ChatTemplate(tokenizer), conversation)
    assert f"model.chat_template: {fix}," in caught.value.fix


def test_parallel_calls_are_one_turn_where_the_family_writes_several(shared, glm_tokenizer):
    both = (call("Bern", 1, IDS[0]), call("Basel", 2, IDS[1]))
    results = [Message("tool", "{}", extra=(("tool_call_id", id_),)) for id_ in IDS]
    turns = (Message("user", "q"), Message("assistant", "", tool_calls=both), *results, Message("assistant", "Yes."))
    conversation = Conversation(turns, ORIGIN, (TOOL,))
    for tokenizer in (tokenizer_of("Qwen-Qwen3-0.6B", shared), glm_tokenizer, tokenizer_of_trl("gemma4_v5", shared)):
        first, answer = pieces(tokenizer, conversation)
        assert first.count("Bern") == first.count("Basel") == 1
        assert "Yes." in answer
    with pytest.raises(UserError, match=r"only supports single tool-calls[\s\S]*record 4[\s\S]*llama3"):
        mask_conversation(ChatTemplate(tokenizer_of("meta-llama-Llama-3.1-8B-Instruct", shared)), conversation)
    with pytest.raises(UserError, match=r"does not write the argument 'Basel' of the call of weather \(message 1\)"):
        mask_conversation(ChatTemplate(tokenizer_of_trl("gptoss", shared)), conversation)


@pytest.mark.parametrize(
    "name", ["meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407", "gemma4_v5"]
)
def test_templates_that_lose_the_text_before_calls_are_refused(name, shared):
    """Llama 3.1's and Nemo's leave it out, Gemma 4's writes it after the results, where it would not be trained on."""
    tokenizer = tokenizer_of_trl(name, shared) if name == "gemma4_v5" else tokenizer_of(name, shared)
    turns = (Message("user", "q"), Message("assistant", "Let me see.", tool_calls=(call("Bern", 1, IDS[0]),)))
    with pytest.raises(UserError, match=r"does not write the text before the calls of message 1[\s\S]*record 4"):
        mask_conversation(ChatTemplate(tokenizer), Conversation(turns, ORIGIN, (TOOL,)))
    thought = Message("assistant", "", tool_calls=turns[1].tool_calls, extra=(("reasoning_content", "Hm."),))
    inline, conversation = LossPolicy(reasoning="inline"), Conversation((turns[0], thought), ORIGIN, (TOOL,))
    with pytest.raises(UserError, match="does not write the text before the calls of message 1"):
        mask_conversation(ChatTemplate(tokenizer), conversation, inline)


def test_parameters_that_a_template_leaves_out_are_refused(shared):
    """Gemma 4's writes only those of a JSON schema."""
    odd = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"description": "Where."}}}}
    talk = Conversation((Message("user", "Hi"), Message("assistant", "Hello")), ORIGIN, (odd,))
    with pytest.raises(UserError, match=r"the parameters of the tool weather: city[\s\S]*record 4[\s\S]*JSON schema"):
        mask_conversation(ChatTemplate(tokenizer_of_trl("gemma4_v5", shared)), talk)
    assert '"city"' in mask_conversation(ChatTemplate(tokenizer_of("Qwen-Qwen3-0.6B", shared)), talk).text


def test_line_breaks_in_arguments_are_found_in_lfm2s_form(shared):
    turns = (Message("user", "q"), Message("assistant", "", tool_calls=(call("it's\na\tb\\", 1),)))
    (piece,) = pieces(tokenizer_of_trl("lfm2_v2", shared), Conversation(turns, ORIGIN, (TOOL,)))
    assert "weather(city='it\\'s\\na\tb\\\\', days=1)" in piece


def test_calls_without_ids_get_those_that_a_template_demands(shared):
    tokenizer = tokenizer_of("mistralai-Mistral-Nemo-Instruct-2407", shared)
    text = mask_conversation(ChatTemplate(tokenizer), calls_twice(ids=False, system=False)).text
    ids = [part.split('"')[0] for part in text.split('"id": "')[1:]]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert [part.split('"')[0] for part in text.split('"call_id": "')[1:]] == ids


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"])
def test_the_text_is_that_of_transformers_from_the_record_as_openai_writes_it(name, shared):
    tokenizer = tokenizer_of(name, shared)
    link = [{"tool_call_id": id_} for id_ in IDS]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warmer?"},
        {"role": "assistant", "content": "", "tool_calls": [call('Zürich "W"', 7, IDS[0])]},
        {"role": "tool", "content": '{"t": 21}'} | link[0],
        {"role": "assistant", "content": "", "tool_calls": [call("Bern", 7, IDS[1])]},
        {"role": "tool", "content": '{"t": 19}'} | link[1],
        {"role": "assistant", "content": "Zürich."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome."},
    ]
    expected = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert mask_conversation(ChatTemplate(tokenizer), calls_twice()).text == expected


@pytest.mark.parametrize("name", ["qwen2_5", "gptoss"])
def test_what_is_trained_on_lies_within_what_trl_trains_on(name, shared):
    """TRL marks the same turns, with the header of a turn and the line after its end."""
    tokenizer = tokenizer_of_trl(name, shared)
    conversation = calls_twice()
    chat = ChatTemplate(tokenizer)
    example, _ = encode_conversation(tokenizer, conversation)
    theirs = tokenizer.apply_chat_template(
        chat.messages(conversation),
        tools=[TOOL],
        chat_template=chat._with_fixed_date(trl_template(f"{name}_training")),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert theirs["input_ids"] == example.ids.tolist()
    unweighted = [
        tokenizer.decode([id_])
        for id_, marked, weight in zip(theirs["input_ids"], theirs["assistant_masks"], example.weights, strict=True)
        if marked and not weight
    ]
    assert all(marked for marked, weight in zip(theirs["assistant_masks"], example.weights, strict=True) if weight)
    headers = re.sub(r"<\|start\|>assistant|<\|end\|>|\n", "", "".join(unweighted))
    assert headers == ""


def test_reasoning_follows_the_template_or_is_written_inline_or_dropped(shared):
    qwen3, qwen25 = (tokenizer_of(name, shared) for name in ("Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct"))
    conversation = calls_twice(reasoning=True)
    last_answer = "<think>\nBye.\n</think>\n\nWelcome.<|im_end|>"
    calls = [hermes(FIRST), hermes(SECOND), "Zürich.<|im_end|>"]
    assert pieces(qwen3, conversation) == [*calls, last_answer]
    assert pieces(qwen3, conversation, LossPolicy(reasoning="drop")) == [*calls, LAST]
    with pytest.raises(UserError, match=r"does not write reasoning[\s\S]*record 4[\s\S]*data.reasoning: inline"):
        pieces(qwen25, conversation)
    assert pieces(qwen25, conversation, LossPolicy(reasoning="drop")) == [*calls, "Welcome.<|im_end|>"]
    thoughts = [f"<think>\n{text}\n</think>\n\n" for text in ("First.", "Second.", "Sum.", "Bye.")]
    inline = pieces(qwen25, conversation, LossPolicy(reasoning="inline"))
    assert inline == [
        f"{thoughts[0]}\n{calls[0]}", f"{thoughts[1]}\n{calls[1]}", thoughts[2] + calls[2],
        thoughts[3] + "Welcome.<|im_end|>",
    ]  # fmt: skip


def test_reasoning_within_the_round_of_the_last_question_is_trained_on(shared):
    tokenizer = tokenizer_of("Qwen-Qwen3-0.6B", shared)
    conversation = calls_twice(reasoning=True)
    one_round = Conversation(conversation.messages[:-2], ORIGIN, (TOOL,))
    thoughts = [f"<think>\n{text}\n</think>\n\n" for text in ("First.", "Second.", "Sum.")]
    expected = [thoughts[0] + hermes(FIRST), thoughts[1] + hermes(SECOND), thoughts[2] + "Zürich.<|im_end|>"]
    assert pieces(tokenizer, one_round) == expected


def test_a_template_that_leaves_out_the_last_reasoning_is_refused(shared):
    turns = (Message("user", "Hi"), Message("assistant", "<think>\nGreet.\n</think>\n\nHello."))
    tokenizer = tokenizer_of_trl("deepseek_r1_distill", shared)
    with pytest.raises(UserError, match=r"leaves out the reasoning of the last turn[\s\S]*chat_template: deepseek"):
        mask_conversation(ChatTemplate(tokenizer), Conversation(turns, ORIGIN))


def test_nothing_but_reasoning_cannot_be_dropped(shared):
    turns = (Message("user", "Hi"), Message("assistant", "<think>\nGreet.\n</think>\n\n"))
    tokenizer = tokenizer_of("SmolLM2", shared)
    with pytest.raises(UserError, match="nothing is left of the assistant's turn 1"):
        mask_conversation(ChatTemplate(tokenizer), Conversation(turns, ORIGIN), LossPolicy(reasoning="drop"))
