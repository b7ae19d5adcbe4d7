"""The OpenAI-compatible HTTP API: routes, bodies, errors, streaming, admission and metrics."""
