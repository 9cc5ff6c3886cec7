"""The section of a recipe that pushes what a run makes to the Hugging Face hub."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from meshtune.config.section import Section


class HubSection(Section):
    """Push the result to the hub when the run has ended, as `meshtune push` does, and on the way at its saves."""

    repository: str = Field(description="user/name or organisation/name; made if it does not exist.")
    public: bool = Field(default=False, description="Everybody may see it.")
    merge: bool = Field(default=False, description="Push the adapter merged into its base, at the end.")
    base_model: str | None = Field(default=None, description="The base's id on the hub, if its folder does not say it.")
    overwrite: bool = Field(default=False, description="Also into a repository with other files; they stay.")
    every: PositiveInt | None = Field(
        default=None, description="Saves between pushes of the result as it is by then; null: at the end only."
    )
