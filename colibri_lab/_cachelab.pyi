from typing import Any

from numpy.typing import NDArray

class Recency:
    def __init__(self, n_keys: int) -> None: ...
    def depths(self, sets: NDArray[Any]) -> NDArray[Any]: ...
