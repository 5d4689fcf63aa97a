"""Methods that take the steps of another one, on several continuations at once."""
