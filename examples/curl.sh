#!/usr/bin/env bash
# The server from a shell:  moe-infinity serve models/demo &  examples/curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

echo "== models"
curl -sS "$url/v1/models"; echo

echo "== chat"
curl -sS "$url/v1/chat/completions" -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "What is a fever?"}],
  "max_tokens": 32, "temperature": 0}'; echo

echo "== a stream"
curl -sSN "$url/v1/completions" -H 'Content-Type: application/json' -d '{
  "prompt": "Once upon a time", "max_tokens": 8, "stream": true,
  "stream_options": {"include_usage": true}}'

echo "== tokens"
curl -sS "$url/tokenize" -H 'Content-Type: application/json' -d '{"prompt": "Once upon a time"}'; echo

echo "== health and metrics"
curl -sS "$url/health"; echo
curl -sS "$url/metrics" | grep -v '^#' | head
