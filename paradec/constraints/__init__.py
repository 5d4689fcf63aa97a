"""Constraints on answers, as formal languages.

`values` defines the constraints that callers pass. A constraint becomes an expression (`expressions`, `regex`,
`json_schema`), then a minimal automaton over bytes (`dfa`), then an automaton over tokens (`spelling`). Servers build
automata in subprocesses with limits (`compiler`). `passes` sums over all texts; `marginals` conditions logits on them.
"""
