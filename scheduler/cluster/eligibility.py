"""Finds the cards that a pod must not use: those that MtgpuPods share, and those that its constraints exclude.

`ClusterArrays` stores the cards here row by row, and adds the result to the tables that the filter evaluates. Models
and UUIDs come from Devices and pods, and other clients can write any number of them. So what is no longer in use must
be dropped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import Card, CardState
from mgpu.model.pod_constraints import NOT_LISTED, Constraints
from scheduler.engine.card_constraints import IN_USE_BY_MTGPUPODS, Exclusion

Codes = npt.NDArray[np.int64]

_MAX_EXCLUSIONS = 4096
"""The number of exclusions above which the codes are forgotten and a new mapping is started."""
_SPARE_MODELS = 64
"""Models are numbered again once there are more unused numbers than numbers in use plus this number."""


class Eligibility:
    """All cards and their exclusions. Each node has a row, and each of its cards has a column. Not thread-safe.

    Attributes:
        exclusions: The exclusions, that is, the reasons why a pod must not use a card, by code. A card that is not
            excluded has the code 0, which is not in this mapping. A code must never change its meaning, because the
            filter caches the result for a row under a key that contains the row's codes.
    """

    def __init__(self) -> None:
        self.exclusions: Mapping[int, Exclusion]
        self._exclusions: dict[int, Exclusion]
        self._code: dict[Exclusion, int]
        self._next_code = 1
        self._reset_exclusions()
        self._cards: list[tuple[Card, ...]] = [()]
        self._cards_of_model: Counter[str] = Counter()
        self._models: list[str] = []
        self._model_number: dict[str, int] = {}  # The position of a model in _models.
        self._model_numbers: Codes = np.full((1, 0), -1)  # The number of each card's model; -1 for no card.
        self._places: dict[str, set[tuple[int, int]]] = {}  # By UUID, the rows and columns of its cards.
        self._has_gpuid = np.zeros((1, 0), np.bool_)

    def put(self, row: int, cards: Sequence[CardState]) -> None:
        """Store the cards of a row in place of their last state."""
        now = tuple(state.card for state in cards)
        self._resize(row + 1, len(now))
        self._has_gpuid[row] = False
        self._has_gpuid[row, : len(cards)] = [bool(state.gpuid) for state in cards]
        if now == self._cards[row]:
            return
        self._clear(row)
        self._cards[row] = now
        for column, card in enumerate(now):
            self._places.setdefault(card.uuid, set()).add((row, column))
            self._model_numbers[row, column] = self._number_of(card.model)
            self._cards_of_model[card.model] += 1
        if len(self._models) > 2 * len(self._cards_of_model) + _SPARE_MODELS:
            self._renumber_models()

    def drop(self, row: int) -> None:
        self.put(row, ())

    def exclusion_codes(self, constraints: Constraints) -> Codes | None:
        """Return the code of each card under these constraints, or None if no card can be excluded.

        The array has all stored rows and columns, and may have more.
        """
        has_gpuids = self._has_gpuid.any()
        if not constraints.limits_cards and not has_gpuids:
            return None
        if len(self._exclusions) > _MAX_EXCLUSIONS:
            self._reset_exclusions()
        if constraints.limits_cards:
            codes = self._codes_of_constraints(constraints)
        else:
            codes = np.zeros(self._model_numbers.shape, np.int64)
        if has_gpuids:
            codes[self._has_gpuid] = self._code_of(IN_USE_BY_MTGPUPODS)
        return codes

    def _clear(self, row: int) -> None:
        for column, card in enumerate(self._cards[row]):
            self._places[card.uuid].discard((row, column))
            if not self._places[card.uuid]:
                del self._places[card.uuid]
            self._cards_of_model[card.model] -= 1
            if not self._cards_of_model[card.model]:
                del self._cards_of_model[card.model]
        self._cards[row] = ()
        self._model_numbers[row] = -1

    def _codes_of_constraints(self, constraints: Constraints) -> Codes:
        by_model = [self._code_of_reason(constraints.reason_against_model(model)) for model in self._models]
        codes = np.array([*by_model, 0], np.int64)[self._model_numbers]
        if constraints.uuids:
            unlisted = self._model_numbers >= 0
            for uuid in constraints.uuids:
                for place in self._places.get(uuid, ()):
                    unlisted[place] = False
            codes[unlisted] = self._code_of_reason(NOT_LISTED)
        return codes

    def _code_of_reason(self, reason: str | None) -> int:
        return 0 if reason is None else self._code_of(Exclusion(reason))

    def _code_of(self, exclusion: Exclusion) -> int:
        code = self._code.get(exclusion)
        if code is None:
            code = self._next_code
            self._next_code += 1
            self._code[exclusion] = code
            self._exclusions[code] = exclusion
        return code

    def _reset_exclusions(self) -> None:
        """Start a new mapping. Tables that were made before keep the old mapping."""
        self._code = {}
        self._exclusions = {}
        self.exclusions = self._exclusions

    def _number_of(self, model: str) -> int:
        number = self._model_number.get(model)
        if number is None:
            number = self._model_number[model] = len(self._models)
            self._models.append(model)
        return number

    def _renumber_models(self) -> None:
        """Number only the models that have cards."""
        new = {model: number for number, model in enumerate(self._cards_of_model)}
        renumbered = np.full(len(self._models) + 1, -1)
        for model, number in new.items():
            renumbered[self._model_number[model]] = number
        self._model_numbers = renumbered[self._model_numbers]  # -1, for no card, selects the last element.
        self._model_number = new
        self._models = list(new)

    def _resize(self, rows: int, columns: int) -> None:
        """Make room for this number of rows and columns. The number of rows is doubled, so that it rarely changes."""
        self._cards += [()] * (rows - len(self._cards))
        old_rows, old_columns = self._model_numbers.shape
        if rows > old_rows or columns > old_columns:
            more_rows = (2 * rows if rows > old_rows else old_rows) - old_rows
            more_columns = max(columns - old_columns, 0)
            padding = ((0, more_rows), (0, more_columns))
            self._model_numbers = np.pad(self._model_numbers, padding, constant_values=-1)
            self._has_gpuid = np.pad(self._has_gpuid, padding)
