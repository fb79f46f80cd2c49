"""Where data come from: one class for what each purpose reads, and a table of the kinds of tables to read it from.

The section of a source has the fields of its purpose and of its kind. `in_tables` makes its class of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field, create_model, field_validator

from troupe.orchestrator.algorithms.section import SourceAlgorithm
from troupe.orchestrator.spec.conditions import Condition
from troupe.workers.contract.config import EvalSampling
from troupe.workers.contract.config_base import Frozen
from troupe.workers.contract.consequences import (
    AS_SAMPLED,
    EVALUATED,
    EVALUATED_IF_SET,
    OTHER_REWARDS,
    REWARDED,
    SAMPLED,
    Consequences,
    noted,
    refused,
)
from troupe.workers.contract.reward_config import RewardFunctionConfig

HUB_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$"
SECTION, LIST, MAP = "section", "list", "map"
"""The forms of data and environments: one section, a list of sections, or sections by name."""
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
COUNTED_BEFORE = noted("results so far count as they were")
_NEXT_PROMPT = noted("from the next prompt on")


class Located(Frozen):
    """Where the rows are, and how many of them are read."""

    path: Annotated[str, Consequences(path="path")] = Field(min_length=1)
    """Where the data is; relative paths start at the current directory. A pattern such as `data/train-*.parquet` names
    several files of one format, and so does the URL of a store, `s3://bucket/data/train-*.parquet` (`gs://`, `abfs://`,
    `https://` and other protocols of fsspec), whose files are copied to the cache folder; credentials come from the
    environment."""
    limit: int = Field(default=0, ge=0)
    """Read only this many rows; 0: all."""


class TableFile(Located):
    """A file of rows, or a pattern of files of one format."""

    kind: Literal["jsonl", "json", "parquet", "csv"]
    """Format: `jsonl`, one JSON object per line; `json`, one array of objects, alone or in an object (or one object per
    line); `parquet`; `csv` (or TSV) in UTF-8 or UTF-16, whose first line names the columns, separated by commas,
    semicolons or tabs, and every value is text. JSON and CSV may be compressed (`.gz`, `.zst`)."""


class DatasetsFolder(Located):
    """A folder written by `save_to_disk` of the `datasets` library."""

    kind: Literal["datasets"]
    """A folder written by `save_to_disk` of the `datasets` library."""
    split: str | None = None
    """Split to read, if the folder holds several."""


class HubFiles(Frozen):
    """Files of a dataset on the Hugging Face hub."""

    kind: Literal["hub"]
    """Parquet, JSONL (`.jsonl`, `.jsonl.gz`), CSV or JSON (`.json`, `.json.gz`) files of a dataset on the Hugging Face
    hub."""
    name: str = Field(pattern=HUB_NAME)
    """Name of the dataset, `org/name`."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit; null: main. A run is pinned to the commit."""
    subset: str | None = Field(default=None, min_length=1)
    """Folder of the dataset with the files, if it has several."""
    split: str = Field(default="train", min_length=1)
    """Read the files with this word in their path, such as `data/train-00000-of-00001.parquet`."""
    files: tuple[str, ...] = ()
    """Read these files instead, as names or patterns (`data/*.parquet`). A run is pinned to the names it found."""
    limit: int = Field(default=0, ge=0)
    """Read only this many rows; 0: all."""

    @property
    def dataset_field(self) -> str:
        return "name"

    @property
    def dataset_name(self) -> str:
        return dict(self)[self.dataset_field]


class SourceName(Frozen):
    """One of several sources."""

    name: Annotated[str, refused("the checkpoint holds the position in each source by its name")] = Field(
        max_length=32, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"
    )
    """Name of the source in metrics, samples and messages."""


class NamedHubFiles(SourceName, HubFiles):
    """Files of a dataset on the Hugging Face hub, as one of several sources; `name` is the source's."""

    dataset: str = Field(pattern=HUB_NAME)
    """Name of the dataset, `org/name`."""

    @property
    def dataset_field(self) -> str:
        return "dataset"


class Columns(Frozen):
    """What a purpose reads from the columns of a table."""

    where: Annotated[str | None, EVALUATED_IF_SET] = None
    """Use only the rows that meet this condition, a Python expression over columns: `score_ratio > 2`, `len(code) < 400
    and lang == "en"`, `source.name in ["a", "b"]`; null: all rows. Other rows are counted, and are part of `limit`."""

    @field_validator("where")
    @classmethod
    def _is_condition(cls, value: str | None) -> str | None:
        if value is not None:
            Condition.parse(value)
        return value

    if TYPE_CHECKING:
        # The section of a source has the fields of a table as well.
        @property
        def kind(self) -> str: ...


class PromptText(Frozen):
    """How a row's text becomes a prompt."""

    system: str = ""
    """System message put before the prompt, unless empty. A row that has a system message keeps it."""
    template: str = "{prompt}"
    """The user message; `{prompt}` stands for the row's text."""
    max_chars: int = Field(default=20_000, ge=1)
    """A prompt or answer with more characters is a bad row."""


class PromptRows(PromptText):
    """How rows become prompts."""

    dedupe: bool = False
    """Use a prompt once, however many rows of the source have it, with whatever spaces, and in whatever case if the
    answer is the same: those after its first row are left out. False: they are used, and counted at the start."""


class Prompts(PromptRows, Columns):
    """A table of prompts."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`."""
    system_column: Annotated[str | None, EVALUATED_IF_SET] = None
    """Column with the system message of each row; `system` is used for a row without one."""
    answer: str | None = "answer"
    """Column with the correct answer, as the reward functions read it, or with a list of answers that are all correct;
    null if there is none."""
    options: Annotated[str | tuple[str, ...] | None, EVALUATED_IF_SET] = None
    """Column with the options of each question, a list of texts, or several columns with one each: they stand below the
    prompt, as A, B, ..., and the right answer is a letter. `answer` has the text, the letter or the number (from 0 on)
    of the right option. If it is one of these columns, options are in an order that differs by question. null: none."""
    metadata: tuple[str, ...] = ()
    """Further columns passed to the reward functions."""
    candidates: str | None = None
    """Column with answers from other sources, a list of texts: they are scored like the policy's samples, and the best
    of all is trained on (raft); null if there is none."""


class RecipeConfig(Frozen):
    """One task family of reasoning-gym."""

    name: str = Field(min_length=1)
    """Task family, such as `chain_sum`."""
    weight: float = Field(default=1.0, gt=0.0)
    """Share of the source's prompts, relative to the other recipes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task family (its difficulty)."""


class ReasoningGymSource(PromptRows):
    """Tasks generated by reasoning-gym on this machine; the same seed generates the same tasks."""

    kind: Literal["reasoning_gym"]
    """Tasks generated by reasoning-gym."""
    recipes: tuple[RecipeConfig, ...] = Field(min_length=1)
    """Task families to draw from."""
    size: int = Field(ge=1, le=10_000_000)
    """Prompts over all recipes."""
    seed: int = Field(ge=0, lt=2**31)
    """Seed of the tasks; different seeds generate different tasks (a small family may repeat some)."""


class HeldOut(Frozen):
    """How a held-out set with a name is sampled and scored."""

    sampling: EvalSampling | None = None
    """How responses are sampled; null: as `evaluation.sampling`."""
    rewards: tuple[RewardFunctionConfig, ...] | None = Field(default=None, min_length=1)
    """Reward functions, whose weighted sum is the reward of a sample of this set; null: the functions of
    `roles.reward`, and its reward model."""
    solved_at: float | None = None
    """As `evaluation.solved_at`, for this set; null: by the rule there, applied to the set's rewards."""
    environment: str | None = None
    """Name of the environment that samples are episodes in, if `roles.environment` has several; null there, or
    `none`: a sample is one response to its prompt. With one environment without a name, null: samples are episodes in
    it."""
    level: str = "level"
    """Key of the metadata (`metadata`) by whose values the results are also reported, if rows have it; tasks of
    reasoning_gym have `recipe`."""


class HeldOutPrompts(HeldOut, Prompts):
    """A held-out set from a table."""


class HeldOutTasks(HeldOut, ReasoningGymSource):
    """Tasks generated by reasoning-gym on this machine; the same seed generates the same tasks."""


class SourceShare(SourceName):
    """The part of one source in a mixture."""

    weight: Annotated[float, _NEXT_PROMPT] = Field(default=1.0, gt=0.0)
    """Prompts or examples that are drawn from this source, relative to the other sources."""
    repeats: Annotated[int, _NEXT_PROMPT] = Field(default=0, ge=0)
    """Most passes over the source; the others then share the rest. 0: no limit."""


class Mixed(SourceShare):
    """One of several sources of prompts, with its settings. A setting left out has the run's value."""

    rewards: Annotated[tuple[RewardFunctionConfig, ...] | None, OTHER_REWARDS, REWARDED, SAMPLED] = Field(
        default=None, min_length=1
    )
    """Reward components of this source; null keeps `roles.reward`'s. `reward_model` is the score of one of the role's
    models."""
    solved_at: Annotated[float | None, COUNTED_BEFORE] = None
    """A sample with at least this reward counts as solved, in the source's pass rate and in the curriculum; null:
    `data.curriculum.solved_at`, and without it by the rule of `evaluation.solved_at`, applied to the source's rewards;
    if these do not define it, there is no pass rate, and a curriculum needs it."""
    group_size: Annotated[int | None, AS_SAMPLED, SAMPLED] = Field(default=None, ge=1)
    """Samples per prompt; null: `algorithm.group_size`."""
    max_tokens: Annotated[int | None, _NEXT_PROMPT, SAMPLED] = Field(default=None, ge=1)
    """Longest response (of an episode: longest turn), in tokens, at most `sampling.max_tokens`; null: that."""
    environment: Annotated[str | None, AS_SAMPLED, SAMPLED] = None
    """Name of the environment that samples are episodes in, if `roles.environment` has several; null there, or
    `none`: a sample is one response to its prompt. With one environment without a name, null: samples are episodes in
    it."""
    mask_truncated: Annotated[bool | None, SAMPLED] = None
    """Overrides `algorithm.mask_truncated` for this source, unless null."""
    dynamic_sampling_on: Annotated[str | None, SAMPLED] = None
    """Overrides `algorithm.dynamic_sampling_on` for this source, whose rewards may have other components, unless
    null."""

    algorithm: SourceAlgorithm | None = None
    """Settings of the loss for the samples of this source: `{clip_high: 0.28, kl_coef: 0.0}`; null: the run's."""


class MixedPrompts(Mixed, Prompts):
    """A table of prompts in a mixture."""


class MixedTasks(Mixed, ReasoningGymSource):
    """Tasks generated by reasoning-gym, in a mixture."""


class Texts(Columns):
    """A table of texts, and how many of them a step trains on."""

    text: str = "text"
    """Column with the text."""
    max_tokens: Annotated[int, refused("it decides where texts are cut, and so their order")] = Field(default=512, ge=2)
    """A longer text is cut into pieces of this many tokens."""
    texts_per_step: int = Field(default=16, ge=1)
    """Pieces of text that each step trains on."""


class NamedTexts(SourceName, Texts):
    """One of several tables of texts."""


Value = bool | int | float | str
NEGATIVE, POSITIVE = "negative", "positive"
"""Values of `preferred` for columns with signed numbers."""


class Preferred(Frozen):
    """The column that says which of two answers is better, and its values. Rows with another value refuse the file."""

    consequences = EVALUATED

    column: str
    """Name of the column."""
    first: Value | tuple[Value, ...]
    """Its value, or values, if the first of `answers` is better. `negative`: numbers below 0."""
    second: Value | tuple[Value, ...]
    """Its value, or values, if the second of `answers` is better. `positive`: numbers above 0."""
    ties: tuple[Value, ...] = ()
    """Its values if neither is better. Such rows are left out and counted, as are signed numbers that are 0."""

    @property
    def strengths(self) -> list[tuple[Value, float]]:
        """Its values, each with 1 if the first answer is better, -1 if the second is, or 0 if neither is."""
        first, second = (given if isinstance(given, tuple) else (given,) for given in (self.first, self.second))
        return [
            (one, strength) for given, strength in ((first, 1.0), (second, -1.0), (self.ties, 0.0)) for one in given
        ]

    @property
    def signed(self) -> bool:
        """Whether the sign of a number says which answer is better, and its size how much."""
        return {self.first, self.second} == {NEGATIVE, POSITIVE}


class Examples(PromptText, Columns):
    """A table of examples."""

    prompt: str | None = "prompt"
    """Column with the prompt: text, or a list of messages with `role` and `content`. null (reward_model, dpo, ipo,
    orpo, rrhf): the answers are whole conversations, and their common beginning is the prompt."""
    system_column: Annotated[str | None, EVALUATED_IF_SET] = None
    """Column with the system message of each row; `system` is used for a row without one."""
    tools: Annotated[str | None, EVALUATED_IF_SET] = None
    """Column with the tools of each row, which the chat template renders: JSON schemas of functions, as a list or its
    JSON. A response that is a list of calls (`name`, `arguments`) is then a turn with these; null: no tools."""
    response: str = "response"
    """Column with the response (sft, kto): text, or a list of messages that begins and ends with the assistant's."""
    messages: str | None = None
    """Column with whole conversations (sft, kto) instead of `prompt` and `response`: lists of messages, the last
    one the assistant's."""
    loss_on: Literal["all", "last"] = "all"
    """Turns of the assistant in `messages` that have a loss: `all`, or only the `last`, as the response to all before
    it."""
    chosen: str = "chosen"
    """Column with the better answer (reward_model, dpo, ipo, orpo): text, or a list of messages."""
    rejected: str = "rejected"
    """Column with the worse answer (reward_model, dpo, ipo, orpo): text, or a list of messages."""
    margin: str | tuple[str, str] | None = None
    """Column with how much better the better answer is (reward_model), or the two columns with the scores of the
    answers, whose difference it is; null if there is none. A negative margin refuses the file."""
    min_margin: Annotated[float, EVALUATED_IF_SET] = Field(default=0.0, ge=0.0)
    """Leave out pairs whose margin is smaller: by `margin`, or by `scores` or signed `preferred` without it."""
    answers: str | tuple[str, ...] | None = None
    """Column with a list of answers, or several columns with one answer each, instead of `chosen` and `rejected`: best
    first (reward_model, dpo), or in any order with `scores`, `ranks` or `preferred`. A dot leads into a list of
    structs (`completions.response`). Algorithms on pairs take the best and the worst."""
    scores: str | tuple[str, ...] | None = None
    """Column with a list of scores, or a column for each answer: the answer with the highest score is the best, and
    answers with equal scores are tied."""
    ranks: Annotated[str | tuple[str, ...] | None, EVALUATED_IF_SET] = None
    """As `scores`, except that the answer with the lowest rank is the best."""
    one_in_a_row: Annotated[bool, EVALUATED_IF_SET] = False
    """Each row has one answer, in `answers`, and its number, in `scores` or `ranks`: rows that follow each other with
    the same prompt are one example (HelpSteer2)."""
    preferred: Annotated[Preferred | None, EVALUATED_IF_SET] = None
    """Which of two `answers` is better, by the value of a column."""
    label: str = "label"
    """Column with whether the response is good: true or false, 1 or 0, yes or no, also as text (kto). Another value
    refuses the file."""
    steps: Annotated[str, EVALUATED_IF_SET] = "completions"
    """Column with the steps of a response (process_reward_model): a list of texts, or one text in which `ки` ends each
    step (Math-Shepherd), which begins with the prompt if `prompt` is null, or steps with `completions` that have a
    `text` and a `rating` (PRM800K), which become an example for each way through them."""
    step_labels: Annotated[str | None, EVALUATED_IF_SET] = "labels"
    """Column with a label for each of the `steps`: true or false, 1 or 0, or the chance that the step is right; or, of
    one text, the same text with `+` or `-` in the places of `ки`. Another value refuses the file. null: the steps have
    ratings of -1, 0 and 1."""
    neutral: Annotated[float, EVALUATED_IF_SET] = Field(default=1.0, ge=0.0, le=1.0)
    """Label of a step that is rated 0: neither good nor bad."""
    separator: Annotated[str, EVALUATED_IF_SET] = Field(default="\n\n", min_length=1)
    """Text that ends each of the `steps` but the last. A step that has it is a bad row."""
    dedupe: bool = False
    """Use an example once, however many rows have its prompt, answers and labels: those after the first are left out.
    False: they are used, and counted at the start."""


class MixedExamples(SourceShare, Examples):
    """A table of examples in a mixture."""


TABLES = {"File": TableFile, "Datasets": DatasetsFolder, "Hub": HubFiles}
"""The kinds of tables, by the first word of the names of their sources."""


def in_tables(purpose: type[Columns], *others: type[Frozen]) -> Any:
    """The sections that read data for a purpose, which differ in `kind`: one for each kind of table, and others.
    Sections of a list have a field `name`, so that the name of a dataset on the hub is another field."""
    sections: list[type[Frozen]] = []
    for word, table in TABLES.items():
        kind = NamedHubFiles if table is HubFiles and issubclass(purpose, SourceName) else table
        name, about = word + purpose.__name__, {"__doc__": table.__doc__, "__module__": __name__}
        # Its fields have their descriptions. pydantic would look for a source, through every module of the process.
        sections.append(
            create_model(name, __base__=(purpose, kind), __cls_kwargs__={"use_attribute_docstrings": False}, **about)
        )
    return Annotated[Union[(*sections, *others)], Field(discriminator="kind")]


if TYPE_CHECKING:
    # A source has the fields of its purpose. Whoever reads its table asks for the class of the kind.
    DataSource = Prompts | ReasoningGymSource
    HeldOutSource = HeldOutPrompts | HeldOutTasks
    MixedSource = MixedPrompts | MixedTasks
    TextSource = Texts
    NamedTextSource = NamedTexts
    ExampleSource = Examples
    MixedExampleSource = MixedExamples
else:
    DataSource = in_tables(Prompts, ReasoningGymSource)
    HeldOutSource = in_tables(HeldOutPrompts, HeldOutTasks)
    MixedSource = in_tables(MixedPrompts, MixedTasks)
    TextSource = in_tables(Texts)
    NamedTextSource = in_tables(NamedTexts)
    ExampleSource = in_tables(Examples)
    MixedExampleSource = in_tables(MixedExamples)


def form_of(data: Any) -> str:
    """The form that data are written in. The sources of a map are sections; a source has a text as its kind."""
    if isinstance(data, (list, tuple)):
        return LIST
    is_source = isinstance(data, dict) and isinstance(data.get("kind"), str)
    is_map = isinstance(data, dict) and not is_source and any(isinstance(p, dict | Frozen) for p in data.values())
    return MAP if is_map else SECTION
