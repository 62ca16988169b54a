"""What a folder says of how its model makes one vector of a text.

The folder is what sentence-transformers or transformers saved. It is read strictly: what sentence-transformers
would follow and this does not know raises `NotPlain` by name, so that an embedding is the same as theirs; such a folder
is embedded by that library's own modules (`modules.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_POOLINGS = {  # in the order in which several are put side by side
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Mish", "Softplus")
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
EMBEDS: dict[str, Any] = {  # what the Transformer of an embedding model says of itself, or leaves out
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_SENTENCE = "sentence_embedding"
DENSE, SPARSE, TOKENS = "SentenceTransformer", "SparseEncoder", "MultiVectorEncoder"  # kinds of models, by their class
SCORES = "CrossEncoder"  # and the one that gives scores
TASKS = {"query": ("query",), "document": ("document", "passage", "corpus")}  # and the names of their prompts
_READ = {"max_seq_length", "do_lower_case", "unpad_inputs"}  # of a Transformer's options; the last changes no result
# What may stand in the arguments of a loader without changing the result.
_HARMLESS = {"attn_implementation", "trust_remote_code", "torch_dtype", "dtype"}


class NotPlain(ValueError):
    """A folder asks for what only sentence-transformers itself can follow."""


@dataclass(frozen=True)
class Pooling:
    """`modes` are put side by side. Without `include_prompt` the tokens of the prompt are left out."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    width: int | None = None  # of a token; None: whatever the model has


@dataclass(frozen=True)
class DenseRecipe:
    """activation(x w^T + b), plus x or x r^T with a residual. The weights are in `folder`."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str
    residual: bool


@dataclass(frozen=True)
class Normalize:
    """Rows of length 1."""


@dataclass(frozen=True)
class Recipe:
    """`transformer` is the folder of model and tokenizer; after pooling come `steps`; `truncate` keeps so many dims.

    `max_length` is None where only model and tokenizer limit a text.
    """

    transformer: Path
    folders: tuple[Path, ...]  # that hold anything of the model
    max_length: int | None = None
    lower_case: bool = False
    pooling: Pooling = Pooling()
    steps: tuple[DenseRecipe | Normalize, ...] = ()
    truncate: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    is_plain: bool = False  # saved by transformers alone

    @classmethod
    def of(cls, folder: Path) -> Recipe:
        """What the folder says; where it names no modules, what sentence-transformers makes of a plain model."""
        about = _about(folder)
        if not (folder / "modules.json").exists():
            check_transformer(folder, folder)
            return cls(folder, (folder,), pooling=_plain_pooling(folder), is_plain=True)
        modules = [_Module.of(folder, entry) for entry in read_json(folder / "modules.json", list)]
        unknown = [module.type for module in modules if not module.is_known]
        if unknown:
            raise NotPlain(
                f"{folder} has modules that weft embed does not know: {', '.join(unknown)}; "
                f"it knows sentence-transformers' {', '.join(_KNOWN)}"
            )
        first, pooling, *rest = _in_order(folder, modules)
        check_transformer(folder, first.folder)
        options = transformer_options(first.folder)
        folders = dict.fromkeys([folder, *(module.folder for module in modules if module.folder.is_dir())])
        return cls(
            first.folder, tuple(folders), options.get("max_seq_length") or None, bool(options.get("do_lower_case")),
            _pooling(pooling.folder / "config.json"),
            tuple(_dense(m.folder) if m.kind == "Dense" else _normalize(m.folder) for m in rest),
            about.get("truncate_dim"), prompts_of(about), about.get("default_prompt_name"),
        )  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """What a user wants put before each text: a `prompt`, or one of the folder's by its `name`, or that of a `task`,
    "query" or "document", as sentence-transformers' encode_query and encode_document take it."""

    prompt: str | None = None
    name: str | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.name is not None:
            raise ValueError(
                f"got the prompt {self.prompt!r} and the prompt's name {self.name!r}, expected one of them"
            )
        if self.task not in (None, *TASKS):
            raise ValueError(f"got the task {self.task!r}, expected {' or '.join(TASKS)}")
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"got the prompt {self.prompt!r}, which is not UTF-8") from error

    def of(self, prompts: dict[str, str], default: str | None) -> str:
        """The prompt, of a folder that has these, of which `default` is used where nothing is asked for."""
        if self.prompt is not None:
            return self.prompt
        by_task = next((name for name in TASKS.get(self.task or "", ()) if name in prompts), default)
        name = by_task if self.name is None else self.name
        if name is None:
            return ""
        if name not in prompts:
            named = ", ".join(map(repr, prompts)) or "none"
            raise ValueError(f"got the name of a prompt {name!r}, expected one of the model's: {named}")
        return prompts[name] or ""


# ---- modules.json ----------------------------------------------------------------------------------------------------

_KNOWN = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True)
class _Module:
    type: str
    folder: Path

    @classmethod
    def of(cls, folder: Path, entry: Any) -> _Module:
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ValueError(f"{folder / 'modules.json'} has an entry that is not a module: {entry!r}")
        path = entry.get("path", "")
        if not isinstance(path, str) or Path(path).is_absolute() or ".." in Path(path).parts:
            raise ValueError(f"{folder / 'modules.json'} has a module outside of the folder: {path!r}")
        return cls(entry["type"], folder / path)

    @property
    def kind(self) -> str:
        return self.type.rsplit(".", 1)[-1]

    @property
    def is_known(self) -> bool:
        return self.type.startswith("sentence_transformers.") and self.kind in _KNOWN


def _in_order(folder: Path, modules: list[_Module]) -> list[_Module]:
    """A Transformer, a Pooling, then any of the rest; anything else is refused."""
    kinds = [module.kind for module in modules]
    got = f"{folder} has the modules {', '.join(kinds) or 'none'}"
    if kinds[:1] != ["Transformer"] or kinds.count("Transformer") > 1:
        raise NotPlain(f"{got}; expected one Transformer, which comes first")
    if "Pooling" not in kinds:
        raise ValueError(f"{got} and no Pooling, so there is one vector for each token; weft embed writes one a text")
    if kinds[1] != "Pooling":
        raise NotPlain(f"{got}: {kinds[1]} stands before Pooling; expected Transformer, Pooling and then the rest")
    if kinds.count("Pooling") > 1:
        raise NotPlain(f"{got}; expected one Pooling")
    return modules


def _plain_pooling(folder: Path) -> Pooling:
    """The last token of a causal language model, the mean of others."""
    config = read_json(folder / "config.json", dict)
    architectures = config.get("architectures") or [""]
    causal = str(architectures[0]).endswith("ForCausalLM") and config.get("is_causal", True)
    return Pooling(("lasttoken" if causal else "mean",))


def check_transformer(folder: Path, transformer: Path) -> None:
    if not (transformer / "config.json").exists():
        raise ValueError(
            f"got the model {folder}, expected a folder with config.json, a tokenizer and weights, as transformers or "
            f"sentence-transformers saves it"
        )
    if (transformer / "adapter_config.json").exists():
        raise ValueError(f"{transformer} holds an adapter; merge it into its model (merge_and_unload) and save that")


# ---- the files of the modules ----------------------------------------------------------------------------------------

JsonT = TypeVar("JsonT", dict[str, Any], list[Any])


def read_json(path: Path, kind: type[JsonT]) -> JsonT:
    """The object or list in a file; an empty one where there is no file."""
    if not path.exists():
        return kind()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected a {kind.__name__}")
    return value


def transformer_options(folder: Path, what: dict[str, Any] = EMBEDS) -> dict[str, Any]:
    """The options of a Transformer that does `what`; those that would change it in ways unknown here are refused."""
    path = next((folder / name for name in _TRANSFORMER_CONFIGS if read_json(folder / name, dict)), folder / "none")
    options = read_json(path, dict)
    expected = {
        **what,
        "processing_kwargs": {},
        **{f"{what}_{end}": {} for what in ("config", "tokenizer", "processor") for end in ("args", "kwargs")},
    }
    for name, value in expected.items():
        given = options.get(name) or value
        if given != value:
            raise NotPlain(f"{path}: {name} = {given!r} is not supported here, expected {value!r}")
    for name in sorted(set(options) - {*expected, *_READ, "model_args", "model_kwargs"}):
        if options[name] is not None:
            raise NotPlain(f"{path}: {name} = {options[name]!r} is not known here")
    for name in ("model_args", "model_kwargs"):
        unknown = sorted(set(options.get(name) or {}) - _HARMLESS)
        if unknown:
            raise NotPlain(f"{path}: {name} with {', '.join(unknown)} is not supported here")
    return options


def _pooling(path: Path) -> Pooling:
    config = read_json(path, dict)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_POOLINGS.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    unknown = [mode for mode in modes if mode not in POOLINGS]
    unknown += [k for k, v in config.items() if k.startswith("pooling_mode_") and v and k not in _OLD_POOLINGS]
    if unknown or not modes:
        raise ValueError(
            f"{path}: got the pooling {', '.join(map(str, unknown)) or 'none'}, expected {', '.join(POOLINGS)}"
        )
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    return Pooling(tuple(modes), config.get("include_prompt", True) is not False, width)


def _dense(folder: Path) -> DenseRecipe:
    path = folder / "config.json"
    config = read_json(path, dict)
    _check_names(path, config)
    named = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh")
    module, _, activation = named.rpartition(".")
    if not module.startswith("torch.nn") or activation not in ACTIVATIONS:
        kind = NotPlain if module.startswith("torch.") else ValueError  # theirs would take Tanh for an unknown one
        raise kind(f"{path}: got the activation {named}, expected torch.nn's {', '.join(ACTIVATIONS)}")
    try:
        inputs, outputs = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: a Dense needs numbers in_features and out_features, got {config}") from error
    return DenseRecipe(folder, inputs, outputs, config.get("bias", True), activation, bool(config.get("use_residual")))


def _normalize(folder: Path) -> Normalize:
    _check_names(folder / "config.json", read_json(folder / "config.json", dict))
    return Normalize()


def _check_names(path: Path, config: dict[str, Any]) -> None:
    for name in ("module_input_name", "module_output_name"):
        given = config.get(name) or _SENTENCE
        if given != _SENTENCE:
            raise NotPlain(f"{path}: {name} = {given!r} is not supported by weft embed, expected {_SENTENCE!r}")


# ---- config_sentence_transformers.json -------------------------------------------------------------------------------


ABOUT = "config_sentence_transformers.json"
_OTHERS = {SCORES: "it scores texts and pairs of texts: weft rerank and weft classify take it"}


def kind_of(folder: Path) -> str:
    """The class of the folder's model, which says what a text becomes: `DENSE`, `SPARSE` or `TOKENS`."""
    kind = str(read_json(folder / ABOUT, dict).get("model_type", DENSE))
    if kind not in (DENSE, SPARSE, TOKENS):
        remedy = _OTHERS.get(kind, "load it by the library that saved it")
        raise ValueError(f"{folder} holds a {kind}, expected a {DENSE}, {SPARSE} or {TOKENS}; {remedy}")
    return kind


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    about = read_json(path, dict)
    kind = kind_of(folder)
    default = about.get("default_prompt_name")
    if default is not None and default not in prompts_of(about):
        raise ValueError(f"{path}: the default_prompt_name is {default!r}, which is none of its prompts")
    _check_requirements(path, about.get("requirements") or {})
    if kind != DENSE:
        raise NotPlain(f"{folder} holds a {kind}, which weft embed computes by that library's own modules")
    return about


def prompts_of(about: dict[str, Any]) -> dict[str, str]:
    """sentence-transformers has empty ones for queries and documents where the folder has none."""
    given = {str(name): str(prompt or "") for name, prompt in (about.get("prompts") or {}).items()}
    return {"query": "", "document": "", **given}


def _check_requirements(path: Path, requirements: dict[str, Any]) -> None:
    """Raises where a package is older than the model's authors ask for."""
    from packaging.specifiers import SpecifierSet

    for name, wanted in requirements.items():
        given = wanted.get("specifier", "") if isinstance(wanted, dict) else str(wanted)
        package = {"pytorch": "torch"}.get(name, name)
        if package in ("python", "sentence-transformers", "sentence_transformers"):
            continue
        try:
            has = metadata.version(package)
        except metadata.PackageNotFoundError:
            has = "none"
        if has == "none" or not SpecifierSet(given).contains(has, prereleases=True):
            raise ImportError(f"{path} asks for {package}{given}, here is {has}; pip install '{package}{given}'")
