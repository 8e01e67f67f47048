"""The `openai` package as a client of `moe-infinity serve`.

moe-infinity serve models/demo &
pip install openai
python examples/openai_client.py [URL]
"""

import sys

import openai

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is a fever?"}],
    max_tokens=48,
    temperature=0.7,
    seed=1,
)
print(answer.choices[0].message.content)
print(answer.usage)

stream = client.completions.create(
    model=model, prompt="The old house stood", max_tokens=48, temperature=0, stream=True
)
for chunk in stream:
    print(chunk.choices[0].text, end="", flush=True)
print()

# Three different continuations, each until the end of its first line, and how likely they were.
several = client.completions.create(
    model=model, prompt="In the morning", max_tokens=24, n=3, seed=7, stop="\n", logprobs=0
)
for choice in several.choices:
    assert choice.logprobs is not None
    total = sum(logprob or 0.0 for logprob in choice.logprobs.token_logprobs or [])
    print(f"{total:8.2f}  {choice.text!r}  {choice.finish_reason}")
