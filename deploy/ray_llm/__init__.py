"""A request router for Ray Serve LLM (docs/ray_llm.md)."""
