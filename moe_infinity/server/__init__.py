"""A server that offers one model to several users, with the HTTP APIs of OpenAI and Anthropic.

Generation, without HTTP:

engine.py     the step loop: which sequences wait, which run, what a step computes
sequences.py  requests to the engine, its outputs, and a sequence between them
passes.py     the forward passes
batch.py      the KV cache of the sequences that decode together
prefix_cache.py  keys and values that later requests may begin with
sampling.py   the next token of one sequence
constraints.py  the tokens that a sequence's grammar allows next
text.py       tokens to text, piece by piece; stop strings
prompt_outputs.py  log-probabilities and embeddings of prompts

HTTP:

app.py        the routes
protocol.py   request bodies
prompts.py    from a request body to requests for the engine
grammars.py   grammars of answers, from schemas and expressions
call_forms.py  grammars of calls, as each kind of model writes them
exchange.py   one HTTP request that generates, from submission to its answer
answers.py    response bodies, whole or in chunks
messages.py   an answer's reasoning, content and calls of tools
responses.py  OpenAI's Responses API
embeddings.py  OpenAI's embeddings
anthropic.py  Anthropic's Messages API
auth.py       checks of origin, key and size
refusals.py   errors as answers
metrics.py    what /metrics and /stats show
page/         the page at / and its files
config.py     options of the server
serve.py      start, drain, stop
client.py     the client of `moe-infinity chat --url`
"""
