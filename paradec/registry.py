"""Lazy registries: a name stands for "module:Class" and is imported when it is first used."""

from __future__ import annotations

import difflib
import importlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar


class Registry:
    """Names of samplers (or caches) and where their classes live. `import paradec` imports none of them."""

    by_kind: ClassVar[dict[str, Registry]] = {}
    """Every registry under its kind, for what lies below the modules that fill them."""

    def __init__(self, kind: str, targets: Mapping[str, str]):
        self.kind = kind
        self._targets: dict[str, str | type] = dict(targets)
        self._has_plugins = False
        self.by_kind.setdefault(kind, self)

    def names(self) -> list[str]:
        """All registered names, those of other packages too."""
        self._find_plugins()
        return list(self._targets)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        if name not in self._targets:
            self._find_plugins()
        return name in self._targets

    def _find_plugins(self) -> None:
        """Add what installed packages name in their entry points, once: group "paradec.samplers", "paradec.caches" or
        "paradec.attention". A name that is taken stays what it was, with a warning."""
        if self._has_plugins:
            return
        self._has_plugins = True
        import importlib.metadata  # which takes longer than all of this module

        group = "paradec.attention" if self.kind == "attention" else f"paradec.{self.kind}s"
        for entry in importlib.metadata.entry_points(group=group):
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
        """Add a class, or the text "module:Class" that will be imported on first use.

        Raises:
            ValueError: the name is taken, or the text has another form.
        """
        if name in self:
            raise ValueError(f"{self.kind} name {name!r} is taken by {self._targets[name]!r}")
        if isinstance(target, str) and target.count(":") != 1:
            raise ValueError(f'target {target!r} must be a class or the text "module:Class"')
        self._targets[name] = target

    def get(self, name: str) -> type[Any]:
        """The class behind a name.

        Raises:
            ValueError: no such name; the message lists what there is.
        """
        if not isinstance(name, str) or name not in self:
            raise ValueError(unknown(self.kind, name, self._targets))
        target = self._targets[name]
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            try:
                target = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                if module.startswith("paradec."):
                    raise
                raise ImportError(f"{self.kind} {name!r} of another package cannot be imported: {error}") from error
            self._targets[name] = target
        return target

    def classes(self) -> dict[str, str]:
        """Names of the registered classes, without importing them, and what each is registered under."""
        found = {}
        for name, target in self._targets.items():
            found[target.partition(":")[2] if isinstance(target, str) else target.__name__] = name
        return found

    def named(self, name: str, package: str) -> Any:
        """The registered class called `name`, or the module of that name, for the `__getattr__` of `package`.

        Raises:
            AttributeError: neither is called so.
        """
        if name in (known := self.classes()):
            return self.get(known[name])
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def check(self, name: str) -> None:
        """Raise ValueError unless `create` knows the name."""
        if name not in self:
            raise ValueError(unknown(self.kind, name, self._targets))

    def create(self, name: str, *, preset: str | None = None, **settings: Any) -> Any:
        """Make one by name. A preset changes the defaults; explicit settings win over it.

        Raises:
            ValueError: unknown name, preset or setting, or a setting out of its range.
        """
        cls = self.get(name)
        what = f"{self.kind} {name!r}"
        presets = getattr(cls, "presets", {})
        if preset is not None:
            if not isinstance(preset, str) or preset not in presets:
                raise ValueError(unknown(f"preset of {what}", preset, presets))
            settings = {**presets[preset], **settings}
        allowed = [f.name for f in fields(cls) if f.init]
        for setting in settings:
            if setting not in allowed:
                raise ValueError(unknown(f"setting of {what}", setting, allowed))
        return cls(**settings)

    def from_dict(self, data: Mapping[str, Any]) -> Any:
        """Make one from plain data: its name under the registry's kind ("sampler", "cache"), then settings.

        Raises:
            ValueError: no mapping, no such key, or as for `create`.
        """
        if not isinstance(data, Mapping) or self.kind not in data:
            keys = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"data has no key {self.kind!r}; give a mapping as to_dict makes it, not {keys}")
        return self.create(data[self.kind], **{key: value for key, value in data.items() if key != self.kind})


def unknown(what: str, given: object, allowed: Any) -> str:
    """The message for a name that is not one of `allowed`, with a guess at what was meant."""
    names = sorted(allowed)
    close = difflib.get_close_matches(str(given), names, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {what}: {given!r}{hint}; allowed: {', '.join(names) or 'none'}"
