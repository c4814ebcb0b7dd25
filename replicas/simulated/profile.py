"""How long a step takes on a GPU that serves a model: a few constants in a file."""

from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt, ValidationError

from replicas.radix.sequence import Chunk

PROFILES = Path(__file__).with_name("profiles")
DEFAULT = "h100-llama-3.1-8b"


class ProfileError(ValueError):
    """No such profile, or not one; the message is one line for the user."""


class Profile(BaseModel):
    """Seconds and tokens. A step is linear in what it computes and reads; attention is not, and is
    counted apart."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_s: NonNegativeFloat  # of any step: launches, and reading the weights
    prefill_s: NonNegativeFloat  # products of a token that is prefilled
    decode_s: NonNegativeFloat  # products of a token that is decoded
    context_s: NonNegativeFloat  # reading a token of the context of those that decode
    attention_s: NonNegativeFloat  # of a prefilled token to one before it
    chunk_tokens: PositiveInt  # prefilled in a step, at most
    kv_tokens: PositiveInt
    kv_token_bytes: PositiveInt
    max_context: PositiveInt

    def seconds(self, chunks: Iterable[Chunk]) -> float:
        """A step that computes these chunks."""
        prefilled = decoded = context = 0
        attended = 0.0
        for chunk in chunks:
            tokens = chunk.end - chunk.start
            if tokens > 1:
                prefilled += tokens
                attended += tokens * (chunk.start + tokens / 2)
            else:
                decoded += 1
                context += chunk.end
        return self.step(prefilled, attended, decoded, context)

    def step(
        self, prefilled: int = 0, attended: float = 0.0, decoded: int = 0, context: int = 0
    ) -> float:
        """A step by its sums. `attended` sums the tokens that each prefilled one attends to."""
        return (
            self.step_s
            + self.prefill_s * prefilled
            + self.decode_s * decoded
            + self.context_s * context
            + self.attention_s * attended
        )

    @staticmethod
    def load(name: str) -> "Profile":
        """A profile that comes with us, by its name, or any by its path. Raises ProfileError."""
        path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
        try:
            return Profile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except OSError:
            known = ", ".join(sorted(found.stem for found in PROFILES.glob("*.yaml")))
            raise ProfileError(f"no profile {name!r}: name a .yaml file, or {known}") from None
        except yaml.YAMLError:
            raise ProfileError(f"{path}: not YAML") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ProfileError(f"{path}: {where}: {first['msg']}") from None
