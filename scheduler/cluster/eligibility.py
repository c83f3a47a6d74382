"""Which cards of all nodes are out for a pod: those with a GPUID, and by the model and the UUID of each those that its
wishes rule out; kept up to date row by row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import Card, CardState
from mgpu.model.pod_constraints import NOT_LISTED, Constraints
from scheduler.engine.card_constraints import IN_USE_BY_MTGPUPODS, Exclusion

Codes = npt.NDArray[np.int64]


_TEXTS_KEPT = 4096
_SPARE_MODELS = 64
"""Numbers of models that no card has any more, which are kept until they outnumber those in use, too."""


class Eligibility:
    """Not thread-safe. NodeArrays are nodes, columns their cards by position; row 0 is there from the start.

    exclusions: what codes stand for; a card that is not excluded has the code 0, which is no key. A code never gets
    another meaning: answers that were worked out for a row are kept under its codes. Models and texts come from Devices
    and pods, which others write, so those out of use are forgotten.
    """

    def __init__(self) -> None:
        self.exclusions: Mapping[int, Exclusion]
        self._exclusions: dict[int, Exclusion]
        self._code: dict[Exclusion, int]
        self._next_code = 1
        self._forget_exclusions()
        self._in_models: Counter[str] = Counter()
        self._cards: list[tuple[Card, ...]] = [()]
        self._models: list[str] = []
        self._number: dict[str, int] = {}  # of a model: its position in _models
        self._numbers: Codes = np.full((1, 0), -1)  # of each card's model; -1: no card
        self._places: dict[str, set[tuple[int, int]]] = {}  # UUID → (row, column)
        self._rows_in_use: set[int] = set()  # where any card has a GPUID
        self._in_use = np.zeros((1, 0), np.bool_)  # which ones have

    def put(self, row: int, cards: Sequence[CardState]) -> None:
        """The cards of a row as they are now."""
        now = tuple(state.card for state in cards)
        self._make_room(row + 1, len(now))
        self._put_in_use(row, [column for column, state in enumerate(cards) if state.gpuid])
        if now == self._cards[row]:
            return
        self._leave(row)
        self._cards[row] = now
        for column, card in enumerate(now):
            self._places.setdefault(card.uuid, set()).add((row, column))
            self._numbers[row, column] = self._number_of(card.model)
            self._in_models[card.model] += 1
        if len(self._models) > 2 * len(self._in_models) + _SPARE_MODELS:
            self._renumber_models()

    def drop(self, row: int) -> None:
        self.put(row, ())

    def bars(self, constraints: Constraints) -> Codes | None:
        """rows × cards: 0, or the key in `exclusions` of why the card is excluded. None: no card can be out.

        At least as large as all that was put.
        """
        if not constraints.limits_cards and not self._rows_in_use:
            return None
        if len(self._exclusions) > _TEXTS_KEPT:
            self._forget_exclusions()
        codes = self._by_wishes(constraints) if constraints.limits_cards else np.zeros(self._numbers.shape, np.int64)
        if self._rows_in_use:
            codes[self._in_use] = self._code_of(IN_USE_BY_MTGPUPODS)
        return codes

    def _leave(self, row: int) -> None:
        for column, card in enumerate(self._cards[row]):
            self._places[card.uuid].discard((row, column))
            if not self._places[card.uuid]:
                del self._places[card.uuid]
            self._in_models[card.model] -= 1
            if not self._in_models[card.model]:
                del self._in_models[card.model]
        self._cards[row] = ()
        self._numbers[row] = -1

    def _put_in_use(self, row: int, columns: Sequence[int]) -> None:
        if row in self._rows_in_use:
            self._in_use[row] = False
            self._rows_in_use.discard(row)
        if columns:
            self._in_use[row, columns] = True
            self._rows_in_use.add(row)

    def _by_wishes(self, constraints: Constraints) -> Codes:
        by_model = [self._code_of_reason(constraints.against(model)) for model in self._models]
        codes = np.array([*by_model, 0], np.int64)[self._numbers]
        if constraints.uuids:
            unlisted = self._numbers >= 0
            for place in self._listed(constraints.uuids):
                unlisted[place] = False
            codes[unlisted] = self._code_of_reason(NOT_LISTED)
        return codes

    def _listed(self, uuids: Iterable[str]) -> Iterable[tuple[int, int]]:
        return (place for uuid in uuids for place in self._places.get(uuid, ()))

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

    def _forget_exclusions(self) -> None:
        """Begin with a new table. Callers that hold the old one, with codes made of it, can go on reading it."""
        self._code = {}
        self._exclusions = {}
        self.exclusions = self._exclusions

    def _number_of(self, model: str) -> int:
        number = self._number.get(model)
        if number is None:
            number = self._number[model] = len(self._models)
            self._models.append(model)
        return number

    def _renumber_models(self) -> None:
        new = {model: number for number, model in enumerate(self._in_models)}
        renumbered = np.full(len(self._models) + 1, -1)
        for model, number in new.items():
            renumbered[self._number[model]] = number
        self._numbers = renumbered[self._numbers]  # -1, for no card, is the last one
        self._number = new
        self._models = list(new)

    def _make_room(self, rows: int, columns: int) -> None:
        self._cards += [()] * (rows - len(self._cards))
        have = self._numbers.shape
        if rows > have[0] or columns > have[1]:
            shape = (max(2 * rows, have[0]) if rows > have[0] else have[0], max(columns, have[1]))
            larger = np.full(shape, -1)
            larger[: have[0], : have[1]] = self._numbers
            self._numbers = larger
            in_use = np.zeros(shape, np.bool_)
            in_use[: have[0], : have[1]] = self._in_use
            self._in_use = in_use
