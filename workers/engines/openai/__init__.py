"""The openai engine, which uses any server with `/v1/completions`, such as vLLM, SGLang or llama.cpp."""
