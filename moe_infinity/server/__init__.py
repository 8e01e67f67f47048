"""A server that offers one model to several users, with the HTTP APIs of OpenAI and Anthropic.

Generation, without HTTP:

engine.py     the step loop: which sequences wait, which run, what a step computes
turns.py      whose turn it is: clients share the seats and the queue
sequences.py  a sequence, from a request to its last output: token ids become text
passes.py     the forward passes
decoding.py   the sequences that decode, in batches of those that a model computes alike
batch.py      the KV cache of such a batch
generation.py how an answer is generated: its request's settings over the checkpoint's
sampling.py   the next token of one sequence, and log-probabilities

HTTP:

app.py        the routes
connections.py  how long a connection may do nothing, and how many there may be
limits.py     the most of everything that a client chooses the size of
bodies.py     the body of a request, from bytes to fields
preparation.py  threads in which requests are prepared, with a share for each client
rendering.py  the process in which chat templates run
protocol.py   request bodies of OpenAI's API
prompts.py    from a request body to requests for the engine
grammars.py   grammars of answers and of calls, from schemas and expressions
exchange.py   one HTTP request that generates, from submission to its answer
answers.py    response bodies of OpenAI's API, whole or in chunks
messages.py   an answer's reasoning, content and calls of tools
responses.py  OpenAI's Responses API
anthropic.py  Anthropic's Messages API
refusals.py   checks of origin and key; errors as answers
metrics.py    what /metrics and /stats show
page/         the page at / and its files
config.py     options of the server
serve.py      start, drain, stop
"""
