"""KV-cache events of vLLM and SGLang: subscribed to, decoded, and told in block keys of ours."""
