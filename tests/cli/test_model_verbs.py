"""generate, chat and export on the model that ships with Meshtune."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import transformers

from meshtune import quickstart
from meshtune.cli import main as program
from meshtune.errors import UserError
from meshtune.generate.api import load

PROMPT = "Once upon a time, there was a little dog"


@pytest.fixture
def meshtune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def continuation() -> str:
    """Continues PROMPT greedily by transformers, for 12 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(quickstart.MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(quickstart.MODEL)
    ids = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    return tokenizer.decode(output, skip_special_tokens=True)[len(PROMPT) :]


def test_generate_says_what_transformers_says(meshtune, continuation):
    code, out, err = meshtune("generate", str(quickstart.MODEL), "--prompt", PROMPT, "--max-tokens", "12")
    assert (code, err) == (0, "")
    assert out == continuation + "\n"


def test_an_int8_cache_is_said_and_other_formats_are_refused(meshtune):
    arguments = ("generate", str(quickstart.MODEL), "--prompt", PROMPT, "--max-tokens", "2")
    code, out, err = meshtune(*arguments, "--cache", "int8")
    assert (code, err) == (0, "note: cache: keys and values in int8\n")
    assert out.strip()
    code, out, err = meshtune(*arguments, "--cache", "fp8")
    assert (code, out) == (2, "")
    assert "a cache in 'fp8' is not supported" in err
    code, _, err = meshtune("plan", "recipe.yaml", "--target", "H100", "--cache", "int8")
    assert code == 2
    assert "training has no cache" in err


def test_max_new_tokens_is_another_name_of_max_tokens(meshtune, continuation):
    """transformers' name, on the command line and in Python."""
    _, out, _ = meshtune("generate", str(quickstart.MODEL), "--prompt", PROMPT, "--max-new-tokens", "12")
    model = load(quickstart.MODEL)
    assert out == continuation + "\n" == model.generate(PROMPT, max_new_tokens=12) + "\n"
    assert "".join(model.stream(PROMPT, max_new_tokens=12)) == continuation
    with pytest.raises(UserError, match="two names of one limit"):
        model.generate(PROMPT, max_tokens=3, max_new_tokens=3)


def test_generate_answers_with_a_chat_template_unless_told_not_to(meshtune, tmp_path, continuation):
    """A chat model ends a text at once that is not in its template: `generate --prompt` printed an empty line."""
    template = tmp_path / "t.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    options = ("-p", PROMPT, "-n", "12", "--chat-template", str(template))
    code, answer, err = meshtune("generate", str(quickstart.MODEL), *options)
    assert code == 0
    assert err == "note: the prompt is a message in the model's chat template; --no-chat continues it\n"
    assert meshtune("generate", str(quickstart.MODEL), *options, "--chat") == (0, answer, "")
    assert meshtune("generate", str(quickstart.MODEL), *options, "--no-chat") == (0, continuation + "\n", "")
    chat = load(quickstart.MODEL, chat_template=str(template))
    assert chat.generate([{"role": "user", "content": PROMPT}], max_tokens=12) + "\n" == answer


def test_generate_reads_standard_input(meshtune, monkeypatch, continuation):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert meshtune("generate", str(quickstart.MODEL), "-n", "12")[1] == continuation + "\n"


def test_the_same_seed_says_the_same(meshtune):
    def story(seed: str) -> str:
        return meshtune("generate", str(quickstart.MODEL), "-p", PROMPT, "-n", "24", "-t", "1", "--seed", seed)[1]

    assert story("1") == story("1") != story("2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "temperature = -1.0 is out of range"),
        (("--top-p", "0"), "top_p = 0.0 is out of range"),
        (("--dtype", "int8"), "dtype 'int8' is not supported"),
        (("--adapter", "nowhere"), "there is no adapter at 'nowhere'"),
    ],
)
def test_bad_options_are_named(meshtune, arguments, message):
    code, _, err = meshtune("generate", str(quickstart.MODEL), "-p", PROMPT, *arguments)
    assert code == 2
    assert message in err


def test_a_model_that_is_not_there_is_a_users_mistake(meshtune, tmp_path):
    code, _, err = meshtune("generate", str(tmp_path / "nope"), "-p", PROMPT)
    assert code == 2
    assert err.startswith("error: ")


def test_chat_needs_a_chat_template(meshtune):
    code, _, err = meshtune("chat", str(quickstart.MODEL))
    assert code == 2
    assert "chat template" in err


def test_chat_answers_remembers_and_leaves(meshtune, monkeypatch, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/help\n/reset\n/exit\nnever\n"))
    options = ("--chat-template", str(template), "-n", "4", "-t", "0")
    code, out, err = meshtune("chat", str(quickstart.MODEL), *options)
    assert (code, err) == (0, "")
    assert out.count("/reset forgets the conversation") == 2
    assert out.count("you:") == 4


def test_export_writes_a_model_that_transformers_loads(meshtune, tmp_path):
    """Same weights, other files: float32 logits agree to rounding."""
    dest = tmp_path / "out"
    code, out, _ = meshtune("export", str(quickstart.MODEL), "--to", str(dest), "--max-shard-size", "400KB")
    assert code == 0
    assert "a model in float32" in out
    assert len(json.loads((dest / "model.safetensors.index.json").read_text())["weight_map"]) > 10
    ids = transformers.AutoTokenizer.from_pretrained(dest)(PROMPT, return_tensors="pt")
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path)(**ids).logits.detach().numpy()
        for path in (dest, quickstart.MODEL)
    )
    np.testing.assert_array_equal(ours, theirs)


def test_merging_what_has_no_adapter_is_an_error(meshtune, tmp_path):
    code, _, err = meshtune("export", str(quickstart.MODEL), "--to", str(tmp_path / "x"), "--merge")
    assert code == 2
    assert "there is no adapter to merge" in err
