"""An HTTP server with OpenAI's completions and chat completions on an ``LLM``."""
