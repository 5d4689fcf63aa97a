"""A value in the place of an object's attribute, which gives the place back and does not go along with copies.

The owner's `__getstate__` is replaced because all that is among an object's attributes goes along with its copies. The
value cannot see to that by a `__deepcopy__` or `__reduce__` of its own: a shallow copy asks the owner alone, and an
attribute that was not there before must be missing from the copy. A `__getstate__` in the owner's class would be asked
for every other object of that class, and `copy` and `pickle` find one among the owner's own attributes just as well.
"""

from __future__ import annotations

from typing import Any

STATE = "__getstate__"
"""What `copy` and `pickle` ask an object for, and find among its own attributes."""


class StandIn:
    """`value` in the place of `owner.name`. Copies of the owner, deep or shallow, and pickles have what was before.

    Several may be on top of each other, and be removed in any order.
    """

    def __init__(self, owner: Any, name: str, value: Any):
        self.owner, self.name, self.value = owner, name, value
        self.had = name in vars(owner)
        self.before = vars(owner).get(name)
        self.removed = False
        setattr(owner, name, value)
        if not isinstance(vars(owner).get(STATE), _State):
            vars(owner)[STATE] = _State(owner)
        vars(owner)[STATE].stand_ins.append(self)

    @property
    def on_top(self) -> bool:
        """Whether the attribute is this value now."""
        return vars(self.owner).get(self.name) is self.value

    def remove(self) -> None:
        """Give the place back; if someone else's value is in it, that stays."""
        self.removed = True
        state = vars(self.owner).get(STATE)
        if not isinstance(state, _State):
            return
        left = []
        for stand_in in reversed(state.stand_ins):  # those that were removed beneath this one come off with it
            if stand_in.removed and stand_in.on_top:
                stand_in.put_back(vars(self.owner))
            else:
                left.append(stand_in)
        state.stand_ins = left[::-1]
        if not left:
            del vars(self.owner)[STATE]

    def put_back(self, attributes: dict[str, Any]) -> None:
        """What was there before, into the owner's attributes or a copy of them."""
        if self.had:
            attributes[self.name] = self.before
        else:
            del attributes[self.name]


class _State:
    """Replaces an object's `__getstate__`: its attributes without stand-ins."""

    def __init__(self, owner: Any):
        self.owner = owner
        self.stand_ins: list[StandIn] = []

    def __call__(self) -> dict[str, Any]:
        own: Any = getattr(type(self.owner), STATE, None)
        plain = own in (None, getattr(object, STATE, None))
        state = dict(vars(self.owner) if plain else own(self.owner))
        del state[STATE]
        for stand_in in reversed(self.stand_ins):
            if state.get(stand_in.name) is stand_in.value:
                stand_in.put_back(state)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return self  # of the attributes alone, which their owner is given back later
