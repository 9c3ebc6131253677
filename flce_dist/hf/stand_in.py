"""What stands for logits in the output of a model that computed its loss without them."""

from typing import Any, NoReturn

_WAY_OUT = (
    "the loss was computed without logits; pass logits=True to the call of the model, or to "
    "use_linear_cross_entropy for every call"
)
_OPERATORS = (
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv pow rpow mod "
    "neg pos abs eq ne lt le gt ge len bool int float index getitem setitem array"
)


class LogitsNotComputed:
    """No tensor, and nothing that dispatches as one: wrappers, casts and sinks pass it by.

    Every use raises, and says how to get logits. It is copied and pickled as itself.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"there are no logits to ask for {name!r}: {_WAY_OUT}")

    def __reduce__(self) -> str:
        return "NO_LOGITS"

    def __repr__(self) -> str:
        return "NO_LOGITS"


def _refuse(self: LogitsNotComputed, *operands: Any) -> NoReturn:
    raise TypeError(f"there are no logits to compute with: {_WAY_OUT}")


for _name in _OPERATORS.split():
    setattr(LogitsNotComputed, f"__{_name}__", _refuse)

# The type's name is all that torch's functions say of an argument which is no tensor.
LogitsNotComputed.__name__ = "LogitsNotComputed (pass logits=True to get logits)"

NO_LOGITS = LogitsNotComputed()
