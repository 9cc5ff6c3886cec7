"""The recipe of `meshtune data generate`, and the templates that its kinds name."""

from __future__ import annotations

import pathlib
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from meshtune.config import yaml_text
from meshtune.config.load import apply, locator, recipe_file_text, to_stderr
from meshtune.config.problems import as_user_error
from meshtune.config.section import PathText, Section, beside_recipe
from meshtune.config.sections import SourceSection, sources
from meshtune.errors import UserError, nearest

TEMPLATES = pathlib.Path(__file__).parents[1] / "synth" / "templates"
RUBRICS = TEMPLATES / "rubrics"
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?|\w+://.*")  # of an address without http:// or https://


class Price(Section):
    """The price of a million tokens, in dollars."""

    prompt: float = Field(ge=0, description="Of prompts.")
    answer: float = Field(ge=0, description="Of answers.")


class TeacherModel(Section):
    """The model that writes, or judges."""

    path: PathText = Field(
        description="A model folder, a hub id, an adapter or a run; or the address of a server with OpenAI's API, such "
        "as http://localhost:8000/v1."
    )
    model: str | None = Field(default=None, description="Of a server: the model's name; null: its only one.")
    key: str | None = Field(
        default=None, description="Of a server: the name of the environment variable that holds the key."
    )
    timeout: float = Field(default=120.0, gt=0, description="Of a server: seconds for one answer.")
    tries: PositiveInt = Field(default=6, description="Of a server: tries of a request that fails, with waiting.")
    structured: Literal["schema", "object", "none"] = Field(
        default="schema", description="Of a server: the response_format it is sent where an answer has a schema."
    )
    extra: dict[str, Any] = Field(default_factory=dict, description="Of a server: further fields of each request.")
    dtype: str | None = Field(default=None, description="Of a model here: float32, bfloat16 or float16.")
    at_once: PositiveInt = Field(default=16, description="Requests at once; here: rows of the batch.")
    temperature: float = Field(default=0.7, ge=0, le=2, description="0 takes the likeliest token.")
    top_p: float = Field(default=0.95, gt=0, le=1, description="Only the likeliest tokens up to this probability.")
    max_tokens: PositiveInt = Field(default=1024, description="Of an answer.")
    context: PositiveInt | None = Field(
        default=None, description="Tokens of prompt and answer together; null: the model's, where it is known."
    )
    price: Price | None = Field(default=None, description="Dollars for a million tokens: {prompt: 0.1, answer: 0.4}.")

    @property
    def is_server(self) -> bool:
        """Whether it is behind an address."""
        return self.path.startswith(("http://", "https://"))

    @field_validator("path")
    @classmethod
    def _is_an_address(cls, path: str) -> str:
        if not path.startswith(("http://", "https://")):
            if HOST_AND_PORT.fullmatch(path):
                raise ValueError(f"an address begins with http:// or https://: http://{path.rpartition('://')[2]}")
            return path
        try:
            parts = urllib.parse.urlsplit(path)
            complete = parts.hostname is not None and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:  # of a port that is no number
            complete, parts = False, None
        if parts is not None and parts.username is not None:
            raise ValueError(
                "an address is written to the card: put the key into an environment variable, and name it in key"
            )
        if not complete or re.search(r"\s", path):
            raise ValueError("this is no address: write it as http://localhost:8000/v1")
        return path

    @field_validator("key")
    @classmethod
    def _is_a_name(cls, key: str | None) -> str | None:
        if key is not None and not VARIABLE_NAME.fullmatch(key):
            raise ValueError("this is no name of an environment variable: put the key into one, and give its name")
        return key

    @model_validator(mode="after")
    def _fits_place(self) -> TeacherModel:
        unread = ("dtype",) if self.is_server else ("model", "key", "timeout", "tries", "structured", "extra", "price")
        for name in unread:
            if name in self.model_fields_set and getattr(self, name) is not None:
                kind, other = ("a server", "a model here") if self.is_server else ("a model here", "a server")
                raise ValueError(f"{name} is an option of {other}, and {self.path} is {kind}: leave it out")
        return self


class KindSection(Section):
    """A kind of records to make."""

    template: PathText = Field(description="A template that ships with Meshtune, such as qa, or a YAML file.")
    share: float = Field(default=1.0, gt=0, le=1, description="Of the passages, records, tools or pictures.")
    repeat: PositiveInt = Field(default=1, description="Requests for each of them, with seeds of their own.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the template; of a list, each request draws one entry."
    )


class LengthFilter(Section):
    """Bounds of an answer's length."""

    min_words: PositiveInt = Field(default=1, description="Words of an answer at least.")
    max_words: PositiveInt | None = Field(default=None, description="Words of an answer at most.")


class JudgedFilter(Section):
    """A score that a judge gives."""

    least: int = Field(default=4, ge=1, le=5, description="Score at least, of 1 to 5.")
    rubric: PathText | None = Field(default=None, description="A YAML file with a rubric; null: the one that ships.")


class Filters(Section):
    """Which records are dropped. Each filter counts them and shows examples."""

    length: LengthFilter = Field(default=LengthFilter(), description="Bounds of the answer's length.")
    language: str | None = Field(default=None, description="Code of the answers' language, such as en or zh-cn.")
    refusals: bool = Field(default=True, description="Drop answers that refuse, or speak of the model.")
    duplicates: float | None = Field(
        default=0.8, gt=0, le=1, description="Similarity (Jaccard, of runs of three words) from which records are one."
    )
    evaluation: list[SourceSection] = Field(
        default=[], description="Evaluation data: records with 13 words in a row in common are dropped."
    )
    agreement: float | None = Field(
        default=None, gt=0, le=1, description="Least F1 of the words of a second answer to the same question."
    )
    grounded: JudgedFilter | None = Field(default=None, description="A judge's score: does the passage support it?")
    quality: JudgedFilter | None = Field(default=None, description="A judge's score: is it clear, useful, correct?")

    @field_validator("evaluation", mode="before")
    @classmethod
    def _short_sources(cls, value: object) -> object:
        return sources(value)

    @field_validator("grounded", "quality", mode="before")
    @classmethod
    def _short_score(cls, value: object) -> object:
        return {"least": value} if type(value) is int else {} if value is True else None if value is False else value


class Mix(Section):
    """General conversations among the records."""

    data: list[SourceSection] = Field(min_length=1, description="Sources of conversations.")
    share: float = Field(default=0.2, gt=0, lt=1, description="Their share of all records.")

    @field_validator("data", mode="before")
    @classmethod
    def _short_sources(cls, value: object) -> object:
        return sources(value)


class Budget(Section):
    """The most that is spent. A request starts only if the most it can cost is left."""

    tokens: PositiveInt | None = Field(default=None, description="Of prompts and answers, the judge's included.")
    dollars: float | None = Field(default=None, gt=0, description="By teacher.price and judge.price.")


class DataRecipe(Section):
    """Documents, a teacher, and the records that it makes of them."""

    teacher: TeacherModel = Field(description="The model that writes the records.")
    judge: TeacherModel | None = Field(default=None, description="The model that scores them; null: the teacher.")
    documents: list[PathText] = Field(default=[], description="Files, and folders of them.")
    passage_words: int = Field(default=250, ge=20, description="Words of a passage, about.")
    examples: list[SourceSection] = Field(default=[], description="Conversations that kinds of records begin with.")
    tools: PathText | None = Field(default=None, description="A JSON file with a list of OpenAI's tool schemas.")
    pictures: list[PathText] = Field(default=[], description="Pictures, and folders of them.")
    kinds: list[KindSection] = Field(min_length=1, description="Kinds of records: names of templates, or mappings.")
    filters: Filters = Field(default=Filters(), description="Which records are dropped.")
    mix: Mix | None = Field(default=None, description="General data among the records.")
    system: str | None = Field(default=None, description="System prompt that the records begin with.")
    held_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the passages, examples, tools or pictures whose records are written to held-out.jsonl.",
    )
    limit: PositiveInt | None = Field(default=None, description="Requests for records at most, drawn by the seed.")
    attempts: PositiveInt = Field(default=3, description="Answers to ask for until one has the schema.")
    budget: Budget = Field(default=Budget(), description="The most that is spent.")
    on_bad: Literal["error", "skip"] = Field(
        default="error", description="How documents without text are treated: skip counts them and leaves them out."
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="The same seed and teacher give the same records.")
    output: PathText = Field(description="The folder of the records.")

    @field_validator("examples", mode="before")
    @classmethod
    def _short_sources(cls, value: object) -> object:
        return sources(value)

    @model_validator(mode="after")
    def _has_prices(self) -> DataRecipe:
        unpriced = [
            name
            for name, model in (("teacher", self.teacher), ("judge", self.judge))
            if self.budget.dollars is not None and model is not None and model.is_server and model.price is None
        ]
        if unpriced:
            raise ValueError(f"budget.dollars needs {unpriced[0]}.price: {{prompt: ..., answer: ...}}, or --price")
        return self


class Turn(Section):
    """A message of a record."""

    role: Literal["user", "assistant"] | None = Field(default=None, description="Of the message.")
    content: str = Field(default="", description="Jinja; the variables are the answer's, and those of the prompt.")
    tool_calls: str | None = Field(default=None, description="Variable with a list of {name, arguments}.")


class MessageTemplate(Turn):
    """A message of a record, or with `for_each` messages for each entry of a list of the answer."""

    for_each: str | None = Field(default=None, description="Variable with a list; `item` is its entry.")
    messages: list[Turn] = Field(default=[], description="Messages for each entry.")

    @model_validator(mode="after")
    def _one_form(self) -> MessageTemplate:
        if (self.role is None) != (self.for_each is not None and bool(self.messages)):
            raise ValueError("a message needs role and content, or for_each and messages")
        if any(turn.role is None for turn in self.messages):
            raise ValueError("a message of for_each needs a role")
        return self


class Rule(Section):
    """Which of several answers are good."""

    min_words: int = Field(default=1, ge=0, description="Words at least.")
    max_words: PositiveInt | None = Field(default=None, description="Words at most.")
    matches: str | None = Field(default=None, description="Regular expression that is in it.")
    lacks: str | None = Field(default=None, description="Regular expression that is not in it.")

    @field_validator("matches", "lacks")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"this is no regular expression: {error}") from error
        return pattern


class Template(Section):
    """A kind of records: the teacher's prompt, and the form of the records."""

    about: str = Field(description="One line.")
    of: Literal["passage", "example", "tool", "picture"] = Field(description="What one request is about.")
    options: dict[str, Any] = Field(default_factory=dict, description="Variables with their defaults.")
    system: str | None = Field(default=None, description="System prompt of the request.")
    prompt: str | None = Field(default=None, description="Jinja. What all requests share comes first.")
    answer_schema: dict[str, Any] | None = Field(default=None, description="JSON schema; null: the answer is text.")
    for_each: str | None = Field(default=None, description="List of the answer that has a record for each entry.")
    messages: list[MessageTemplate] = Field(min_length=1, description="The record; of pairs: its prompt.")
    answer: str | None = Field(default=None, description="Of pairs: Jinja, the prompt of each candidate.")
    candidates: int = Field(default=4, ge=2, description="Of pairs: answers to choose the best and worst of.")
    rubric: str | None = Field(default=None, description="Of pairs: how a judge scores the candidates, 1 to 5.")
    rule: Rule | None = Field(default=None, description="Of pairs: a rule that chosen answers keep and others break.")

    @property
    def gives_pairs(self) -> bool:
        """Whether its records are preference pairs."""
        return self.answer is not None

    @model_validator(mode="after")
    def _complete(self) -> Template:
        if self.prompt is None and self.answer is None:
            raise ValueError("a template needs a prompt, or for pairs an answer")
        if (self.answer is not None) != (self.rubric is not None or self.rule is not None):
            raise ValueError("answer, with rubric or rule, makes pairs; a template has both or neither")
        if self.rubric is not None and self.rule is not None:
            raise ValueError("pairs are chosen by rubric or by rule: give one of them")
        return self


class Rubric(Section):
    """How a judge scores a record."""

    about: str = Field(description="One line.")
    prompt: str = Field(description="Jinja with passage, conversation; the score is from 1 to 5.")


COPY = "copy a template: meshtune data template qa > mine.yaml"


def template_names() -> list[str]:
    """The templates that ship with Meshtune."""
    return sorted(file.stem for file in TEMPLATES.glob("*.yaml"))


def template_text(name: str) -> str:
    """The YAML of a template that ships with Meshtune, or of a file. Raises UserError for anything else."""
    if name in template_names():
        return recipe_file_text(TEMPLATES / f"{name}.yaml")
    file = pathlib.Path(name)
    if file.suffix not in (".yaml", ".yml"):
        hint = nearest(name, template_names())
        fix = f"{hint}give one of {', '.join(template_names())}, or a YAML file"
        raise UserError(f"there is no template '{name}'", where="kinds", fix=fix)
    return _file_text(file, "template", name, COPY)


def load_template(name: str) -> Template:
    """Loads a template that ships with Meshtune, or a YAML file. Raises UserError for anything else."""
    return parse_template(template_text(name), name)


def parse_template(text: str, name: str) -> Template:
    """The template in a YAML text that messages call `name`. Raises UserError."""
    return _parse(text, Template, name, COPY)


def load_rubric(section: JudgedFilter, default: str) -> Rubric:
    """Loads the rubric of a filter. Raises UserError for anything else."""
    file = RUBRICS / f"{default}.yaml" if section.rubric is None else pathlib.Path(section.rubric)
    fix = f"a rubric has about and prompt; without filters.{default}.rubric the one that ships is taken"
    name = str(section.rubric or default)
    return _parse(_file_text(file, "rubric", name, fix), Rubric, name, fix)


def _file_text(file: pathlib.Path, kind: str, name: str, fix: str) -> str:
    if not file.exists():
        raise UserError(f"there is no such {kind}", where=name, fix=f"correct the path; {fix}")
    return recipe_file_text(file)


def _parse(content: str, section: type[Template] | type[Rubric], name: str, fix: str) -> Any:
    kind = section.__name__.lower()
    text = yaml_text.read(content, name)
    raw = text.value
    if not isinstance(raw, dict):
        raise UserError(f"a {kind} is a mapping", where=name, fix=fix)
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        raise as_user_error(error, raw, name, locator(name, text.lines, {}), section) from error


def load_data_recipe(source: str | pathlib.Path | Mapping[str, object], overrides: Sequence[str] = ()) -> DataRecipe:
    """The recipe in a YAML file or a mapping, with overrides of the command line. Relative paths of a file that do not
    exist from the current directory are looked for next to it.

    Raises UserError for a file that cannot be read or is no YAML, and for every unknown key and unfit value at once.
    """
    name, lines, content = "the recipe", {}, source
    if isinstance(source, str | pathlib.Path):
        name = str(source)
        text = yaml_text.read(recipe_file_text(pathlib.Path(source)), name)
        lines, content = text.lines, text.value
    if not isinstance(content, Mapping):
        raise UserError("a recipe is a mapping of keys to values", where=name, fix="start with `teacher: ...`")
    if "teacher" not in content and {"model", "data"} <= set(content):
        fix = "meshtune train trains by it; docs/generate-data.md shows a recipe of data"
        raise UserError("this is a recipe of training", where=name, fix=fix)
    raw, origins = apply(content, overrides, to_stderr, written_out)
    if isinstance(source, str | pathlib.Path):
        recipe_file = pathlib.Path(source).expanduser()
        beside_recipe(raw, recipe_file, lambda path: path in origins, to_stderr, _paths(raw))
    try:
        return DataRecipe.model_validate(raw)
    except ValidationError as error:
        raise as_user_error(error, raw, name, locator(name, lines, origins), DataRecipe) from error


def written_out(raw: Mapping[str, object]) -> dict[str, Any]:
    """A copy with short forms written out: `teacher: PATH`, `documents: PATH`, `kinds: qa`, `examples: FILE`."""
    full = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    for key in ("teacher", "judge"):
        if isinstance(full.get(key), str):
            full[key] = {"path": full[key]}
    for key in ("documents", "pictures", "kinds"):
        if isinstance(full.get(key), str | dict):
            full[key] = [full[key]]
    for holder, key in ((full, "examples"), (full.get("mix"), "data"), (full.get("filters"), "evaluation")):
        if isinstance(holder, dict) and key in holder:
            holder[key] = sources(holder[key])
    if isinstance(kinds := full.get("kinds"), list):
        full["kinds"] = [{"template": kind} if isinstance(kind, str) else kind for kind in kinds]
    return full


def _paths(raw: Mapping[str, Any]) -> list[yaml_text.Path]:
    """The keys of a raw recipe whose paths may be relative to its file."""
    paths: list[yaml_text.Path] = [("teacher", "path"), ("judge", "path"), ("tools",)]
    paths += [("filters", name, "rubric") for name in ("grounded", "quality")]
    lists: list[tuple[yaml_text.Path, tuple[str, ...]]] = [(("documents",), ()), (("pictures",), ())]
    lists += [(("examples",), ("path",)), (("mix", "data"), ("path",)), (("filters", "evaluation"), ("path",))]
    lists += [(("kinds",), ("template",))]
    for path, below in lists:
        entries = yaml_text.value_at(raw, path)
        paths += [(*path, n, *below) for n in range(len(entries) if isinstance(entries, list) else 0)]
    values = {path: yaml_text.value_at(raw, path) for path in paths}
    return [
        path
        for path, value in values.items()
        if isinstance(value, str) and (path[-1] != "template" or value.endswith((".yaml", ".yml")))
    ]
