"""One offloaded model for several users over HTTP, in the words of OpenAI's API.

engine.py    the step loop: who waits, who runs, what a step is made of; no HTTP
batch.py     the KV cache of the sequences that decode together
sampling.py  the next token of one sequence, as its request wants it
text.py      tokens to text, piece by piece; stop strings
protocol.py  request and response bodies
answers.py   the outputs of the engine as one body or as a stream
app.py       routes
gate.py      keys, sizes, errors as the API words them
metrics.py   what Prometheus and the page at / are told
serve.py     start, drain, stop
"""
