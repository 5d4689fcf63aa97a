"""The page at `/`: what is served, and how to ask. HTML without a script, and without anything from elsewhere."""

from __future__ import annotations

from html import escape

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; border: 1px solid #8888; padding: .75rem }}
td {{ padding: 0 1rem .25rem 0; vertical-align: top }}
</style>
<h1>{title}</h1>
<p>{said} OpenAI's clients take the base URL <code>{base}/v1</code>.</p>
<table>
<tr><td><code>POST /v1/chat/completions</code><td>a chat, through the model's chat template
<tr><td><code>POST /v1/completions</code><td>text as it is
<tr><td><code>POST /v1/systemone</code><td>questions about a text, answered with probabilities
<tr><td><a href="v1/models"><code>GET /v1/models</code></a><td>the model that is served
<tr><td><a href="health"><code>GET /health</code></a><td>200, or 503 once nothing is decoded any more
<tr><td><a href="metrics"><code>GET /metrics</code></a><td>counts and times, for Prometheus
</table>
<h2>Ask</h2>
<pre>curl {base}/v1/chat/completions \\
  -H "Content-Type: application/json" \\{key}
  -d '{{"messages": [{{"role": "user", "content": "Sort: pear fig apple"}}]}}'</pre>
<p>A body may also say <code>"paradec": {{"sampler": "credit", "cache": "dual"}}</code>: fields of
<code>paradec.Request</code>.</p>
</html>
"""


def index(name: str, base: str, keyed: bool) -> str:
    """The page as text.

    Args:
        name: what clients call the model; not said where a key is asked for. base: the server's address, without "/" at
            its end. keyed: whether a key is asked for.
    """
    key = '\n  -H "Authorization: Bearer $KEY" \\' if keyed else ""
    said = "Requests need an API key." if keyed else f"The model is <code>{escape(name)}</code>."
    return PAGE.format(title="paradec", said=said, base=escape(base), key=key)
