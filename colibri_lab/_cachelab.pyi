"""Types of the compiled helpers of cache studies (cpp_bindings/cachelab). Private: use colibri_lab.cache."""

from typing import Any

from numpy.typing import NDArray

class Recency:
    def __init__(self, n_keys: int) -> None: ...
    def depths(self, sets: NDArray[Any]) -> NDArray[Any]: ...
