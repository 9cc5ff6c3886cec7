"""The modules of one model, for training methods to choose among."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.targets import Module, adapter_targets, choose, matches, modules
from meshtune.adapters.training_method import Method, Selection, VisionTraining
from meshtune.errors import UserError
from meshtune.families.expansion import new_layers
from meshtune.model.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class ModelModules:
    """The modules of a model, for methods to choose among (adapters.config.Modules)."""

    spec: ModelSpec
    by_name: dict[str, Module]

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelModules:
        return cls(spec, modules(spec))

    def every(self, *, routers: bool) -> list[str]:
        """All modules of the language model, a tied matrix once, with or without the routers of experts."""
        tied = "head" if self.spec.tied else None
        return [
            name
            for name, module in self.by_name.items()
            if module.part == "language" and module.node != tied and (routers or module.role != "router")
        ]

    def named(self, patterns: Sequence[str], where: str) -> list[str]:
        """The modules that names and patterns select; in a tied model embed_tokens and lm_head both mean the one
        matrix. Raises UserError for one that selects none."""
        return self._tied_once(choose(patterns, self.by_name, where))

    def of_layers(self, first: int | None, last: int | None, patterns: Sequence[str]) -> list[str]:
        """The modules of the first or last layers without routers, or those that patterns select there.

        Raises UserError for unknown names and for more layers than the model has.
        """
        layers = range(self.spec.layers)
        for field, n in (("last_layers", last), ("first_layers", first)):
            if n is not None and n > self.spec.layers:
                raise UserError(
                    f"{field} is {n}, but the model has {self.spec.layers} layers",
                    where=f"method.{field}",
                    fix=f"give at most {self.spec.layers}, or use method: full",
                )
        if last:
            layers = range(self.spec.layers - last, self.spec.layers)
        if first:
            layers = range(first)
        language = {name: module for name, module in self.by_name.items() if module.part == "language"}
        inside = [name for name, module in language.items() if module.layer is None or module.layer in layers]
        if not patterns:
            return [name for name in inside if self.by_name[name].layer is not None and not self._routes(name)]
        inside += [name for name in self.by_name if name not in language]
        chosen = choose(patterns, self.by_name, "method.modules")
        for pattern in patterns:
            if not any(matches(pattern, name) for name in inside):
                raise UserError(
                    f"'{pattern}' matches nothing in the chosen layers {layers.start} to {layers.stop - 1}",
                    where="method.modules",
                    fix="name modules of those layers, or leave last_layers and first_layers out",
                )
        return self._tied_once([name for name in chosen if name in inside])

    def of_new_layers(self, blocks: int) -> list[str]:
        """The modules of the layers that LLaMA-Pro has added."""
        new = new_layers(self.spec.layers, blocks)
        return [name for name, module in self.by_name.items() if module.part == "language" and module.layer in new]

    def choose(self, method: Method, vision: VisionTraining | None = None) -> Selection:
        """The modules that a method adapts and trains, with what `vision` adds and freezes.

        Raises UserError where the method is not possible with this model, for a part that the model does not have, and
        where nothing is left to train.
        """
        chosen = method.choose(self)
        if vision is None:
            return chosen
        if vision.train and self.spec.vision is None:
            raise UserError(
                f"this {self.spec.family} model has no {vision.train[0]}",
                where="vision.train",
                fix="leave it out, or give a model that sees",
            )
        adapted, trained = dict(chosen.adapted), set(chosen.trained)
        if vision.freeze_language:
            adapted = {name: config for name, config in adapted.items() if self.by_name[name].part != "language"}
            trained = {name for name in trained if self.by_name[name].part != "language"}
        trained |= {name for name, module in self.by_name.items() if module.part in vision.train}
        if method.adapters is not None:  # what lies in no module of the model has no place beside adapters of peft
            trained = {name for name in trained if not (self.by_name[name].bare and name.count(".") == 1)}
        if both := [name for name in adapted if name in trained]:
            raise UserError(
                f"{both[0]} is to have an adapter and to be trained in full",
                where="method.targets, vision.train",
                fix="name it in one of the two",
            )
        if not adapted and not trained:
            raise UserError(
                "the language model is frozen, and nothing else is trained",
                where="vision.freeze_language, vision.train",
                fix="set vision.train to [projector], or to [projector, tower]",
            )
        return Selection(adapted, [name for name in self.by_name if name in trained])

    def with_score(self, names: Sequence[str]) -> list[str]:
        """The modules with a reward model's score, through which nothing could learn if it stayed random."""
        return [name for name, module in self.by_name.items() if name in names or module.node == "score"]

    def adapted(self, config: LoraConfig) -> list[str]:
        """See `adapter_targets`."""
        return adapter_targets(config, self.by_name)

    def check_disjoint(self, adapted: Sequence[str], trained: Sequence[str]) -> None:
        """Raises UserError for a module that is to have an adapter and to be trained in full."""
        trained_nodes = {self.by_name[name].node for name in trained}
        for name in adapted:
            node = self.by_name[name].node
            if name in trained or (node == "head" and self.spec.tied and "embed" in trained_nodes):
                raise UserError(
                    f"{name} is to have an adapter and to be trained in full"
                    + (" (it shares the embedding's matrix)" if name not in trained else ""),
                    where="method.targets, method.train_modules",
                    fix="name it in one of the two",
                )

    def _routes(self, name: str) -> bool:
        return self.by_name[name].role == "router"

    def _tied_once(self, names: list[str]) -> list[str]:
        if not self.spec.tied:
            return names
        table = next(name for name, module in self.by_name.items() if module.node == "embed")
        renamed = {table if self.by_name[name].node == "head" else name for name in names}
        return [name for name in self.by_name if name in renamed]
