"""Lazy registries of samplers, caches, orders and attention methods."""

from __future__ import annotations

import importlib
import inspect
import numbers
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from paradec.core.checks import check_choice, short_repr, unknown_name
from paradec.core.other_names import COMPONENTS

PIPELINE_METHOD = "paradec.samplers.forecast.methods:find_method_name"


class Component:
    """Base of registered classes: a frozen dataclass whose fields are its settings."""

    kind: ClassVar[str] = ""
    """Name of its registry: "sampler", "cache" or "order"."""
    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """All settings with their defaults."""
        entries = [entry for entry in fields(cls) if entry.init]  # type: ignore[arg-type]
        return {entry.name: None if entry.default is MISSING else entry.default for entry in entries}

    def to_dict(self) -> dict[str, Any]:
        """The name under `kind`, then every setting, as plain data."""
        return {self.kind: self.name} | {key: to_data(getattr(self, key)) for key in self.settings()}


def to_data(value: Any) -> Any:
    """Convert a setting to JSON data: components by `to_dict`, models and functions to their names."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "facts"):
        return value.facts.name
    if isinstance(value, tuple):
        return [to_data(entry) for entry in value]
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy's
        return value.item()
    return value.__name__ if callable(value) and hasattr(value, "__name__") else value


class Registry:
    """Classes of one kind by name; a text "module:Class" is imported on first use."""

    by_kind: ClassVar[dict[str, Registry]] = {}
    """All registries by kind, for code that must not import the modules that create them."""

    def __init__(self, kind: str, targets: Mapping[str, str | type]):
        self.kind = kind
        self._module = kind if kind == "attention" else f"{kind}s"  # submodule of paradec, group of entry points
        self._targets: dict[str, str | type] = dict(targets)
        self._has_plugins = False
        self.by_kind.setdefault(kind, self)

    @classmethod
    def from_stub(cls, kind: str, file: str, **names: str) -> Self:
        """Register the classes in the classes.pyi next to `file`, by their module names or by `names` (class=name)."""
        modules = read_stub(Path(file).with_name("classes.pyi"))
        return cls(
            kind, {names.get(key, module.rpartition(".")[2]): f"{module}:{key}" for key, module in modules.items()}
        )

    def names(self) -> list[str]:
        """List all names, including the names of plugins."""
        self._find_plugins()
        return list(self._targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return self._in_any_case(name) in self._targets

    def _in_any_case(self, name: Any) -> Any:
        """Return the registered spelling of a name, ignoring case; unknown names are returned unchanged."""
        if name not in self._targets:
            self._find_plugins()
        if isinstance(name, str) and name not in self._targets:
            return next((known for known in self._targets if known.lower() == name.lower()), name)
        return name

    def _find_plugins(self) -> None:
        """Add the entry points of installed packages, once. Warn of a name that is already taken, and skip it."""
        if self._has_plugins:
            return
        self._has_plugins = True
        import importlib.metadata  # slow

        for entry in importlib.metadata.entry_points(group=f"paradec.{self._module}"):
            if entry.name not in self._targets:
                self._targets[entry.name] = entry.value
            elif self._targets[entry.name] != entry.value:
                package = "a package" if entry.dist is None else entry.dist.name
                warnings.warn(
                    f"{self.kind} {entry.name!r} of {package} ({entry.value}) is left out: the name is taken by "
                    f"{self._targets[entry.name]!r}",
                    stacklevel=3,
                )

    def register(self, name: str, target: str | type) -> None:
        """Add a class or a text "module:Class". Raises ValueError for a name that is taken or a text of another form,
        TypeError as `check_class`. A class may replace a registered class of the same module and qualified name, as
        when a notebook's cell runs again."""
        if name in self.names() and not _is_redefined(self._targets[name], target):
            raise ValueError(f"{self.kind} name {name!r} is taken by {self._targets[name]!r}")
        if isinstance(target, str) and target.count(":") != 1:
            raise ValueError(f'target {target!r} must be a class or the text "module:Class"')
        if isinstance(target, type) and hasattr(target, "name"):
            check_class(self.kind, target)
        self._targets[name] = target

    def get(self, name: str) -> type[Any]:
        """Return the class of a name, ignoring case. Raises ValueError for an unknown name."""
        if not isinstance(name, str) or name not in self:
            raise self._unknown_name_error(name)
        name = self._in_any_case(name)
        target = self._targets[name]
        if isinstance(target, str):
            try:
                target = import_lazily(target)
            except (ImportError, AttributeError) as error:
                if target.startswith("paradec."):
                    raise
                raise ImportError(f"{self.kind} {name!r} of another package cannot be imported: {error}") from error
            self._targets[name] = target
        return target

    def classes(self) -> dict[str, str]:
        """Registered names by class name, without importing the classes."""
        targets = self._targets.items()
        return {
            target.partition(":")[2] if isinstance(target, str) else target.__name__: name for name, target in targets
        }

    def attribute(self, name: str, package: str) -> Any:
        """Return the registered class or the submodule `name` of `package`, for its `__getattr__`."""
        if name in (classes := self.classes()):
            return self.get(classes[name])
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def check(self, name: str) -> None:
        """Raise ValueError unless `create` accepts the name and any settings in it."""
        if is_composed(name) and name not in self and ".py:" not in name:
            self.create(name)
        elif name not in self:
            raise self._unknown_name_error(name)

    def _unknown_name_error(self, name: Any) -> ValueError:
        if self.kind in ("sampler", "cache") and (method := import_lazily(PIPELINE_METHOD)(str(name))) is not None:
            call = f"paradec.accelerate(pipeline, {method!r})"
            return ValueError(f"unknown {self.kind}: {short_repr(name)}; it is for pipelines of diffusers: {call}")
        listing = f"paradec.{self._module}.names()"
        message = unknown_name(self.kind, name, self._targets, listing, COMPONENTS.get(self.kind, {}))
        way = f"an instance, or by name after paradec.{self._module}.register(name, CLASS)"
        return ValueError(message + (f"; a custom {self.kind} is given as {way}" if self.kind in COMPONENTS else ""))

    def create(self, name: str, *, preset: str | None = None, **settings: Any) -> Any:
        """Make a component by name. Settings override the preset, which overrides the defaults. The name may contain
        settings, "dkv_decode(refresh_interval=4)", and join samplers by "+" into a `union`:
        "credit(threshold=0.95)+localleap". Raises ValueError for an unknown name, preset or setting, a setting given
        twice or out of its range, or names that cannot be joined."""
        if is_composed(name) and name not in self and ".py:" not in name:
            from paradec.core.component_text import create_composed

            return create_composed(self, name, settings if preset is None else settings | {"preset": preset})
        cls = self.get(name)
        description = f"{self.kind} {name!r}"
        presets = getattr(cls, "presets", {})
        if preset is not None:
            check_choice(f"preset of {description}", preset, presets)
            settings = {**presets[preset], **settings}
        allowed = [f.name for f in fields(cls) if f.init]
        for setting in settings:
            check_choice(f"setting of {description}", setting, allowed)
        return cls(**settings)

    def from_dict(self, data: Mapping[str, Any]) -> Any:
        """Make a component from plain data: its name under the registry's kind, then settings. Raises ValueError for
        other data, or as `create`."""
        if not isinstance(data, Mapping) or self.kind not in data:
            keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"data has no key {self.kind!r}; give a mapping as to_dict makes it, not {keys}")
        return self.create(data[self.kind], **{key: value for key, value in data.items() if key != self.kind})


def _is_redefined(old: str | type, new: str | type) -> bool:
    keys = [(cls.__module__, cls.__qualname__) for cls in (old, new) if isinstance(cls, type)]
    return len(keys) == 2 and keys[0] == keys[1]


def is_composed(name: object) -> bool:
    """Whether a name has settings, or joins several names."""
    return isinstance(name, str) and ("(" in name or "+" in name)


def read_stub(file: Path) -> dict[str, str]:
    """Map each NAME in a stub's lines `from MODULE import NAME as NAME` to its module."""
    imports = re.findall(r"^from (\S+) import (\w+) as \2$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: module for module, name in imports}


def check_class(kind: str, cls: type) -> None:
    """Raise TypeError for a component class without a name, or with settings but without the dataclass decorator."""
    if not getattr(cls, "name", ""):
        raise TypeError(f'{kind} class {cls.__name__} has no name; give it one: name = "..."')
    annotated = {name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)}
    if annotated and "__dataclass_params__" not in vars(cls):
        raise TypeError(
            f"{kind} class {cls.__name__} is not a dataclass, so {', '.join(sorted(annotated))} cannot be set; put "
            "@dataclass(frozen=True) before it"
        )


def import_lazily(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
