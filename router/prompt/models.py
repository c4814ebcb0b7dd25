"""The models of the fleet, as the API sees them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hotbranch.fingerprint import fingerprint, read_json
from router.prompt.render import Renderer


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_context` is prompt and output together, in tokens."""

    name: str
    renderer: Renderer
    max_context: int
    vocab_size: int
    fingerprint: str
    created: int  # seconds since the epoch


Models = Mapping[str, Model]


@dataclass(frozen=True, slots=True)
class Catalog:
    """What clients may name: the models, and LoRA adapters of them.

    `adapters` maps the names of those that the fleet serves now to their models' names. A model
    hides an adapter of the same name.
    """

    models: Models
    adapters: Callable[[], Mapping[str, str]]

    def find(self, name: str) -> tuple[Model, str] | None:
        """A model, and the adapter or an empty string; None for a name that nothing has."""
        if name in self.models:
            return self.models[name], ""
        base = self.adapters().get(name, "")
        return (self.models[base], name) if base in self.models else None

    def __iter__(self) -> Iterator[tuple[Model, str]]:
        """All models, then all adapters, as `find` gives them."""
        yield from ((model, "") for model in self.models.values())
        for name, base in sorted(self.adapters().items()):
            if base in self.models and name not in self.models:
                yield self.models[base], name


def load_model(name: str, model_dir: Path, max_context: int = 0, guards: bool = True) -> Model:
    """A model from a directory in the Hugging Face layout; `max_context` 0 takes the model's own.
    `guards` as of its Renderer.

    Raises OSError or ValueError when the directory has no usable tokenizer and configuration.
    """
    config = read_json(model_dir / "config.json")
    config = config.get("text_config", config)
    renderer = Renderer.load(model_dir, guards=guards)
    limit = max_context or int(config.get("max_position_embeddings", 0))
    if limit < 1:
        raise ValueError(f"{model_dir.name}: config.json has no max_position_embeddings")
    return Model(
        name=name,
        renderer=renderer,
        max_context=limit,
        vocab_size=int(config.get("vocab_size", renderer.tokenizer.vocab_size)),
        fingerprint=fingerprint(model_dir),
        created=int((model_dir / "tokenizer.json").stat().st_mtime),
    )
