"""Languages of answers.

`values` holds what callers give. A value becomes an expression (`expressions`, `regex`, `json_schema`), a minimal
automaton over bytes (`dfa`) and one over tokens (`spelling`); a server builds it in a process with
limits (`compiler`). `passes` sums over all texts of an `automaton`, and `marginals` conditions logits on them.
"""
