"""Any OpenAI-compatible server as an engine: vLLM, SGLang, llama.cpp, and what else speaks `/v1/completions`."""
