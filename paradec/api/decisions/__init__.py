"""Questions with a few possible answers, read from a model without generating: `paradec.decide`."""
