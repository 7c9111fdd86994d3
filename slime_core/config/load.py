"""Merges the layers of settings: default < built-in demo < model < plugin preset < file < flag.

:func:`peek` reads the names of plugins without reporting mistakes. The caller loads the plugins, and :meth:`Peek.uses`
returns those that the settings use. :func:`load` reads all settings and reports all mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from slime_core.config import check
from slime_core.config.engine_flags import ENGINES, WithoutEffect, values_of
from slime_core.config.model_config import context_length, described, start_weights, weights_dtype
from slime_core.config.options import KIND_NAMED_BY, PROMPT_FILES, DerivedSetting, NamesCode, Part, PluginSettings
from slime_core.config.sampling import reward_names
from slime_core.config.schema import ARITHMETIC, DEMO_DEFAULTS, OF_EVALUATIONS, OF_THE_MODEL, RunConfig
from slime_core.config.secrets import without_secrets
from slime_core.config.settings import (
    Setting,
    Unacceptable,
    anchored,
    as_words,
    core_settings,
    plugin_settings,
)
from slime_core.config.sources import CommandLine, Document, read_command_line, read_document
from slime_core.errors import ConfigError, Mistake, config_error, nearest
from slime_core.types import JsonValue

Presets = Mapping[str, Sequence[tuple[object, str]]]
Options = Mapping[str, type[BaseModel]]
Purpose = Literal["run", "eval"]
FindsGPUs = Callable[[str | None], bool]
"""Returns whether ``device = auto`` means GPUs; the argument is ``ray_address``."""

Derive = Callable[[Mapping[str, BaseModel], Mapping[str, JsonValue]], Iterable[tuple[str, DerivedSetting]]]
"""Derives settings of the core from the options of plugins. Arguments: plugin -> its options object, and the settings
of the core that presets, file and flags set. Yields pairs of a plugin and a setting; raises ConfigError for an invalid
option."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Source of a value; prints as ``flag --lr``, ``file run.toml:3``, ``preset of plugin grpo``, ``default``.

    Arguments:
        layer: the layer that set it.
        where: the flag, the file with line, the plugin, or the entry of the model's ``config.json``; empty for
            defaults, including those of the built-in demo.
    """

    layer: Literal["default", "built-in demo", "model", "preset", "file", "flag"]
    where: str = ""

    def __str__(self) -> str:
        of = " of plugin" if self.layer == "preset" else ""
        return f"{self.layer}{of} {self.where}" if self.where else self.layer


DEFAULT = Provenance("default")
_DEVICES = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine")
_EVAL_SETS = ("eval_prompt_data", "eval_datasets")
_COUNTED = ("engine_groups", "rollout_external_engine_addrs")
_PEEKED = ("plugins", "hf_checkpoint", "model_impl", "no_plugins", "debug_rollout_only", "device")


@dataclass(frozen=True, slots=True)
class Resolved:
    """All settings of a run, and the source of each.

    Arguments:
        config: the core's settings.
        plugin_options: plugin -> its options object, for every plugin with options that takes part.
        provenance: setting key (``lr``, ``grpo.std_normalization``, ``megatron.decoupled_lr``) -> the source of its
            value; of the engines' flags only those that are set.
    """

    config: RunConfig
    plugin_options: Mapping[str, BaseModel] = field(default_factory=dict)
    provenance: Mapping[str, Provenance] = field(default_factory=dict)

    def values(self) -> dict[str, tuple[Setting, Any]]:
        """Return key -> (setting, value): of the core in the order of ``schema``, of engines, of plugins."""
        return values_of(self.config) | self.of_plugins()

    def of_plugins(self) -> dict[str, tuple[Setting, Any]]:
        """Return key -> (setting, value) of the plugins' options."""
        settings = plugin_settings({plugin: type(options) for plugin, options in self.plugin_options.items()})
        values = {plugin: dict(options) for plugin, options in self.plugin_options.items()}
        return {key: (setting, values[setting.section][setting.name]) for key, setting in settings.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """A component that the settings choose.

    Example: ``--corrections tis`` is ``Choice("correction", "tis", "--corrections")``.

    Arguments:
        kind: the value of a :class:`~slime_core.plugins.registration.Kind`.
        name: the component, or ``plugin:component``.
        where: the flag or the place in a file, for messages.
    """

    kind: str
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class NamedCode:
    """A function that an option of a plugin names by path.

    Example: ``--custom-rm-path mine.py`` is ``NamedCode("compat", "custom_rm_path", "--custom-rm-path", "mine.py")``.
    """

    plugin: str
    option: str
    flag: str
    path: str


@dataclass(frozen=True, slots=True)
class Uses:
    """Components, options and functions that settings use.

    Arguments:
        components: the chosen components and prompt formats.
        plugins: the plugins whose options are set.
        code: the functions that options name by path.
    """

    components: Sequence[Choice] = ()
    plugins: frozenset[str] = frozenset()
    code: Sequence[NamedCode] = ()


def _names(setting: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    return reward_names(value) if setting == "rm_type" else (value,)


@dataclass(frozen=True, slots=True)
class Peek:
    """The settings that are read before plugins are activated.

    Arguments:
        plugins: the named plugins. Flags replace the list of the file.
        hf_checkpoint: the folder of the start weights; None for the built-in model.
        model_impl: whose layers the model has, or ``auto``.
        no_plugins: plugins that are left out.
        debug_rollout_only: whether no learner is started, so that no model spec is needed.
        device: the device of learner and engines.
        flags: the flags of the command line.
        argv: the command line.
        config: the file of ``--config``, or None.
        in_file: the plugins that the file names, and its tables that are not a section of the core.
    """

    plugins: tuple[str, ...] = ()
    hf_checkpoint: Path | None = None
    model_impl: str = "auto"
    no_plugins: tuple[str, ...] = ()
    debug_rollout_only: bool = False
    device: str = "auto"
    flags: frozenset[str] = frozenset()
    argv: tuple[str, ...] = ()
    config: Path | None = None
    in_file: tuple[str, ...] = ()

    def uses(
        self,
        *,
        presets: Presets,
        plugin_options: Options,
        takes_part: Collection[str],
        without: Collection[str],
        derive: Derive,
    ) -> Uses:
        """Return the components, options of plugins, and functions that the settings use. See :func:`load`."""
        settings = {**core_settings(), **plugin_settings(plugin_options)}
        options = {name: plugin_options[name] for name in takes_part if name in plugin_options}
        reading = _read_layers(self.argv, _Reading(settings, without=without), presets, options, derive)
        return Uses(list(reading.choices()), reading.plugins(), list(reading.code()))


def peek(argv: Sequence[str]) -> Peek:
    """Read the names of plugins and of the model from flags and file; :func:`load` reports mistakes."""
    reading = _Reading(dict(core_settings()))
    line = read_command_line(argv, core_settings())
    document = _document(line, reading)
    reading.read_file(document)
    in_file = (*reading.values.get("plugins", ()), *(document.other_tables(reading.settings) if document else ()))
    reading.read_flags(line)
    values = reading.values
    return Peek(
        flags=frozenset(line.flags),
        argv=tuple(argv),
        config=Path(line.config[0]) if line.config else None,
        in_file=in_file,
        **{key: values[key] for key in _PEEKED if key in values},
    )


def load(
    argv: Sequence[str],
    *,
    presets: Presets | None = None,
    plugin_options: Options | None = None,
    takes_part: Collection[str] | None = None,
    without: Collection[str] = (),
    derive: Derive | None = None,
    purpose: Purpose = "run",
    check_rules: bool = True,
    finds_gpus: FindsGPUs = lambda _: False,
) -> Resolved:
    """Read and validate the settings of ``argv`` and of its file.

    Arguments:
        argv: flags after the command word.
        presets: setting -> value and plugin of each preset. If plugins preset a setting differently, the file or a flag
            must set it.
        plugin_options: plugin -> its options class, of all loaded plugins.
        takes_part: the plugins whose options the result has; None for all.
        without: plugins that the run leaves out. Their tables in the file are ignored.
        derive: derives settings of the core from options.
        purpose: the command whose rules are checked. An evaluation needs no advantage estimator.
        check_rules: check rules between settings, and files.
        finds_gpus: decides ``device = auto``, for defaults that depend on the device.

    Raises:
        ConfigError: lists every mistake in flags, file, presets and rules.
    """
    settings = {**core_settings(), **plugin_settings(plugin_options or {})}
    options = {key: value for key, value in (plugin_options or {}).items() if takes_part is None or key in takes_part}
    reading = _read_layers(argv, _Reading(settings, without=without), presets or {}, options, derive)
    reading.follow_device(finds_gpus)
    config, plugins = reading.build(options)
    if check_rules and not reading.is_incomplete:
        reading.refuse_untrue(start_weights(config))
        of_plugins = Resolved(config, plugins).of_plugins()
        reading.mistakes += check.mistakes(config, purpose=purpose, broken=reading.broken, of_plugins=of_plugins)
    if reading.mistakes:
        raise config_error(reading.mistakes)
    keys = [key for key, entry in reading.settings.items() if not entry.of_plugin or entry.section in options]
    return Resolved(config, plugins, {key: reading.provenance.get(key, DEFAULT) for key in keys})


@dataclass(slots=True)
class _Reading:
    """The values and mistakes read so far. Later layers override earlier ones."""

    settings: dict[str, Setting]
    values: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    is_incomplete: bool = False
    without_effect: list[tuple[str, list[str], WithoutEffect]] = field(default_factory=list)
    without: Collection[str] = ()

    @property
    def broken(self) -> frozenset[str]:
        """Settings without a usable value, which rules must not read."""
        return frozenset(mistake.key for mistake in self.mistakes if mistake.key)

    def blame(self, message: str, key: str = "") -> None:
        """Collect one mistake."""
        self.mistakes.append(Mistake(message, key))

    def read_presets(self, presets: Presets) -> None:
        """Read the presets of settings that neither the file nor a flag sets."""
        flags = {setting.flag: key for key, setting in self.settings.items()}
        for name, entries in presets.items():
            value, plugin = entries[0]
            flag = f"--{name.replace('_', '-')}"
            key = flags.get(flag, name)  # plugins may preset an option by the name of its flag
            setting = self.settings.get(key)
            if key in self.values or key in self.broken:
                continue
            if any(other != value for other, _ in entries):
                owners = " and ".join(plugin for _, plugin in entries)
                self.blame(f"plugins {owners} preset {key} differently; set it with {flag}", key)
            elif setting is not None and not setting.notes(NamesCode):
                read = partial(setting.read_python, value)
                self._put(setting, Provenance("preset", plugin), read, f"{key}, set by plugin {plugin}")
            else:
                unknown = f"no such setting{nearest(key, self.settings)}"
                problem = "a preset cannot choose code" if setting else unknown
                self.blame(f"preset {key} of plugin {plugin}: {problem}; report it to the plugin's author")

    def read_file(self, document: Document | None) -> None:
        if document is None:
            return
        for setting, value, place in document.values(self.settings, self.mistakes, self.without):
            self.settings[setting.key] = setting
            source = Provenance("file", place.split(" ")[0])
            self._put(setting, source, partial(setting.read_toml, value, base=document.path.parent), place)

    def read_flags(self, line: CommandLine) -> None:
        self.settings |= line.engine
        for key, words in line.words.items():
            setting = self.settings[key]
            self._put(setting, Provenance("flag", setting.flag), partial(setting.read_flag, words), setting.flag)

    def read_derived(self, options: Options, derive: Derive) -> None:
        """Set the settings of the core that follow from the options of plugins."""
        objects = {}
        for plugin, kind in options.items():
            with suppress(ValidationError):  # reported by build
                objects[plugin] = self._options(plugin, kind)
        core = core_settings()
        settings = without_secrets({key: value for key, value in self.values.items() if key in core})
        try:
            derived = list(derive(objects, settings))
        except ConfigError as error:
            self.blame(str(error))
            self.is_incomplete = True
            return
        for plugin, entry in derived:
            option = self.settings.get(f"{plugin}.{entry.option}")
            missing = f"no option {entry.option}" if entry.option is not None and option is None else ""
            if entry.name not in core or missing:
                problem = missing or f"no setting {entry.name} of the core"
                message = f"plugin {plugin} derives {entry.name} from {entry.option or 'settings'}; there is {problem}"
                self.blame(f"{message}. Report it to the plugin's author")
            else:
                self._derive(core[entry.name], entry, option, plugin)

    def _derive(self, setting: Setting, derived: DerivedSetting, option: Setting | None, plugin: str) -> None:
        by = f"plugin {plugin}" if option is None else option.flag
        source = Provenance("preset", plugin) if option is None else self.provenance.get(option.key, DEFAULT)
        try:
            value = setting.read_python(derived.value)
        except Unacceptable as error:
            self.blame(f"{setting.key}, which follows from {by}: {error}", setting.key)
            return
        match self._outcome(setting, derived, source, value):
            case "refuse":
                other, shown = self.provenance[setting.key], as_words(self.values[setting.key])
                message = f"{by} sets {setting.key}, and {other} sets it to {shown}; accepted: one of the two"
                self.blame(message, setting.key)
            case "replace":
                self._set(setting.key, value, source)

    def _outcome(
        self, setting: Setting, derived: DerivedSetting, source: Provenance, value: object
    ) -> Literal["refuse", "keep", "replace"]:
        """Return what to do if ``value`` follows from an option set at ``source``."""
        present, layer = self.values.get(setting.key), self.provenance.get(setting.key, DEFAULT).layer
        match derived.given:
            case "keep" if present is not None and present != setting.default:
                return "keep"
            case "refuse" if layer in ("file", "flag") and present not in (None, (), value):
                return "refuse"
            case "later" if layer in ("file", "flag"):
                return "refuse" if layer == source.layer else "keep" if layer == "flag" else "replace"
        return "replace"

    def choices(self) -> Iterator[Choice]:
        """Yield the components that the settings name, and the data source of prompt files if it is used."""
        for setting, kind in KIND_NAMED_BY.items():
            for name in _names(setting, self.values.get(setting)):
                yield Choice(kind, name, self._where(setting))
        for dataset in self.values.get("eval_datasets") or ():
            for setting in ("generate_function", "rm_type"):
                for name in _names(setting, getattr(dataset, setting)):
                    yield Choice(KIND_NAMED_BY[setting], name, f"{setting} of evaluation set {dataset.name}")
        if "data_source" not in self.values:
            yield Choice("data_source", PROMPT_FILES, self._where("data_source"))
        for setting in _EVAL_SETS:
            if self.values.get(setting):
                yield Choice("data_source", PROMPT_FILES, self._where(setting))

    def plugins(self) -> frozenset[str]:
        """Return the plugins whose options flags or the file set."""
        layers = {key: source.layer for key, source in self.provenance.items() if self.settings[key].of_plugin}
        return frozenset(self.settings[key].section for key, layer in layers.items() if layer in ("file", "flag"))

    def _where(self, key: str) -> str:
        """Return ``--corrections``, or ``corrections (file run.toml:3)``."""
        source = self.provenance.get(key, DEFAULT)
        return source.where if source.layer == "flag" else f"{key} ({source})"

    def code(self) -> Iterator[NamedCode]:
        """Yield the functions that options name by path."""
        for key, setting in self.settings.items():
            for names in setting.notes(NamesCode):
                for path in names.paths(self.values.get(key)):
                    yield NamedCode(setting.section, setting.name, setting.flag, path)

    def refuse_untrue(self, model: Path) -> None:
        """Refuse flags without effect that do not describe ``model``, the folder of the start weights."""
        config = described(model)
        if config is None:  # a rule reports it
            return
        for flag, words, accepted in self.without_effect:
            if (problem := accepted.check(words, config)) is not None:
                self.blame(f"{' '.join([flag, *words])}: {problem}")

    def follow_devices(self) -> None:
        """Set an absent number of engine devices to that of one engine, or with ``colocate`` to all devices."""
        key = "rollout_num_gpus"
        sizes = {name: self.values.get(name, self.settings[name].default) for name in _DEVICES}
        if key in self.values or {key, "colocate", *_DEVICES} & self.broken or any(map(self.values.get, _COUNTED)):
            return
        size = sizes["rollout_num_gpus_per_engine"]
        shared = sizes["actor_num_nodes"] * sizes["actor_num_gpus_per_node"] if self.values.get("colocate") else 1
        count = max(size, shared // size * size)
        if count != self.settings[key].default:
            named = "colocate" if count > size else "rollout_num_gpus_per_engine"
            self._set(key, count, self.provenance[named])

    def follow_model(self) -> None:
        """Set absent lengths by the model's context if their defaults exceed it."""
        folder = self.values.get("hf_checkpoint") or ARITHMETIC / "model"
        longest = None if "hf_checkpoint" in self.broken else context_length(Path(folder))
        if longest is None or {"rollout_max_response_len", "rollout_max_prompt_len"} & self.broken:
            return
        source = Provenance("model", f"max_position_embeddings = {longest}")
        response, prompt = self.settings["rollout_max_response_len"], self.settings["rollout_max_prompt_len"]
        if response.key not in self.values and response.default >= longest:
            self._set(response.key, max(1, longest // 2), source)
        remaining = longest - self.values.get(response.key, response.default)
        if self.values.get("num_data_workers") and prompt.key not in self.values and remaining > 0:
            self._set(prompt.key, remaining, source)

    def follow_device(self, finds_gpus: FindsGPUs) -> None:
        """Compute in bfloat16 on GPUs by default if the checkpoint's weights are bfloat16."""
        device = self.values.get("device", self.settings["device"].default)
        is_decided = {"bf16", "true_on_policy_mode"} & self.values.keys()  # that mode is for float32
        if is_decided or device == "cpu" or {"bf16", "device", "hf_checkpoint"} & self.broken:
            return
        dtype = weights_dtype(Path(self.values.get("hf_checkpoint") or ARITHMETIC / "model"))
        if dtype == "bfloat16" and (device == "cuda" or finds_gpus(self.values.get("ray_address"))):
            self._set("bf16", True, Provenance("model", "dtype = bfloat16, on GPUs"))

    def fill_demo_defaults(self) -> None:
        """Set the defaults of the built-in model if no model is named, and of its task if no prompts are named."""
        named = ["prompt_data", *(key for key, setting in self.settings.items() if setting.names_prompts)]
        if self._is_named("hf_checkpoint"):
            return
        defaults: Mapping[str, object] = DEMO_DEFAULTS
        if any(map(self._is_named, named)):
            defaults = OF_THE_MODEL
            sets = [key for key, setting in self.settings.items() if "evaluation" in setting.provides]
            # A run of the built-in model that evaluates and names no set is evaluated on the set of the task.
            if self.values.get("eval_interval") and not any(map(self._is_named, [*sets, *_EVAL_SETS])):
                defaults = {**OF_THE_MODEL, "eval_prompt_data": DEMO_DEFAULTS["eval_prompt_data"]}
        # A run that reads rollouts from files has no engines for evaluations.
        reads = self.values.get("debug_train_only") or self.values.get("load_debug_rollout_data") is not None
        for key, value in defaults.items():
            if key not in self.values and not (reads and key in OF_EVALUATIONS):
                self._set(key, value, Provenance("built-in demo"))

    def _is_named(self, key: str) -> bool:
        return self.values.get(key) not in (None, ()) or key in self.broken

    def build(self, options: Options) -> tuple[RunConfig, dict[str, BaseModel]]:
        """Return the settings, and the options object of each plugin."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in self.values.items():
            if not (setting := self.settings[key]).of_plugin:
                sections.setdefault(setting.section, {})[setting.name] = value
        sections |= {engine: {"given": tuple(sorted(sections.get(engine, {}).items()))} for engine in ENGINES}
        plugins = {}
        for plugin, kind in options.items():
            try:
                plugins[plugin] = anchored(self._options(plugin, kind), Path())  # a default may be a path too
            except ValidationError as error:  # a rule of the plugin between its options
                self.mistakes += [Mistake(f"[{plugin}]: {problem['msg']}") for problem in error.errors()]
                plugins[plugin] = kind.model_construct()
        return RunConfig.model_validate(sections).with_plugins(self._of_plugins(plugins)), plugins

    def _options(self, plugin: str, kind: type[BaseModel]) -> BaseModel:
        """Return the options of a plugin by the values read so far."""
        keys = {name: f"{plugin}.{name}" for name in kind.model_fields}
        return kind.model_validate({name: self.values[key] for name, key in keys.items() if key in self.values})

    def _of_plugins(self, plugins: Mapping[str, BaseModel]) -> PluginSettings:
        values = {f"{plugin}.{name}": value for plugin, options in plugins.items() for name, value in options}
        provided: dict[Part, tuple[str, ...]] = {}
        for setting in (self.settings[key] for key in values):
            value = values[setting.key]
            for part in setting.provides if value != setting.default else ():
                provided[part] = (*provided.get(part, ()), f"{setting.name} = {value}")
        return PluginSettings(
            values=without_secrets(values),
            files={self.settings[key].name: value for key, value in values.items() if isinstance(value, Path)},
            code=tuple(f"{code.flag.removeprefix('--').replace('-', '_')} = {code.path}" for code in self.code()),
            provided=provided,
        )

    def _put(self, setting: Setting, source: Provenance, read: Callable[[], Any], where: str) -> None:
        try:
            self._set(setting.key, read(), source)
        except Unacceptable as error:
            self.blame(f"{where}: {error}", setting.key)

    def _set(self, key: str, value: Any, source: Provenance) -> None:
        self.values[key], self.provenance[key] = value, source


def _read_layers(
    argv: Sequence[str], reading: _Reading, presets: Presets, options: Options, derive: Derive | None
) -> _Reading:
    """Read the file, flags and presets into ``reading``, and set the settings that follow from them."""
    line = read_command_line(argv, reading.settings)
    document = _document(line, reading)
    reading.read_file(document)
    reading.mistakes += line.mistakes
    reading.without_effect = line.without_effect
    reading.read_flags(line)
    reading.read_presets(presets)
    if derive is not None:
        reading.read_derived(options, derive)
    reading.fill_demo_defaults()
    reading.follow_model()
    reading.follow_devices()
    return reading


def _document(line: CommandLine, reading: _Reading) -> Document | None:
    if not line.config:
        return None
    try:
        return read_document(Path(line.config[0]))
    except ConfigError as error:
        reading.blame(str(error))
        reading.is_incomplete = True
        return None
