"""One offloaded model for several users over HTTP, in the words of OpenAI's API.

engine.py     the step loop: who waits, who runs, what a step is made of; no HTTP
sequences.py  what goes into the engine and comes out of it
passes.py     the forward passes
batch.py      the KV cache of the sequences that decode together
sampling.py   the next token of one sequence, as its request wants it
text.py       tokens to text, piece by piece; stop strings

app.py        the routes
protocol.py   request bodies
prompts.py    from a body to requests of the engine
exchange.py   one generating HTTP request, from the engine's outputs to its answer
answers.py    response bodies, whole or in chunks
auth.py       keys, sizes, refusals
metrics.py    what Prometheus and the page are told
page.html     the page at /
serve.py      start, drain, stop
"""
