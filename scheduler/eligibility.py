"""Which cards of all nodes a pod's wishes rule out, worked out once per distinct wish and kept up to date by row."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mgpu.model.cards import Card, CardState
from mgpu.model.wishes import Wishes

Codes = npt.NDArray[np.int64]

_KEPT = 64
_Lists = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class Eligibility:
    """Not thread-safe. Rows are nodes, columns their cards by position.

    texts: what codes stand for; they never change, 0 is a card that is not ruled out.
    """

    def __init__(self) -> None:
        self.texts: list[str] = [""]
        self._code: dict[str, int] = {}
        self._cards: list[tuple[Card, ...]] = [()]
        self._columns = 0
        self._known: OrderedDict[_Lists, tuple[Wishes, Codes]] = OrderedDict()

    def put(self, row: int, cards: Sequence[CardState]) -> None:
        """The cards of a row as they are now."""
        now = tuple(state.card for state in cards)
        self._cards += [()] * (row + 1 - len(self._cards))
        if now != self._cards[row]:
            self._cards[row], self._columns = now, max(self._columns, len(now))
            for lists, (wishes, codes) in self._known.items():
                roomy = self._roomy(codes)
                self._fill(wishes, roomy, row)
                self._known[lists] = wishes, roomy

    def drop(self, row: int) -> None:
        self.put(row, ())

    def bars(self, wishes: Wishes) -> Codes | None:
        """rows × cards: 0, or the position in `texts` of why the card is out. None: no card can be out.

        At least as large as all that was put; to be read only.
        """
        if not wishes.limits_cards:
            return None
        lists = (wishes.models, wishes.excluded_models, wishes.uuids)
        known = self._known.get(lists)
        codes = self._roomy(np.zeros((0, 0), np.int64) if known is None else known[1])
        if known is None:
            for row in range(len(self._cards)):
                self._fill(wishes, codes, row)
        self._known[lists] = wishes, codes
        self._known.move_to_end(lists)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return codes

    def _fill(self, wishes: Wishes, codes: Codes, row: int) -> None:
        codes[row] = 0
        for column, card in enumerate(self._cards[row]):
            bar = wishes.bar(card)
            if bar is not None:
                codes[row, column] = self._code_of(bar)

    def _code_of(self, text: str) -> int:
        code = self._code.get(text)
        if code is None:
            code = self._code[text] = len(self.texts)
            self.texts.append(text)
        return code

    def _roomy(self, codes: Codes) -> Codes:
        """The same codes, or a larger copy where there are more rows or columns by now."""
        rows, columns = len(self._cards), self._columns
        if rows <= codes.shape[0] and columns <= codes.shape[1]:
            return codes
        larger = np.zeros((max(2 * rows, codes.shape[0]), max(columns, codes.shape[1])), np.int64)
        larger[: codes.shape[0], : codes.shape[1]] = codes
        return larger
