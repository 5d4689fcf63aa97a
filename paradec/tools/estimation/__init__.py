"""What decoding takes on a device, by arithmetic: no forward is run, and no weights are read.

`estimate` puts it together: `shapes` says what a model consists of, `devices` what a device can do (`probe` measures
this machine instead), `courses` which positions the steps evaluate, `costs` what that takes, and `result` says it.
"""
