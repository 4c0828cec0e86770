"""The openai engine: any server with `/v1/completions`, such as vLLM, SGLang or llama.cpp."""
