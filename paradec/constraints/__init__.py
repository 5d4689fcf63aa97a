"""Constraints on answers, as formal languages.

`values` defines the constraints that callers pass. A constraint becomes an expression (`expressions`, `regex`,
`json_schema`), then a minimal automaton over bytes (`dfa`), then one over tokens (`spelling`). Servers build it in a
subprocess with limits (`compiler`). `passes` sums over all texts, and `marginals` conditions logits on them.
"""
