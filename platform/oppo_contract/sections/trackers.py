"""Spec sections of external experiment trackers: TensorBoard, MLflow, Weights & Biases (docs/trackers.md)."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from oppo_contract.fields import ALLOWED
from oppo_contract.sections.base import Section
from oppo_contract.spec_errors import SettingError

FOLDER_WORDS = "a folder below the run's own: names of letters, digits and . _ -, with / between them, none beginning with a dot"
ADDRESS_WORDS = "an http or https address without user and password"
USER_WORDS = "1 to 128 characters without spaces and colons"
LABEL_WORDS = "1 to 128 letters, digits, spaces and . _ -, the first a letter or digit"

RunFolder = Annotated[
    str,
    Field(
        min_length=1,
        max_length=200,
        pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*$",
        json_schema_extra={ALLOWED: FOLDER_WORDS},
    ),
]
Address = Annotated[str, Field(max_length=1024, pattern=r"^https?://[^\s]+$", json_schema_extra={ALLOWED: ADDRESS_WORDS})]
User = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\s:]+$", json_schema_extra={ALLOWED: USER_WORDS})]
Label = Annotated[
    str,
    Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra={ALLOWED: LABEL_WORDS}),
]
# Used by the engine in a run's folder.
RESERVED_FOLDERS = ("checkpoints", "spared", "trackers")


class TensorBoardTracker(Section):
    """Event files for TensorBoard."""

    folder: RunFolder = Field("tensorboard", description="Output folder, inside the run's folder.")

    @model_validator(mode="after")
    def check_folder(self) -> Self:
        if self.folder.split("/")[0] in RESERVED_FOLDERS:
            allowed = "another folder than " + ", ".join(RESERVED_FOLDERS)
            raise SettingError("folder", "is a folder reserved for the engine", value=self.folder, allowed=allowed)
        return self


class MlflowTracker(Section):
    """A run on an MLflow server."""

    uri: Address = Field(description="The server; the worker must allow its host (OPPO_TRACKER_HOSTS).")
    experiment: Label = Field("oppo", description="Experiment of the run; created if it does not exist.")
    username: User | None = Field(
        None,
        description="User for a server that asks; the password comes as MLFLOW_TRACKING_PASSWORD, a token instead of both as"
        " MLFLOW_TRACKING_TOKEN, from `secrets` or the engine's environment.",
    )

    @model_validator(mode="after")
    def check_uri(self) -> Self:
        _check_address("uri", self.uri)
        return self


class WandbTracker(Section):
    """A run of Weights & Biases."""

    project: Label = Field("oppo", description="Project of the run.")
    entity: Label | None = Field(None, description="Team or user that owns the project; empty: the API key's default.")
    mode: Literal["offline", "online"] = Field(
        "offline",
        description="Write the run below the run's folder, for `wandb sync`; or send it with the key WANDB_API_KEY, from"
        " `secrets` or the engine's environment.",
    )
    url: Address | None = Field(
        None, description="Self-hosted server; empty: api.wandb.ai. The worker must allow its host (OPPO_TRACKER_HOSTS)."
    )

    @model_validator(mode="after")
    def check_url(self) -> Self:
        if self.mode == "offline":
            self.reject_unused("url", "while mode is offline", "mode online")
        elif self.url is not None:
            _check_address("url", self.url)
        return self


class Trackers(Section):
    """External trackers; any number at once."""

    tensorboard: TensorBoardTracker | None = Field(None, description="TensorBoard; off when empty, on with `{}`.")
    mlflow: MlflowTracker | None = Field(None, description="MLflow; off when empty.")
    wandb: WandbTracker | None = Field(None, description="Weights & Biases; off when empty, on with `{}`.")
    samples_every: int = Field(
        10, ge=0, description="Send recorded samples (`logging.samples_per_step`) every n steps; 0: never."
    )
    flush_s: float = Field(
        30.0,
        ge=0,
        le=600,
        description="Max seconds to flush trackers at the end of the run; at most 5 when the run is paused or cancelled.",
    )

    @property
    def enabled(self) -> dict[str, Section]:
        """Trackers that are on, by key."""
        return {name: section for name in ("tensorboard", "mlflow", "wandb") if (section := getattr(self, name)) is not None}

    @model_validator(mode="after")
    def check_unused_settings(self) -> Self:
        if not self.enabled:
            for name in ("samples_every", "flush_s"):
                self.reject_unused(name, "without a tracker", "one of tensorboard, mlflow and wandb")
        return self


def _check_address(field: str, address: str) -> None:
    """Raise SettingError for a malformed server URL, or one with a user or password."""
    try:
        parts = urlsplit(address)
        valid = bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingError(field, "is not a server URL", value=address, allowed=ADDRESS_WORDS)
    if "@" in parts.netloc:
        # Do not show it: it may contain a password.
        raise SettingError(
            field, "contains a user or password; specs are readable by the whole team", value="…", allowed=ADDRESS_WORDS
        )
